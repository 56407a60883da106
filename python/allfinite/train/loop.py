"""The training loop of one recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import allfinite

from . import recipe
from .checkpoint import load_checkpoint, save_checkpoint
from .data import BatchOrder, load_digits
from .log import Event, LogWriter
from .model import EagerAttention, SdpaAttention, ViT
from .options import DTYPES, Options
from .probe import LogitProbe, underflow_share

ACCURACY_EVERY = 25
UNDERFLOW_EVERY = 10
CHECKPOINT_EVERY = 25

_ATTENTION = {"eager": EagerAttention, "sdpa": SdpaAttention}


class Trainer:
    """Model, optimizer, scaler and data of one recipe, stepped one batch at a time.

    Args:
        options: options of the job.
        name: name of the recipe.
    """

    def __init__(self, options: Options, name: str) -> None:
        self.recipe = recipe.RECIPES[name]
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = DTYPES[options.dtype]
        self.peak_lr = options.lr * self.recipe.lr_factor
        self.data = load_digits(self.device)
        self.order = BatchOrder(len(self.data.train_labels), recipe.BATCH, options.seed)
        torch.manual_seed(options.seed)
        model = ViT(_ATTENTION[self.recipe.attention]).to(self.device)
        self.probe = LogitProbe(model)
        scaled = self.dtype is torch.float16
        scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        if self.recipe.protected:  # the two lines that AllFinite changes in a training script
            allfinite.convert(model)
            scaler = allfinite.amp.GradScaler(self.device.type, enabled=scaled)
        self.model = model
        self.scaler = scaler
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.peak_lr, weight_decay=recipe.WEIGHT_DECAY)
        self.optimizer.register_step_post_hook(self._count_update)
        self.step_number = 0
        self.updates = 0
        self.nonfinite_streak = 0
        self.seconds = 0.0

    def _count_update(self, *_: object) -> None:
        self.updates += 1

    def autocast(self) -> torch.autocast:
        """The autocast context of the job's dtype."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not torch.float32)

    def step(self) -> Event:
        """Trains one batch.

        Returns:
            The step's log event. `scale` is the one that this step used, `logit` the largest |q . k| before the
            scale, `underflow` (on some steps) the share of scaled gradient elements below the dtype's normal range.
        """
        self.step_number += 1
        lr = recipe.learning_rate(self.step_number, self.options.steps, self.peak_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        indices = self.order.next()
        images, labels = self.data.train_images[indices], self.data.train_labels[indices]
        self.probe.reset()
        with self.autocast():
            loss = F.cross_entropy(self.model(images), labels, label_smoothing=recipe.LABEL_SMOOTHING)
        scale, updates = self.scaler.get_scale(), self.updates
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        underflow = None
        if self.step_number % UNDERFLOW_EVERY == 0:
            underflow = underflow_share(self.model.parameters(), self.dtype)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.updates == updates
        value = float(loss.detach())
        self.nonfinite_streak = 0 if math.isfinite(value) else self.nonfinite_streak + 1
        event: Event = {
            "event": "step",
            "step": self.step_number,
            "lr": lr,
            "loss": value,
            "scale": scale,
            "skipped": skipped,
            "logit": self.probe.largest(),
        }
        if underflow is not None and not skipped:
            event["underflow"] = underflow
        if self.step_number % ACCURACY_EVERY == 0 and not self.finished:
            event["accuracy"] = self.accuracy()
        return event

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the test images classified right; an image with a non-finite score counts as wrong."""
        self.model.eval()
        with self.autocast():
            scores = self.model(self.data.test_images)
        self.model.train()
        right = (scores.argmax(-1) == self.data.test_labels) & scores.isfinite().all(-1)
        return float(right.float().mean())

    @property
    def dead(self) -> bool:
        """Whether so many losses in a row were not finite that nothing will change any more."""
        return self.nonfinite_streak >= recipe.DEATH_STREAK

    @property
    def finished(self) -> bool:
        """Whether the last step was taken, or the run is dead."""
        return self.dead or self.step_number >= self.options.steps

    def state_dict(self) -> dict[str, Any]:
        """All that the following steps depend on."""
        return {
            "step": self.step_number,
            "nonfinite_streak": self.nonfinite_streak,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "order": self.order.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, bit for bit."""
        self.step_number = state["step"]
        self.nonfinite_streak = state["nonfinite_streak"]
        self.seconds = state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.order.load_state_dict(state["order"])
        torch.set_rng_state(state["rng"])


def run_recipe(
    options: Options, name: str, log_path: Path, checkpoint_path: Path, should_stop: Callable[[], bool]
) -> bool:
    """Trains one recipe to its end, going on from its checkpoint if there is one.

    Args:
        options: options of the job.
        name: name of the recipe.
        log_path: its JSONL log.
        checkpoint_path: its checkpoint, written every `CHECKPOINT_EVERY` steps and when stopped.
        should_stop: asked before every step.

    Returns:
        Whether the recipe is finished; False if it was stopped.

    Raises:
        LogBusyError: another process trains this recipe in this folder.
    """
    with LogWriter(log_path) as log:
        trainer = _restore(options, name, log, checkpoint_path)
        started = time.monotonic() - trainer.seconds
        while not trainer.finished:
            if should_stop():
                save_checkpoint(checkpoint_path, trainer.state_dict())
                return False
            log.write(trainer.step())
            trainer.seconds = time.monotonic() - started
            if trainer.finished or trainer.step_number % CHECKPOINT_EVERY == 0:
                save_checkpoint(checkpoint_path, trainer.state_dict())
        log.write(
            {
                "event": "end",
                "died": trainer.dead,
                "scale": trainer.scaler.get_scale(),
                "accuracy": trainer.accuracy(),
                "seconds": round(trainer.seconds, 2),
            }
        )
    return True


def _restore(options: Options, name: str, log: LogWriter, checkpoint_path: Path) -> Trainer:
    """A trainer at the checkpoint, the log cut to match; a fresh one where there is none or the log lacks steps."""
    trainer = Trainer(options, name)
    state = load_checkpoint(checkpoint_path)
    if state is not None and log.cut(state["step"]):
        trainer.load_state_dict(state)
        return trainer
    log.cut(0)
    log.write(
        {
            "event": "start",
            "recipe": name,
            "seed": options.seed,
            "lr": trainer.peak_lr,
            "steps": options.steps,
            "dtype": options.dtype,
            "device": options.device,
            "allfinite": allfinite.__version__,
            "torch": torch.__version__,
        }
    )
    return trainer
