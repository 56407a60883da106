"""summary.json: exactly the promised fields, strict JSON, numbers that follow from the logs."""

import json
from pathlib import Path

import pytest

from allfinite.train import layout
from allfinite.train.options import Options
from allfinite.train.summary import read_run, write_summary
from support.runs import write_run

FIELDS = [
    "recipe",
    "seed",
    "lr",
    "first_nonfinite_step",
    "died_at_step",
    "nonfinite_steps",
    "skipped_steps",
    "final_scale",
    "largest_logit",
    "logit_limit_step",
    "loss",
    "accuracy",
    "seconds",
    "verdict",
    "advice",
]


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, dict[str, object]]:
    options = write_run(tmp_path)
    write_summary(tmp_path, options)
    text = layout.summary(tmp_path).read_text()
    summary = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    return {entry["recipe"]: entry for entry in summary["recipes"]}


def test_every_recipe_has_exactly_the_promised_fields(entries: dict[str, dict[str, object]]) -> None:
    assert list(entries) == ["stock", "sdpa", "allfinite", "advised"]
    for entry in entries.values():
        assert list(entry) == FIELDS


def test_dead_run_is_counted_from_its_log(entries: dict[str, dict[str, object]]) -> None:
    stock = entries["stock"]
    assert stock["first_nonfinite_step"] == 31
    assert stock["died_at_step"] == 50
    assert stock["nonfinite_steps"] == 20
    assert stock["skipped_steps"] == 20
    assert stock["final_scale"] == 2.0**-4
    assert stock["logit_limit_step"] == 31
    assert stock["loss"] is None


def test_finite_run_has_null_where_nothing_happened(entries: dict[str, dict[str, object]]) -> None:
    advised = entries["advised"]
    assert advised["first_nonfinite_step"] is None
    assert advised["died_at_step"] is None
    assert advised["logit_limit_step"] is None
    assert advised["largest_logit"] == 600.0
    assert advised["lr"] == pytest.approx(0.003, rel=1e-12)


def test_an_infinite_logit_passes_the_limit_but_is_not_the_largest(entries: dict[str, dict[str, object]]) -> None:
    """The largest finite one says how far the logits grew; inf would say nothing."""
    assert entries["stock"]["largest_logit"] == 64000.0


def test_unfinished_recipe_is_summarised_without_an_end(tmp_path: Path) -> None:
    options = write_run(tmp_path)
    log = layout.log(tmp_path, "sdpa")
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:8]))
    entry = write_summary(tmp_path, options)["recipes"][1]
    assert entry["verdict"] == "Stopped at step 7 of 60."
    assert entry["accuracy"] is None
    assert entry["seconds"] is None


def test_recipe_without_a_log_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    layout.log(tmp_path, "sdpa").unlink()
    assert [run.recipe for run in read_run(tmp_path, Options(steps=60))] == ["stock", "allfinite", "advised"]
