"""The recipes of the main job and the one setting that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The model and its training, the same for every recipe. It is small because half-precision products on a CPU are slow:
# one block, one head, a narrow MLP. Much label smoothing, because 1437 images are few. What kills the stock run is the
# learning rate, ten times too high: the attention logits then grow past what fp16 can store.
PATCH = 4
DIM = 192
HEADS = 1
DEPTH = 1
MLP_RATIO = 1
BATCH = 64
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.3

DEFAULT_LR = 3e-2
DEFAULT_STEPS = 600
DEFAULT_SEED = 0
# Shares of all steps: 100 and 250 of the default 600.
WARMUP_SHARE = 1 / 6
DECAY_SHARE = 5 / 12

# A run is dead after this many non-finite losses in a row: each such step is skipped, so nothing changes any more.
DEATH_STREAK = 20


@dataclass(frozen=True)
class Recipe:
    """What one run differs in.

    Attributes:
        name: name on the command line, in the logs and in the summary.
        title: a few words for the report.
        attention: which attention the user wrote: "eager" or "sdpa".
        protected: whether the two AllFinite lines (convert and the scaler) are in the script.
        lr_factor: multiplies the learning rate of the job.
    """

    name: str
    title: str
    attention: Literal["eager", "sdpa"]
    protected: bool
    lr_factor: float


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("stock", "eager attention, torch's GradScaler", "eager", protected=False, lr_factor=1.0),
        Recipe("sdpa", "torch's fused attention, torch's GradScaler", "sdpa", protected=False, lr_factor=1.0),
        Recipe("allfinite", "the stock script with the two AllFinite lines", "eager", protected=True, lr_factor=1.0),
        Recipe("advised", "the same with a tenth of the learning rate", "eager", protected=True, lr_factor=0.1),
    )
}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, flat, linear decay.

    Args:
        step: number of the step, from 1 to `steps`.
        steps: length of the run.
        peak: rate of the flat part.

    Returns:
        The rate of this step, above 0.
    """
    warmup = max(1, round(steps * WARMUP_SHARE))
    decay = max(1, round(steps * DECAY_SHARE))
    return peak * min(1.0, step / warmup, (steps - step + 1) / decay)
