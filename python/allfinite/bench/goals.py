"""What the ratios are meant to reach, and whether they do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allfinite.bench.case import BOTH, FORWARD, Cell

_MEMORY_BOUND = 64 * 2**20  # bytes moved from which on fp32 is bound by memory on both sides


@dataclass(frozen=True)
class Goal:
    """Each cell that ``concerns`` picks has a ratio of ``least`` or more; with ``mean``, their geometric mean has."""

    text: str
    least: float
    concerns: Callable[[Cell], bool]
    mean: bool = False


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was measured: the deciding ratio, and how many cells of how many reach it."""

    goal: Goal
    value: float
    reached: int
    cells: int

    @property
    def holds(self) -> bool:
        return self.value >= self.goal.least


def _norm(cell: Cell) -> bool:
    return cell.family in ("norm", "rms_norm")


def _attention(cell: Cell) -> bool:
    return cell.family in ("attention", "masked attention")


def _single(cell: Cell) -> bool:
    return cell.dtype == "float32" and not _attention(cell)


GOALS = (
    Goal("geometric mean of all cells", 2.5, lambda cell: True, mean=True),
    Goal("every cell", 0.95, lambda cell: True),
    Goal("fp32, 64 MB moved and more", 0.95, lambda cell: _single(cell) and cell.work >= _MEMORY_BOUND),
    Goal("other fp32 but attention", 1.1, lambda cell: _single(cell) and cell.work < _MEMORY_BOUND),
    Goal(
        "16-bit norms and softmax, forward",
        1.6,
        lambda cell: (
            (_norm(cell) or cell.family == "softmax") and cell.dtype != "float32" and cell.direction == FORWARD
        ),
    ),
    Goal(
        "16-bit norms and softmax, with backward",
        1.5,
        lambda cell: (_norm(cell) or cell.family == "softmax") and cell.dtype != "float32" and cell.direction == BOTH,
    ),
    Goal("rms_norm and add_rms_norm", 2.5, lambda cell: cell.family == "rms_norm"),
    Goal("cross_entropy", 1.7, lambda cell: cell.family == "cross_entropy"),
    Goal(
        "fp16 attention with backward",
        6,
        lambda cell: _attention(cell) and cell.dtype == "float16" and cell.direction == BOTH,
    ),
    Goal("fp32 and bf16 attention", 0.95, lambda cell: cell.family == "attention" and cell.dtype != "float16"),
    Goal(
        "fp32 and bf16 attention with masks and biases",
        1.2,
        lambda cell: cell.family == "masked attention" and cell.dtype != "float16",
    ),
    Goal("10 000 small tensors", 2, lambda cell: cell.family == "small gradients"),
)


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    """The goals that some of ``cells`` concern, each with the ratio that decides it."""
    verdicts = []
    for goal in GOALS:
        ratios = [cell.ratio for cell in cells if goal.concerns(cell)]
        if ratios:
            value = statistics.geometric_mean(ratios) if goal.mean else min(ratios)
            verdicts.append(Verdict(goal, value, sum(ratio >= goal.least for ratio in ratios), len(ratios)))
    return verdicts
