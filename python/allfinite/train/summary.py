"""What a recipe's log says, in a few numbers; all of `summary.json`, the table and the report comes from here."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import layout, verdict
from .environment import environment
from .log import Event, read_log, replace_file
from .options import DTYPES, Options

# The reported loss is the mean over this many last steps.
LOSS_WINDOW = 20


@dataclass(frozen=True)
class RunLog:
    """The events of one recipe's log.

    Attributes:
        start: what was run.
        steps: one event a step, in order.
        end: how it ended; None while it runs or if it was stopped.
    """

    start: Event
    steps: list[Event]
    end: Event | None

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.start["recipe"])

    @property
    def limit(self) -> float:
        """Largest finite number of the run's dtype: what an attention logit must not pass to be stored in it."""
        return float(torch.finfo(DTYPES[self.start["dtype"]]).max)

    def series(self, field: str) -> tuple[list[int], list[float]]:
        """Steps and values of a field, where it was measured."""
        events = [event for event in self.steps if field in event]
        return [event["step"] for event in events], [float(event[field]) for event in events]

    @cached_property
    def measured(self) -> verdict.Measured:
        """The numbers from which the verdict is drawn."""
        losses = self.series("loss")[1]
        logits = self.series("logit")[1]
        bad = [event["step"] for event in self.steps if not math.isfinite(event["loss"])]
        beyond = [event["step"] for event in self.steps if not event["logit"] <= self.limit]
        last = self.end or (self.steps[-1] if self.steps else {})
        window = losses[-LOSS_WINDOW:]
        underflow = self.series("underflow")[1]
        return verdict.Measured(
            recipe=self.recipe,
            dtype=self.start["dtype"],
            lr=self.start["lr"],
            steps=len(self.steps),
            planned_steps=self.start["steps"],
            limit=self.limit,
            first_nonfinite_step=bad[0] if bad else None,
            died_at_step=self.steps[-1]["step"] if self.end and self.end["died"] else None,
            nonfinite_steps=len(bad),
            skipped_steps=sum(event["skipped"] for event in self.steps),
            final_scale=last.get("scale", math.nan),
            logits=logits,
            lrs=self.series("lr")[1],
            logit_limit_step=beyond[0] if beyond else None,
            loss=sum(window) / len(window) if window else math.nan,
            accuracy=self.end["accuracy"] if self.end else math.nan,
            underflow=sum(underflow) / len(underflow) if underflow else math.nan,
            finished=self.end is not None,
        )


def read_run(directory: Path, options: Options) -> list[RunLog]:
    """Logs of a run's recipes, in order; recipes that have not started are left out."""
    runs = []
    for name in options.recipes:
        events = read_log(layout.log(directory, name))
        if events:
            end = events[-1] if events[-1]["event"] == "end" else None
            runs.append(RunLog(events[0], [event for event in events if event["event"] == "step"], end))
    return runs


def summarize(run: RunLog, others: list[RunLog]) -> dict[str, Any]:
    """The entry of one recipe in `summary.json`.

    Args:
        run: the recipe's log.
        others: all logs of the job, with which the verdict may compare.

    Returns:
        The entry; numbers that are not finite, and what did not happen, are None.
    """
    m = run.measured
    judged = verdict.judge(m, [other.measured for other in others])
    return {
        "recipe": m.recipe,
        "seed": run.start["seed"],
        "lr": m.lr,
        "first_nonfinite_step": m.first_nonfinite_step,
        "died_at_step": m.died_at_step,
        "nonfinite_steps": m.nonfinite_steps,
        "skipped_steps": m.skipped_steps,
        "final_scale": _finite(m.final_scale),
        "largest_logit": _finite(m.largest_logit),
        "logit_limit_step": m.logit_limit_step,
        "loss": _finite(m.loss),
        "accuracy": _finite(m.accuracy),
        "seconds": run.end["seconds"] if run.end else None,
        "verdict": judged.verdict,
        "advice": judged.advice,
    }


def write_summary(directory: Path, options: Options) -> dict[str, Any]:
    """Writes `summary.json` from the logs in a run's folder.

    Returns:
        Its content: "recipes" (one entry each), "comparison" (sentences), "options" and "environment".
    """
    runs = read_run(directory, options)
    summary = {
        "recipes": [summarize(run, runs) for run in runs],
        "comparison": verdict.compare([run.measured for run in runs]),
        "options": {name: getattr(options, name) for name in ("device", "dtype", "steps", "lr", "seed")},
        "environment": environment(),
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(layout.summary(directory), text.encode())
    return summary


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
