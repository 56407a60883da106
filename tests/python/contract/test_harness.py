"""The harness finds planted faults, names the rule, and makes the case small; its report is Python that runs."""

import re
from types import SimpleNamespace

import pytest
import torch

import allfinite
from contract import attention, gradients, norms, planted, update_scale
from contract.base import OpContract
from contract.engine import run_batch

NORM = norms.LAYER_NORM.contract
FAULTS: dict[str, tuple[OpContract, SimpleNamespace, str]] = {
    "three ulps off": (NORM, planted.norm_with(output=planted.three_ulps_off), "F3"),
    "NaN becomes 0": (NORM, planted.norm_with(output=planted.nan_becomes_zero), "F2"),
    "NaN gradient becomes 0": (NORM, planted.norm_with(dx=planted.nan_becomes_zero), "F2"),
    "infinity is saturated": (NORM, planted.norm_with(output=planted.saturates), "F1|F2"),
    "depends on the batch": (NORM, planted.norm_with(output=planted.depends_on_the_batch), "F3|F5, a row alone"),
    "depends on the threads": (NORM, planted.norm_with(output=planted.depends_on_the_threads), "F5, . and 5 threads"),
    "small gradients vanish": (NORM, planted.norm_with(dx=planted.flushes_small_gradients), "F3|F4"),
    "dgamma in bf16": (NORM, planted.norm_with(dweight=planted.rounds_sums_to_bf16), "F3"),
    "strides are ignored": (NORM, planted.norm_that_ignores_strides(), "F"),
    "mask is dropped": (attention.ATTENTION, planted.attention_without_mask(), "F"),
    "D from the rounded output": (attention.ATTENTION, planted.attention_with_rounded_d(), "F3"),
    "flag is cleared": (gradients.UNSCALE, planted.unscale_that("clears the flag"), "F2"),
    "shared memory twice": (gradients.UNSCALE, planted.unscale_that("scales shared memory twice"), "F3"),
    "norm in float32": (gradients.GRAD_STATS, planted.stats_in_float32(), "F3"),
    "scale in float32": (update_scale.UPDATE_SCALE, planted.scale_update_in_float32(), "F3"),
}
LINES, CHARACTERS = 45, 3500  # of a report: two calls and a comment fit


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_made_small(fault: str) -> None:
    """A harness that cannot fail, or that fails with a page of numbers."""
    contract, api, rule = FAULTS[fault]
    tally = run_batch(contract, 0, 0, 1500, api)
    assert tally.failures, f"not found in {tally.cases} cases"
    report = tally.failures[0]
    assert re.search(f"^# ({rule})", report, re.MULTILINE), report
    assert len(report.splitlines()) <= LINES, report
    assert len(report) <= CHARACTERS, report


def test_a_report_runs_by_itself() -> None:
    """A reproducer that does not run, or runs on other numbers than those that failed."""
    report = run_batch(NORM, 0, 0, 1500, planted.norm_with(output=planted.three_ulps_off)).failures[0]
    names: dict[str, torch.Tensor] = {}
    exec(report, names)
    exact = torch.nn.functional.layer_norm(*(None if t is None else t.double() for t in (names["x"],)), names["shape"])
    assert names["y"].shape == exact.shape
    assert names["dx"].dtype == names["x"].dtype


def test_the_same_seed_gives_the_same_cases() -> None:
    """A printed seed that does not repeat the run."""
    first, second = (run_batch(NORM, 7, 3, 60, allfinite) for _ in range(2))
    assert first.combinations == second.combinations
    assert first.worst == second.worst
    assert first.worst != run_batch(NORM, 8, 3, 60, allfinite).worst


def test_every_kind_comes_up() -> None:
    """A strategy that never draws what it lists."""
    tally = run_batch(NORM, 1, 0, 500, allfinite)
    seen = {kind for dimension, kind in tally.kinds if dimension in ("dtype", "x", "layout", "cross_check")}
    assert {"float16", "bfloat16", "float32", "float64"} <= seen
    assert {"nan", "inf", "-inf", "max", "lowest", "subnormal", "zeros", "whole range", "offset", "constant"} <= seen
    assert {"contiguous", "misaligned", "every second", "padded", "transposed", "expanded"} <= seen
    assert {"row alone", "loss scale", "layout", "one gradient", "threads"} <= seen
