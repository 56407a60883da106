"""From measurements to one verdict and one advice, by rules that know nothing of a recipe's intent."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

FP16_MAX = 65504.0
# Logits "still grow" if, after they passed the limit, they reached a peak this much above it.
_GROWTH_MARGIN = 1.1
# The learning rate is named as the cause if the growth at full rate is this much faster than while it decays.
_RATE_CONTRAST = 2.0
# More lost steps than this are worth a word; the scaler's search for its scale costs a run less.
_LOST_SHARE = 0.05
# Logits are noisy from batch to batch: their level is the median over this many steps.
_LEVEL_WINDOW = 20


@dataclass(frozen=True)
class Measured:
    """The numbers of one recipe, all from its log.

    Attributes:
        recipe: its name.
        dtype: "fp16", "bf16" or "fp32".
        lr: peak learning rate.
        steps: steps taken.
        planned_steps: steps asked for.
        limit: largest finite number of the dtype.
        first_nonfinite_step: first step whose loss was not finite, or None.
        died_at_step: step at which the run was given up, or None.
        nonfinite_steps: number of losses that were not finite.
        skipped_steps: steps on which the optimizer was not called.
        final_scale: the scaler's scale at the end.
        logits: largest |q . k| of each step, before the scale.
        lrs: learning rate of each step.
        logit_limit_step: first step whose largest logit was beyond `limit` or not finite, or None.
        loss: mean loss of the last steps.
        accuracy: test accuracy at the end, NaN if unfinished.
        underflow: mean share of gradient elements below the dtype's normal range, NaN if not measured.
        finished: whether the run came to its end, or died.
    """

    recipe: str
    dtype: str
    lr: float
    steps: int
    planned_steps: int
    limit: float
    first_nonfinite_step: int | None
    died_at_step: int | None
    nonfinite_steps: int
    skipped_steps: int
    final_scale: float
    logits: list[float]
    lrs: list[float]
    logit_limit_step: int | None
    loss: float
    accuracy: float
    underflow: float
    finished: bool

    @property
    def largest_logit(self) -> float:
        """Largest finite logit; NaN if there is none."""
        return max((logit for logit in self.logits if math.isfinite(logit)), default=math.nan)

    @property
    def peak_step(self) -> int:
        """Step of the largest finite logit; 0 if there is none."""
        return self.logits.index(self.largest_logit) + 1 if math.isfinite(self.largest_logit) else 0

    @property
    def lost_share(self) -> float:
        """Share of the steps that were skipped."""
        return self.skipped_steps / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Judgement:
    """What happened, and what to change; the advice is empty if there is nothing to change."""

    verdict: str
    advice: str


def judge(m: Measured, others: list[Measured]) -> Judgement:
    """Verdict and advice for one recipe.

    Args:
        m: its measurements.
        others: measurements of the whole job; a run at a lower rate among them confirms or refutes the cause.

    Returns:
        Both, as sentences.
    """
    if not m.finished:
        return Judgement(f"Stopped at step {m.steps} of {m.planned_steps}.", "Go on with --resume.")
    if m.died_at_step is not None:
        return _judge_dead(m)
    if m.nonfinite_steps:
        return _judge_limping(m)
    if m.logit_limit_step is not None:
        return _judge_overgrown(m, others)
    return _judge_finite(m)


def compare(job: list[Measured]) -> list[str]:
    """Sentences about what only two runs side by side can show; empty if the job has no such pair."""
    by_name = {m.recipe: m for m in job if m.finished}
    sentences = []
    sdpa, safe = by_name.get("sdpa"), by_name.get("allfinite")
    if sdpa and sdpa.nonfinite_steps:
        step = sdpa.first_nonfinite_step
        sentences.append(f"torch's own scaled_dot_product_attention goes non-finite at step {step}.")
    elif sdpa and sdpa.logit_limit_step is not None:
        sentences.append(
            f"torch's own scaled_dot_product_attention survives here as well, with logits up to "
            f"{_number(sdpa.largest_logit)}: it does not store them in {sdpa.dtype}."
        )
    elif sdpa:
        sentences.append(
            f"torch's own scaled_dot_product_attention stays finite here; its logits stayed in range, at most "
            f"{_number(sdpa.largest_logit)}."
        )
    if sdpa and safe:
        sentences.append(
            f"With torch's op and with AllFinite: kept loss scale {_number(sdpa.final_scale)} and "
            f"{_number(safe.final_scale)}, gradient elements that underflowed {_percent(sdpa.underflow)} and "
            f"{_percent(safe.underflow)}, lost steps {sdpa.skipped_steps} and {safe.skipped_steps}."
        )
    if safe and (calm := _calmer(safe, job)):
        sentences.append(
            f"The same code at a learning rate of {calm.lr:g} instead of {safe.lr:g}: largest logit "
            f"{_number(calm.largest_logit)} instead of {_number(safe.largest_logit)}, test accuracy "
            f"{_percent(calm.accuracy)} instead of {_percent(safe.accuracy)}."
        )
    return sentences


def _judge_dead(m: Measured) -> Judgement:
    course = (
        f"Died of NaN at step {m.died_at_step}: first non-finite loss at step {m.first_nonfinite_step}, "
        f"{_percent(m.lost_share)} of its steps lost, loss scale down to {_number(m.final_scale)}."
    )
    if _overflow_came_first(m):
        return Judgement(
            f"{course} Cause: the attention logits passed {_number(m.limit)} at step {m.logit_limit_step}, more than "
            f"{m.dtype} can store; no loss scale helps against that.",
            f"{_slower(m)} With allfinite.convert(model) and allfinite.amp.GradScaler the logits are not stored in "
            f"{m.dtype}.",
        )
    return Judgement(
        f"{course} The attention logits were in range (largest {_number(m.largest_logit)}): the overflow is elsewhere.",
        f"{_slower(m)} Look for the first module whose output is not finite.",
    )


def _judge_limping(m: Measured) -> Judgement:
    cause = (
        f"the attention logits passed {_number(m.limit)} at step {m.logit_limit_step}"
        if _overflow_came_first(m)
        else f"not the attention logits, which were in range (largest {_number(m.largest_logit)})"
    )
    return Judgement(
        f"Limped to the end with {m.nonfinite_steps} non-finite losses, the first at step {m.first_nonfinite_step}; "
        f"{_percent(m.lost_share)} of its steps lost, accuracy {_percent(m.accuracy)}. Cause: {cause}.",
        _slower(m),
    )


def _judge_overgrown(m: Measured, others: list[Measured]) -> Judgement:
    text = (
        f"Finite to the end, accuracy {_percent(m.accuracy)}, but the attention logits passed {_number(m.limit)} "
        f"at step {m.logit_limit_step}"
    )
    if m.largest_logit > _GROWTH_MARGIN * m.limit:
        text += f" and still grow from there, to {_number(m.largest_logit)} at step {m.peak_step}."
    else:
        text += f", and stayed near it: {_number(m.largest_logit)} at most."
    return Judgement(f"{text} {_cause(m, others)}", _slower(m))


def _judge_finite(m: Measured) -> Judgement:
    text = f"Finite to the end, accuracy {_percent(m.accuracy)}, logits at most {_number(m.largest_logit)}"
    if m.largest_logit > FP16_MAX:
        return Judgement(
            f"{text}: {m.dtype} can store them, fp16 could not, and a softmax of such logits picks a single token.",
            _slower(m),
        )
    if m.lost_share > _LOST_SHARE:
        return Judgement(
            f"{text}, but {_percent(m.lost_share)} of its steps were lost; loss scale {_number(m.final_scale)}.",
            "Start with a lower init_scale, or clip the gradients.",
        )
    return Judgement(f"{text}, {_percent(m.lost_share)} of its steps lost: no number was out of range.", "")


def _cause(m: Measured, others: list[Measured]) -> str:
    """Whether the learning rate drives the logits: from its own decay, and from a slower run if there is one."""
    calm = _calmer(m, others)
    if calm and calm.logit_limit_step is None and calm.nonfinite_steps == 0:
        return (
            f"The learning rate of {m.lr:g} is the cause: at {calm.lr:g} they stay at {_number(calm.largest_logit)} or "
            f"below."
        )
    full, decay = _growth(m)
    if full > 0 and full > _RATE_CONTRAST * decay:
        return (
            f"The learning rate of {m.lr:g} is the cause: they grew by {_number(full)} a step while it was at its "
            f"peak, and by {_number(decay)} a step while it decayed."
        )
    return f"The learning rate of {m.lr:g} is the likely cause: nothing else was out of range."


def _growth(m: Measured) -> tuple[float, float]:
    """Growth of the logits a step, at the peak learning rate and after it; NaN where too few steps are there."""
    peak = max(m.lrs)
    first = m.lrs.index(peak)
    last = len(m.lrs) - m.lrs[::-1].index(peak)
    return _slope(m.logits[first:last]), _slope(m.logits[last:])


def _slope(logits: list[float]) -> float:
    finite = [logit for logit in logits if math.isfinite(logit)]
    if len(finite) < 2 * _LEVEL_WINDOW:
        return math.nan
    rise = statistics.median(finite[-_LEVEL_WINDOW:]) - statistics.median(finite[:_LEVEL_WINDOW])
    return rise / (len(finite) - _LEVEL_WINDOW)


def _calmer(m: Measured, others: list[Measured]) -> Measured | None:
    """The finished run with the highest learning rate below that of `m`."""
    slower = [other for other in others if other.lr < m.lr and other.finished]
    return max(slower, key=lambda other: other.lr, default=None)


def _overflow_came_first(m: Measured) -> bool:
    if m.logit_limit_step is None or m.first_nonfinite_step is None:
        return False
    return m.logit_limit_step <= m.first_nonfinite_step


def _slower(m: Measured) -> str:
    return f"Lower the learning rate, to {m.lr / 10:g}."


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{100 * share:.1f} %"
