"""The run's `report.html`: one file, its pictures inside, nothing loaded from anywhere."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

from . import layout, recipe
from .log import replace_file
from .plots import COLORS, write_plots
from .summary import RunLog
from .table import number, percent

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(directory: Path, runs: list[RunLog], summary: dict[str, Any]) -> Path:
    """Draws the pictures and writes the report.

    Args:
        directory: the run's folder; gets `report.html` and the PNG files.
        runs: logs of its recipes.
        summary: content of `summary.json`.

    Returns:
        Path of the report.
    """
    plots = [
        {"title": plot.title, "note": plot.note, "file": plot.file, "uri": _data_uri(directory / plot.file)}
        for plot in write_plots(directory, runs)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(number=number, percent=percent)
    lengths = {run.recipe: len(run.steps) for run in runs}
    html = environment.get_template("report.html.j2").render(
        summary=summary, plots=plots, colors=COLORS, recipes=recipe.RECIPES, lengths=lengths, setting=_setting()
    )
    replace_file(layout.report(directory), html.encode())
    return layout.report(directory)


def _setting() -> str:
    return (
        f"A ViT of depth {recipe.DEPTH}, width {recipe.DIM}, heads: {recipe.HEADS}, MLP ratio {recipe.MLP_RATIO}, "
        f"{recipe.PATCH} x {recipe.PATCH} patches, on the 8 x 8 digits of scikit-learn; AdamW, weight decay "
        f"{recipe.WEIGHT_DECAY}, batch {recipe.BATCH}, label smoothing {recipe.LABEL_SMOOTHING}."
    )


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
