"""`python -m allfinite train`: the main job."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allfinite.train import recipe
from allfinite.train.options import DTYPES, OptionError, plan_job

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

# Module and the name under which it is installed.
_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "jinja2": "jinja2", "rich": "rich", "numpy": "numpy"}

FAILED = 1
USAGE = 2


def add(subcommands: Subcommands) -> None:
    """Adds the subcommand to a parser."""
    parser = subcommands.add_parser(
        "train",
        help="train a small ViT in fp16 by four recipes, and report which ones stay finite, and why",
        description="Trains a small ViT on scikit-learn's digits by up to four recipes and reports which ones stay "
        "finite, and why. Writes logs, pictures, summary.json and report.html.",
    )
    parser.add_argument("--recipe", action="append", metavar="NAME", help=f"repeatable: {', '.join(recipe.RECIPES)}")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: fp16)")
    parser.add_argument("--steps", type=int, help=f"steps of each recipe (default: {recipe.DEFAULT_STEPS})")
    parser.add_argument("--lr", type=float, help=f"peak learning rate (default: {recipe.DEFAULT_LR}; advised: a tenth)")
    parser.add_argument("--seed", type=int, help=f"of weights and batches (default: {recipe.DEFAULT_SEED})")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the run's folder (default: a new one in runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in FOLDER (default: the newest run)")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Runs the job; exit code 2 and one sentence for impossible options, 1 if a recipe's process failed."""
    given: dict[str, Any] = {name: getattr(parsed, name) for name in ("device", "dtype", "steps", "lr", "seed")}
    given["recipes"] = tuple(parsed.recipe) if parsed.recipe else None
    try:
        _check_extras()
        job = plan_job({name: value for name, value in given.items() if value is not None}, parsed.out, parsed.resume)
        from rich.console import Console

        from allfinite.train.run import RunError, run_job

        try:
            # Without a terminal there is no width to keep to, and the table needs this one.
            return run_job(job, Console(width=None if sys.stdout.isatty() else 120))
        except RunError as error:
            print(f"allfinite train: {error}", file=sys.stderr)
            return FAILED
    except OptionError as error:
        print(f"allfinite train: {error}", file=sys.stderr)
        return USAGE


def _check_extras() -> None:
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(f"{', '.join(missing)} is missing: type `pip install allfinite[train]`")
