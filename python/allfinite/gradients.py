"""Ops on gradients and on the loss scale, as Python functions: what a ``GradScaler`` is made of.

Each is one call of ``torch.ops.allfinite``; checks and kernels are in C++. None waits for a device.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from allfinite import _C
from allfinite._direct import direct

_unscale_and_check_ = direct(_C.ops.unscale_and_check_, torch.ops.allfinite.unscale_and_check_)
_grad_stats = direct(_C.ops.grad_stats, torch.ops.allfinite.grad_stats)
_update_scale_ = direct(_C.ops.update_scale_, torch.ops.allfinite.update_scale_)


class GradStats(NamedTuple):
    """What one read of some gradients tells; tensors of no dimension, on their device.

    Attributes:
        found_inf: float32, 1 if any value is infinite or NaN, else 0.
        norm: float64, the square root of the sum of squares.
        amax: float64, the largest magnitude.
        zeros: int64, how many values are 0.
        subnormals: int64, how many other values lie below the smallest normal number of their own dtype.
    """

    found_inf: Tensor
    norm: Tensor
    amax: Tensor
    zeros: Tensor
    subnormals: Tensor


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def grad_stats(tensors: Tensor | Iterable[Tensor]) -> GradStats:
    """Statistics over all values of some tensors together, in one read.

    Args:
        tensors: one tensor or any number of them, on one device, of any shapes and strides; float16, bfloat16, float32,
            float64 and complex may be mixed. A complex value counts as two numbers; memory that entries share counts
            each time.

    Returns:
        ``GradStats``. The norm is computed in double and right for every finite input: also where squares leave the
        range of the dtype, or, for float64, of double itself. It is the same with any number of threads. A NaN makes
        ``norm`` and ``amax`` NaN, an infinity without NaN makes both infinite. Without any value all are 0.

    Raises:
        TypeError: a dtype that is not listed. NotImplementedError: a sparse tensor (pass the values of its coalesced
        form); forward-mode differentiation. RuntimeError: tensors on several devices; a backward through the result.
    """
    return GradStats(*_grad_stats(_as_list(tensors)))


def unscale_and_check_(grads: Tensor | Iterable[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Divides gradients by the loss scale, in place, and reports overflow: ``grads *= inv_scale``.

    Args:
        grads: as ``tensors`` of :func:`grad_stats`. Products are taken in float32 (float64 for float64) and rounded
            once. Memory that several elements (``expand``) or several entries share is scaled once.
        found_inf: float32, one element; becomes 1 where any incoming or any unscaled value is infinite or NaN, and is
            never cleared. All gradients are unscaled all the same.
        inv_scale: float32, one element. Where it is 1 the gradients are only checked.

    Raises:
        TypeError: dtypes. ValueError: ``found_inf`` or ``inv_scale`` of more or fewer elements than one; entries that
        overlap with different dtypes. NotImplementedError: a sparse tensor (pass the values of its coalesced form).
        RuntimeError: tensors on several devices. Nothing is written when an argument is refused.
    """
    _unscale_and_check_(_as_list(grads), found_inf, inv_scale)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    *,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> None:
    """Moves a loss scale after an iteration, in place.

    Where ``found_inf`` is not 0 (NaN counts): ``scale *= backoff_factor``, but not below ``min_scale``, and the tracker
    starts again. Otherwise, when ``growth_tracker + 1 >= growth_interval``: ``scale *= growth_factor``, but not above
    ``max_scale`` and only if that is finite, and the tracker starts again; else the tracker goes up by one. A scale
    that already lies at or beyond a bound is left where it is: ``min_scale`` limits back-off only, ``max_scale`` growth
    only. Products are ``float32(float64(scale) * factor)``, torch's bits.

    Args:
        scale: float32, one element.
        growth_tracker: int32, one element: good iterations since the scale last moved.
        found_inf: float32, one element.
        growth_factor: >= 1 and finite.
        backoff_factor: in (0, 1].
        growth_interval: >= 1.
        min_scale: in [2^-126, 2^126].
        max_scale: in [2^-126, 2^126], not below ``min_scale``.

    Raises:
        TypeError: dtypes. ValueError: more or fewer elements than one; a number outside its range, NaN included.
        RuntimeError: tensors on several devices. Nothing is written when an argument is refused.
    """
    _update_scale_(
        scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
    )
