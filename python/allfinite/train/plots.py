"""Pictures of a job: one curve a recipe over the steps, each picture a PNG file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .summary import RunLog

COLORS = {"stock": "#d1495b", "sdpa": "#e8a33d", "allfinite": "#2066a8", "advised": "#3d9970"}
_INK = "#24292f"
_GRID = "#e4e7eb"
# Single-batch losses and logits are noisy: a running mean over this many steps is drawn over the faint raw curve.
_SMOOTH = 15


@dataclass(frozen=True)
class Plot:
    """One picture of the report.

    Attributes:
        file: name of the PNG file.
        title: what is shown.
        note: one sentence on how to read it.
        draw: draws all runs into the axes.
    """

    file: str
    title: str
    note: str
    draw: Callable[[Axes, list[RunLog]], None]


def _draw_loss(axes: Axes, runs: list[RunLog]) -> None:
    for run in runs:
        steps, values = run.series("loss")
        axes.plot(steps, values, color=COLORS[run.recipe], alpha=0.18, linewidth=0.8)
        _curve(axes, run, steps, _running_mean(values))
    axes.set_ylabel("training loss")


def _draw_logit(axes: Axes, runs: list[RunLog]) -> None:
    for run in runs:
        steps, values = run.series("logit")
        _curve(axes, run, steps, values)
    axes.set_yscale("log")
    axes.set_ylabel("largest |q · k|")
    limits = {run.limit for run in runs}
    if limits and max(limits) < 1e6:
        limit = limits.pop()
        axes.axhline(limit, color=_INK, linewidth=1, linestyle=(0, (5, 3)))
        axes.annotate(
            f"{limit:.0f}: the largest number of fp16",
            (0.995, limit),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -13),
            textcoords="offset points",
            ha="right",
            color=_INK,
            fontsize=9,
        )


def _draw_scale(axes: Axes, runs: list[RunLog]) -> None:
    for run in runs:
        _curve(axes, run, *run.series("scale"))
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")


def _draw_accuracy(axes: Axes, runs: list[RunLog]) -> None:
    for run in runs:
        steps, values = run.series("accuracy")
        if run.end:
            steps, values = [*steps, len(run.steps)], [*values, run.end["accuracy"]]
        _curve(axes, run, steps, [100 * value for value in values], marker="o")
    axes.set_ylabel("test accuracy, %")


def _draw_underflow(axes: Axes, runs: list[RunLog]) -> None:
    for run in runs:
        steps, values = run.series("underflow")
        _curve(axes, run, steps, [100 * value for value in values])
    axes.set_ylabel("gradient elements underflowed, %")


PLOTS = (
    Plot("loss.png", "Training loss", "A cross marks a dead run: from there on every loss is NaN.", _draw_loss),
    Plot(
        "logit.png",
        "Largest attention logit",
        "Measured in fp32 beside the model, before the scale, the same way for every recipe.",
        _draw_logit,
    ),
    Plot("scale.png", "Loss scale", "Each halving is a skipped step.", _draw_scale),
    Plot("accuracy.png", "Test accuracy", "Images whose scores are not finite count as wrong.", _draw_accuracy),
    Plot(
        "underflow.png",
        "Underflowed gradients",
        "Share of the scaled gradient's elements that are zero or below the smallest normal number of the dtype. A "
        "softmax that picks a single token gives q and k a gradient of exactly zero, which counts as well.",
        _draw_underflow,
    ),
)


def write_plots(directory: Path, runs: list[RunLog]) -> list[Plot]:
    """Draws every picture into the folder.

    Args:
        directory: the run's folder.
        runs: logs of its recipes.

    Returns:
        The pictures, in the order of the report.
    """
    for plot in PLOTS:
        figure = Figure(figsize=(8, 3.8), dpi=128)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.095, 0.14, 0.885, 0.74))
        plot.draw(axes, runs)
        _style(axes, plot.title)
        figure.savefig(directory / plot.file)
    return list(PLOTS)


def _curve(axes: Axes, run: RunLog, steps: list[int], values: list[float], marker: str = "") -> None:
    color = COLORS[run.recipe]
    axes.plot(steps, values, color=color, linewidth=1.8, marker=marker, markersize=3.5, label=run.recipe)
    if run.end and run.end["died"]:
        finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        if finite:
            axes.plot(*finite[-1], color=color, marker="x", markersize=11, markeredgewidth=2.8, zorder=5)


def _running_mean(values: list[float]) -> list[float]:
    """Mean over the last few finite values; NaN where the value itself is not finite, so that the curve ends there."""
    means = []
    for i, value in enumerate(values):
        window = [v for v in values[max(0, i + 1 - _SMOOTH) : i + 1] if math.isfinite(v)]
        means.append(sum(window) / len(window) if math.isfinite(value) else math.nan)
    return means


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_xlabel("step")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#8c959f")
    axes.tick_params(colors=_INK)
    axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0), labelcolor=_INK)
