"""A run's folder with made-up logs: what the summary and the report read, without any training."""

from __future__ import annotations

import math
from pathlib import Path

from allfinite.train import layout, recipe
from allfinite.train.log import Event, LogWriter
from allfinite.train.options import Options

STEPS = 60
DEATH = 50


def write_run(directory: Path) -> Options:
    """Writes logs of 60 steps for all four recipes: stock dies at step 50, two pass the limit, advised stays calm.

    Returns:
        The options of the run.
    """
    options = Options(steps=STEPS)
    options.save(directory)
    for name in recipe.RECIPES:
        with LogWriter(layout.log(directory, name)) as log:
            peak = options.lr * recipe.RECIPES[name].lr_factor
            start = {"event": "start", "recipe": name, "seed": 0, "lr": peak, "steps": STEPS, "dtype": "fp16"}
            log.write(start)
            steps = range(1, (DEATH if name == "stock" else STEPS) + 1)
            for step in steps:
                log.write(_step(name, step, peak))
            dead = name == "stock"
            scale = 2.0**-4 if dead else 65536.0
            log.write(
                {"event": "end", "died": dead, "scale": scale, "accuracy": 0.5 if dead else 0.975, "seconds": 9.0}
            )
    return options


def _step(name: str, step: int, peak: float) -> Event:
    nonfinite = name == "stock" and step > 30
    logit = 10.0 * step if name == "advised" else 2000.0 * step
    if name == "stock":
        logit = math.inf if nonfinite else 64000.0 * step / 30
    event: Event = {
        "event": "step",
        "step": step,
        "lr": recipe.learning_rate(step, STEPS, peak),
        "loss": math.nan if nonfinite else 2.0 / step,
        "scale": 2.0 ** (16 - max(0, step - 30)) if nonfinite else 65536.0,
        "skipped": nonfinite,
        "logit": logit,
    }
    if step % 10 == 0:
        event["accuracy"] = 0.5
        if not nonfinite:
            event["underflow"] = 0.01
    return event
