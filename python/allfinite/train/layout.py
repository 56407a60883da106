"""Names of the files in a run's folder."""

from __future__ import annotations

from pathlib import Path


def log(directory: Path, recipe: str) -> Path:
    """JSONL log of a recipe."""
    return directory / f"{recipe}.jsonl"


def checkpoint(directory: Path, recipe: str) -> Path:
    """Checkpoint of a recipe."""
    return directory / f"{recipe}.pt"


def errors(directory: Path, recipe: str) -> Path:
    """What a recipe's process wrote to standard error; removed if empty."""
    return directory / f"{recipe}.stderr"


def summary(directory: Path) -> Path:
    """Summary of the run."""
    return directory / "summary.json"


def report(directory: Path) -> Path:
    """Report of the run."""
    return directory / "report.html"
