"""Measured cells as lines of text, CSV and a picture."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TextIO

from allfinite.bench.case import Cell
from allfinite.bench.goals import Verdict

HEADER = (
    f"{'op':28} {'direction':16} {'dtype':9} {'shape':26} {'threads':>7} {'ours ms':>9} {'torch ms':>9} "
    f"{'ratio':>6}  rate"
)
_COLORS = {"float32": "#2066a8", "bfloat16": "#3d9970", "float16": "#d1495b"}
_MARKERS = {"forward": "o", "forward+backward": "s"}


def line(cell: Cell) -> str:
    """One row under ``HEADER``: times, the ratio torch / ours, and the rate with its share of the machine's best."""
    return (
        f"{cell.op:28} {cell.direction:16} {cell.dtype:9} {cell.shape:26} {cell.threads:7} {cell.ours_ms:9.3f} "
        f"{cell.torch_ms:9.3f} {cell.ratio:6.2f}  {cell.rate:.1f} {cell.unit}, {cell.share:.0%}"
    )


def summary(cells: Sequence[Cell], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Geometric means by op, then the goals and whether each holds."""
    yield "torch / ours, geometric mean and smallest, by op:"
    for op in dict.fromkeys(cell.op for cell in cells):
        ratios = [cell.ratio for cell in cells if cell.op == op]
        yield f"  {op:28} {statistics.geometric_mean(ratios):6.2f} {min(ratios):6.2f}   ({len(ratios)} cells)"
    yield "goals:"
    for verdict in verdicts:
        word = "holds" if verdict.holds else "MISSED"
        yield (
            f"  {word:6} {verdict.goal.text}: {verdict.value:.2f}, at least {verdict.goal.least:g} wanted "
            f"({verdict.reached} of {verdict.cells} cells reach it)"
        )


def write_csv(cells: Sequence[Cell], file: TextIO) -> None:
    """All fields of all cells, one row a cell."""
    writer = csv.DictWriter(file, [field.name for field in fields(Cell)])
    writer.writeheader()
    writer.writerows(asdict(cell) for cell in cells)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """A picture of the ratios, one row an op, one mark a cell; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    ops = list(dict.fromkeys(cell.op for cell in cells))
    figure = Figure(figsize=(10, 1.5 + 0.5 * len(ops)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for dtype, color in _COLORS.items():
        for direction, marker in _MARKERS.items():
            shown = [cell for cell in cells if cell.dtype == dtype and cell.direction == direction]
            # The kinds of one op lie a little apart, so that they can be told from one another.
            shift = 0.12 * (list(_COLORS).index(dtype) - 1) + 0.05 * (1 if marker == "s" else -1)
            axes.scatter(
                [cell.ratio for cell in shown],
                [ops.index(cell.op) + shift for cell in shown],
                s=14,
                color=color,
                marker=marker,
                alpha=0.7,
                label=f"{dtype} {direction}",
            )
    axes.axvline(1, color="#24292f", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(ops)), ops)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as torch's own op (time of torch / time of ours)")
    axes.grid(axis="x", color="#e4e7eb")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
