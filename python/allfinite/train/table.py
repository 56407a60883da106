"""Numbers and results for the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .summary import RunLog


def number(value: float | None) -> str:
    """A short form: no decimals from 1000 on, three digits below, a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal; a dash for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def print_results(console: Console, summary: dict[str, Any], runs: list[RunLog]) -> None:
    """The table of the job, then verdict and advice of each recipe.

    Args:
        console: where to print.
        summary: content of `summary.json`.
        runs: logs of its recipes, in the same order.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("recipe", "lr", "NaN at", "died at", "lost", "scale", "logit", "past limit", "loss", "accuracy", "time")
    for column in columns:
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for entry, run in zip(summary["recipes"], runs, strict=True):
        steps = max(1, len(run.steps))
        table.add_row(
            entry["recipe"],
            f"{entry['lr']:g}",
            number(entry["first_nonfinite_step"]),
            number(entry["died_at_step"]),
            percent(entry["skipped_steps"] / steps),
            number(entry["final_scale"]),
            number(entry["largest_logit"]),
            number(entry["logit_limit_step"]),
            number(entry["loss"]),
            percent(entry["accuracy"]),
            "-" if entry["seconds"] is None else f"{entry['seconds']:.0f} s",
            style="red" if entry["died_at_step"] else None,
        )
    console.print(table)
    for entry in summary["recipes"]:
        verdict = Text.assemble((f"{entry['recipe']}: ", "bold"), entry["verdict"])
        if entry["advice"]:
            verdict.append(f" {entry['advice']}", "italic")
        console.print(verdict)
    if summary["comparison"]:
        console.print(Text(" ".join(summary["comparison"])))
