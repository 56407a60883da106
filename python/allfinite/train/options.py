"""What a job is asked to do: its options, checked once, and kept in the run's folder as `run.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from . import recipe
from .log import replace_file

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RUN_FILE = "run.json"
DEFAULT_ROOT = Path("runs")


class OptionError(ValueError):
    """An impossible option; its text is the one sentence that the user reads."""


@dataclass(frozen=True)
class Options:
    """The options that decide a run's numbers; a run can be resumed only with the same ones.

    Attributes:
        recipes: names of the recipes, in the order of `recipe.RECIPES`.
        device: "cpu", "cuda" or "cuda:N".
        dtype: autocast's type: "fp16", "bf16", or "fp32" for no autocast.
        steps: optimizer steps of each recipe, at least 1.
        lr: peak learning rate of the recipes with factor 1, finite and above 0.
        seed: of the initialisation and the order of the batches, 0 to 2^63 - 1.

    Raises:
        OptionError: a value is impossible; the text names the option, what is expected and what came.
    """

    recipes: tuple[str, ...] = tuple(recipe.RECIPES)
    device: str = "cpu"
    dtype: str = "fp16"
    steps: int = recipe.DEFAULT_STEPS
    lr: float = recipe.DEFAULT_LR
    seed: int = recipe.DEFAULT_SEED

    def __post_init__(self) -> None:
        known = ", ".join(recipe.RECIPES)
        for name in self.recipes:
            _expect(name in recipe.RECIPES, "--recipe", f"one of {known}", name)
        in_order = tuple(name for name in recipe.RECIPES if name in self.recipes)
        _expect(bool(in_order), "--recipe", f"at least one of {known}", "none")
        object.__setattr__(self, "recipes", in_order)
        _expect(self.dtype in DTYPES, "--dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        _expect(1 <= self.steps <= 1_000_000, "--steps", "a number from 1 to 1000000", self.steps)
        _expect(math.isfinite(self.lr) and self.lr > 0, "--lr", "a finite number above 0", self.lr)
        _expect(0 <= self.seed < 2**63, "--seed", "a number from 0 to 2^63 - 1", self.seed)
        _check_device(self.device)

    def save(self, directory: Path) -> None:
        """Writes `run.json` into the folder."""
        replace_file(directory / RUN_FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())


def load_options(directory: Path) -> Options:
    """Options of the run in a folder.

    Raises:
        OptionError: there is no run, or its `run.json` is not one of ours.
    """
    path = directory / RUN_FILE
    try:
        stored = json.loads(path.read_text())
        stored["recipes"] = tuple(stored["recipes"])
        return Options(**stored)
    except OptionError:
        raise
    except OSError:
        raise OptionError(f"--resume: expected a run in {directory}, but it holds no {RUN_FILE}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"--resume: expected the options of a run in {path}, but got {error}") from None


@dataclass(frozen=True)
class Job:
    """A checked job: its options, its folder, and whether it goes on with what is there."""

    options: Options
    directory: Path
    resume: bool


def plan_job(given: Mapping[str, Any], out: Path | None, resume: bool, root: Path = DEFAULT_ROOT) -> Job:
    """Checks a command line against the run folders; writes nothing.

    Args:
        given: the fields of `Options` that the user typed.
        out: the run's folder; None takes a fresh one under `root`, or with `resume` the newest one there.
        resume: go on with the run in the folder.
        root: where runs without `out` live.

    Returns:
        The job.

    Raises:
        OptionError: an option is impossible, the folder is in use, or the run to resume had other options.
    """
    if resume:
        return _plan_resume(given, out or _newest_run(root))
    options = Options(**given)
    directory = out or _fresh_directory(root, f"digits-{options.dtype}-seed{options.seed}")
    if directory.exists() and not directory.is_dir():
        raise OptionError(f"--out: expected a folder, but {directory} is a file")
    if directory.is_dir() and any(directory.iterdir()):
        raise OptionError(
            f"--out: expected a new or empty folder, but {directory} holds files already; add --resume to go on with a "
            "run that is there"
        )
    return Job(options, directory, resume=False)


def _plan_resume(given: Mapping[str, Any], directory: Path) -> Job:
    stored = load_options(directory)
    asked = Options(**{**asdict(stored), **given})
    for field in fields(Options):
        was, now = getattr(stored, field.name), getattr(asked, field.name)
        if was != now:
            option = {"recipes": "recipe"}.get(field.name, field.name)
            raise OptionError(
                f"--resume: expected --{option} {_shown(was)}, as the run in {directory} has it, but got {_shown(now)}"
            )
    return Job(stored, directory, resume=True)


def _shown(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _fresh_directory(root: Path, name: str) -> Path:
    directory, number = root / name, 1
    while directory.exists():
        number += 1
        directory = root / f"{name}-{number}"
    return directory


def _newest_run(root: Path) -> Path:
    runs = sorted(root.glob(f"*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise OptionError(f"--resume: expected a run under {root}/, but there is none; name its folder with --out")
    return runs[-1].parent


def _check_device(device: str) -> None:
    wanted = "cpu, cuda or cuda:N"
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise OptionError(f"--device: expected {wanted}, but got {device}") from None
    _expect(parsed.type == "cuda" or device == "cpu", "--device", wanted, device)
    if parsed.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        _expect(count > 0, "--device", "cpu (torch finds no CUDA device here)", device)
        _expect((parsed.index or 0) < count, "--device", f"a CUDA device below {count}", device)


def _expect(holds: bool, option: str, expected: str, came: object) -> None:
    if not holds:
        raise OptionError(f"{option}: expected {expected}, but got {came}")
