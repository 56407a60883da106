"""``python -m allfinite bench``: medians of turns, goals judged by the right cells, and nothing lost on the way."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from allfinite.bench import report, run
from allfinite.bench.case import BOTH, FORWARD, Case, Cell
from allfinite.bench.goals import judge
from allfinite.bench.measure import alternate, measure
from allfinite.cli import main

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cell(
    ratio: float, family: str = "norm", dtype: str = "bfloat16", direction: str = FORWARD, work: float = 1e6
) -> Cell:
    return Cell("op", family, direction, dtype, "1x1", 1, 1.0, ratio, ratio, work, 1.0, "GB/s", 0.5)


def verdicts(*cells: Cell) -> dict[str, tuple[float, bool, int, int]]:
    return {v.goal.text: (v.value, v.holds, v.reached, v.cells) for v in judge(cells)}


def test_calls_take_turns() -> None:
    """All of one side first would charge it with what warms up or slows down on the way."""
    order: list[str] = []
    alternate(lambda: order.append("a"), lambda: order.append("b"), 0.01)
    text = "".join(order[4:])  # after the warm-up
    assert "ba" in text
    assert "ab" in text
    assert abs(text.count("a") - text.count("b")) < len(text) / 2


def test_a_slower_call_has_the_larger_median() -> None:
    small, large = torch.ones(1), torch.ones(2_000_000)
    fast, slow = alternate(lambda: small.add_(1), lambda: large.add_(1), 0.1)
    assert fast < slow


def test_a_case_becomes_a_cell() -> None:
    x = torch.ones(1000)
    made = measure(Case("op", "norm", FORWARD, torch.float32, "1000", lambda: x.add(1), lambda: x.add(1), 8000), 0.02)
    assert made.ratio == pytest.approx(made.torch_ms / made.ours_ms)
    assert made.rate == pytest.approx(8000 / made.ours_ms / 1e6)
    assert made.threads == torch.get_num_threads()
    assert made.share > 0


def test_goals_take_the_worst_cell_and_the_geometric_mean() -> None:
    found = verdicts(cell(4), cell(1))
    assert found["geometric mean of all cells"] == (pytest.approx(2), False, 1, 2)
    assert found["every cell"] == (1, True, 2, 2)
    assert found["16-bit norms and softmax, forward"] == (1, False, 1, 2)


@pytest.mark.parametrize(
    ("made", "goal"),
    [
        (cell(1, direction=BOTH), "16-bit norms and softmax, with backward"),
        (cell(1, "rms_norm"), "rms_norm and add_rms_norm"),
        (cell(1, "cross_entropy"), "cross_entropy"),
        (cell(1, dtype="float32"), "other fp32 but attention"),
        (cell(0.9, dtype="float32", work=1e8), "fp32, 64 MB moved and more"),
        (cell(5, "masked attention", "float16", BOTH), "fp16 attention with backward"),
        (cell(0.9, "attention"), "fp32 and bf16 attention"),
        (cell(1.1, "masked attention", "float32"), "fp32 and bf16 attention with masks and biases"),
        (cell(1.9, "small gradients"), "10 000 small tensors"),
    ],
)
def test_each_goal_sees_its_cells(made: Cell, goal: str) -> None:
    assert not verdicts(made)[goal][1]


def test_a_goal_without_cells_is_not_judged() -> None:
    assert "cross_entropy" not in verdicts(cell(1))


@pytest.mark.parametrize("family", [name for name in run.FAMILIES if name != "gradients"])
def test_every_case_runs_on_both_sides(family: str) -> None:
    """The first cases of each family, in one dtype: a case that raises would end a run of minutes."""
    cases = run.FAMILIES[family]([torch.float32])
    for _ in range(4):
        case = next(cases)
        case.ours()
        case.torch()


def small_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    for dtype in dtypes:
        x = torch.ones(10, dtype=dtype)
        yield Case("add", "norm", FORWARD, dtype, "10", lambda x=x: x + 1, lambda x=x: x + 1, 40)  # type: ignore[misc]


def test_a_run_writes_table_csv_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FAMILIES", {"small": small_cases})
    monkeypatch.setattr(run, "copy_rate", lambda *_: 1.0)
    monkeypatch.setattr(run, "product_rate", lambda *_: 1.0)
    lines: list[str] = []
    before = torch.get_num_threads()
    table, picture = tmp_path / "t.csv", tmp_path / "p.png"
    cells = run.run(run.Options(["small"], ["fp32", "fp16"], [1, 2], 0.001, table, picture), lines.append)
    assert torch.get_num_threads() == before
    assert [(c.dtype, c.threads) for c in cells] == [("float32", 1), ("float32", 2), ("float16", 1), ("float16", 2)]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["ratio"]) for row in rows] == [c.ratio for c in cells]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert report.line(cells[0]) in lines
    assert any("every cell" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "cuda"], "expected --device cpu, the only one with kernels for every op, but got cuda"),
        (["--threads", "0"], "expected --threads of at least 1, but got 0"),
        (["--seconds", "0"], "expected --seconds above 0, but got 0.0"),
        (["--csv", "missing/t.csv"], "expected missing/t.csv in a folder that exists, but there is none"),
    ],
)
def test_impossible_options_are_one_sentence(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"allfinite bench: {complaint}\n"
