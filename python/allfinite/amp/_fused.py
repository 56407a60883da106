"""Steps of optimizers that skip by themselves (``_step_supports_amp_scaling``), through two attributes."""

from typing import Any

import torch
from torch import Tensor


def step(optimizer: Any, found_inf: Tensor, grad_scale: Tensor | None, args: Any, kwargs: Any) -> Any:
    """Calls ``optimizer.step(*args, **kwargs)`` with ``found_inf`` and ``grad_scale`` as its attributes.

    Both are gone afterwards, also after an exception: the next step would multiply by what is left of one that failed.

    Args:
        found_inf: float32, exactly 0 or 1: fused kernels compare with 1.
        grad_scale: float32, what the kernel divides the gradients by; None: they are unscaled.
    """
    to_come = _momentum_to_come(optimizer)
    optimizer.grad_scale = grad_scale
    optimizer.found_inf = found_inf
    try:
        value = optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
    # torch's fused SGD allocates a momentum that the kernel of a skipped step never fills. Only where one was
    # allocated, so at a parameter's first step, the flag is read on the host.
    if to_come and found_inf.item():
        for param in to_come:
            optimizer.state[param].pop("momentum_buffer", None)
    return value


def _momentum_to_come(optimizer: Any) -> list[Tensor]:
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [
        param
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]
