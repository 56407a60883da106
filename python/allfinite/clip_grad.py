"""Gradient clipping by the norm of all gradients together."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from allfinite.amp import _device_ops


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips the norm of all gradients together, in place, as ``torch.nn.utils.clip_grad_norm_``.

    ``grads *= min(1, max_norm / (norm + 1e-6))``. Unlike torch's, it works in double: gradients whose squares leave the
    range of their dtype are clipped and neither zeroed nor left, and the norm does not depend on how values are spread
    over tensors. A norm that is not finite changes nothing, so that a ``GradScaler`` or the caller still finds the
    gradients that made it; a factor of 1 changes not a bit.

    Args:
        parameters: one tensor or any number of them; those without a gradient are passed over. Gradients: dense,
            float16, bfloat16, float32, float64 and complex, mixed, of any strides. Memory that several gradients share
            counts in the norm for each, and is scaled once.
        max_norm: >= 0.
        norm_type: order of the norm, > 0; ``inf`` is the largest magnitude.
        error_if_nonfinite: raise if the norm is infinite or NaN; this waits for the device, nothing else here does.
        foreach: as torch's, without effect: there is one way for all.

    Returns:
        The norm before clipping: float64, no dimension, on the device of the first gradient. Without any gradient 0.

    Raises:
        TypeError: dtypes. ValueError: ``max_norm``, ``norm_type``. NotImplementedError: a sparse gradient.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``. Nothing is written when it raises.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"allfinite::clip_grad_norm_: expected max_norm >= 0, but got {max_norm}")
    owners = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in owners if p.grad is not None]
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device].append(grad)
    if len(groups) < 2:
        norm = _device_ops.get_total_norm(grads, norm_type)
    else:
        parts = [_device_ops.get_total_norm(group, norm_type) for group in groups.values()]
        norm = _device_ops.get_total_norm([part.to(grads[0].device) for part in parts], norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"allfinite::clip_grad_norm_: expected a finite norm of order {norm_type}, but got {norm.item()}; nothing "
            "was clipped"
        )
    for device, group in groups.items():
        _device_ops.clip_grads_with_norm_(group, max_norm, norm.to(device))
    return norm
