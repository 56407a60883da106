"""What a step did, and of a skipped one: why, and which parameter was the first to blame."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from allfinite.amp import _gradients

Status = Literal["stepped", "skipped", "no_gradients"]
Reason = Literal["inf", "nan", "after_unscale", "other_rank"]


@dataclass(frozen=True)
class StepResult:
    """The outcome of one ``GradScaler.step``.

    Attributes:
        status: ``"stepped"``; ``"skipped"``: a gradient was not finite, parameters and optimizer are as they were;
            ``"no_gradients"``: no parameter had a gradient, nothing was done.
        reason: of a skipped step: ``"inf"`` or ``"nan"``: what the gradient named here holds; ``"after_unscale"``: all
            scaled gradients were finite, and dividing by a scale below 1 took one beyond its dtype; ``"other_rank"``:
            only another rank of the process group found one; None: the gradients were changed before anybody looked.
        param_group: the group of the first parameter, in the order of the groups, with a non-finite gradient.
        param_index: its index over all groups, as in the optimizer's ``state_dict()``.
        param_name: its name, where the optimizer was made from named parameters.
        amax: the largest finite magnitude in its unscaled gradient; 0 where there is none.
        scale: what the gradients were divided by; 1 for a disabled scaler, 0 without gradients.
        at_floor: of a skipped step: the scale is at ``min_scale`` or below it, so that ``update()`` will not lower it.
    """

    status: Status
    reason: Reason | None = None
    param_group: int | None = None
    param_index: int | None = None
    param_name: str | None = None
    amax: float = 0.0
    scale: float = 0.0
    at_floor: bool = False

    def __str__(self) -> str:
        if self.status != "skipped":
            return self.status.replace("_", " ")
        if self.param_index is None:
            where = "on another rank" if self.reason == "other_rank" else "in a gradient that has changed since"
            return f"skipped: not finite {where}, at scale {self.scale:g}"
        what = "overflow by unscaling" if self.reason == "after_unscale" else self.reason
        named = "" if self.param_name is None else f" ({self.param_name})"
        return (
            f"skipped: {what} in the gradient of parameter {self.param_index}{named} of group {self.param_group}, "
            f"at scale {self.scale:g}"
        )


@dataclass(frozen=True)
class Offender:
    """The first parameter with a non-finite gradient."""

    entry: _gradients.Entry
    reason: Reason
    amax: float  # of the gradient as it lay there


def find_offender(optimizer: Any) -> Offender | None:
    """Looks through the gradients as they are now; waits once for their devices. Local shards only of a DTensor."""
    found = []
    with torch.no_grad():
        for entry in _gradients.entries(optimizer):
            values = _gradients.values(entry.param).detach()
            values = values.to_local() if hasattr(values, "to_local") else values
            values = torch.view_as_real(values) if values.is_complex() else values
            if values.numel() > 0:
                found.append((entry, values))
        if not found:
            return None
        device = found[0][1].device
        norms = [torch.linalg.vector_norm(v, float("inf")).to(device, torch.float64) for _, v in found]
        for (entry, values), norm in zip(found, torch.stack(norms).tolist(), strict=True):
            if not norm < float("inf"):
                finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                amax = torch.linalg.vector_norm(finite, float("inf")).item()
                return Offender(entry, "inf" if norm == norm else "nan", amax)
    return None


@dataclass
class Attempt:
    """A step that was tried: what is needed to tell its outcome, now or, to spare a host sync, when somebody asks."""

    flags: list[Tensor]  # found_inf, one a device
    scaled_flags: list[Tensor] | None  # the same before unscaling; kept only where the scale may be below 1
    skipped: bool | None  # None: only the flags know
    scale: Tensor  # of its own, so that update() does not change it
    min_scale: float
    divided: bool  # whether the gradients are unscaled
    optimizer: Callable[[], Any]  # weak
    offender: Offender | None
    several_ranks: bool

    def on_host(self) -> bool:
        """Whether :meth:`result` needs no wait for a device."""
        return all(t.device.type == "cpu" for t in [*self.flags, self.scale])

    def result(self) -> StepResult:
        """The outcome; reads the device, and the gradients if no offender is known."""
        scale = self.scale.item()
        skipped = any(bool(flag.item()) for flag in self.flags) if self.skipped is None else self.skipped
        if not skipped:
            return StepResult("stepped", scale=scale)
        optimizer = self.optimizer()
        offender = self.offender
        if offender is None and optimizer is not None:
            offender = find_offender(optimizer)
        at_floor = scale <= self.min_scale
        if offender is None:
            reason: Reason | None = "other_rank" if self.several_ranks else None
            return StepResult("skipped", reason, scale=scale, at_floor=at_floor)
        reason = offender.reason
        if self.scaled_flags is not None and not any(bool(flag.item()) for flag in self.scaled_flags):
            reason = "after_unscale"
        entry = offender.entry
        amax = offender.amax / (1.0 if self.divided else scale)
        return StepResult("skipped", reason, entry.group, entry.number, entry.name, amax, scale, at_floor)
