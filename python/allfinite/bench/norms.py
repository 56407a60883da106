"""The norms beside torch's; torch has no fused residual sum, so it is given the sum and the norm.

Floors, b bytes of the dtype an element: forward reads x and writes y (2 b), with a residual reads both and writes both
(4 b); backward reads dy and x and writes dx (3 b), with a residual reads the gradient of the sum as well (4 b).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from allfinite.bench.case import BOTH, FORWARD, Case

SHAPES = ((197, 384), (256, 768), (4096, 768), (2048, 4096))
Function = Callable[..., Tensor | tuple[Tensor, Tensor]]


def _gradients(function: Function, leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> object:
    outputs = function(*leaves)
    return torch.autograd.grad((outputs,) if isinstance(outputs, Tensor) else outputs, leaves, grads)


def _pair(
    op: str, ours: Function, theirs: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor], tensors: int
) -> Iterator[Case]:
    """Forward, which moves ``tensors`` large tensors, and both directions."""
    x = inputs[0]
    size = x.numel() * x.element_size()
    family = "rms_norm" if "rms" in op else "norm"
    shape = "x".join(map(str, x.shape))
    yield Case(op, family, FORWARD, x.dtype, shape, lambda: ours(*inputs), lambda: theirs(*inputs), tensors * size)
    leaves = [t.clone().requires_grad_() for t in inputs]
    yield Case(
        op,
        family,
        BOTH,
        x.dtype,
        shape,
        lambda: _gradients(ours, leaves, grads),
        lambda: _gradients(theirs, leaves, grads),
        (tensors + 3 + (len(grads) - 1)) * size,
    )


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases of the family in the given dtypes."""
    for rows, n in SHAPES:
        for dtype in dtypes:
            x, r, dy, dr = (torch.randn(rows, n).to(dtype) for _ in range(4))
            w, b = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
            yield from _pair(
                "layer_norm",
                lambda x, w, b: allfinite.layer_norm(x, w.shape, w, b),
                lambda x, w, b: F.layer_norm(x, w.shape, w, b),
                (x, w, b),
                (dy,),
                2,
            )
            yield from _pair(
                "rms_norm",
                lambda x, w: allfinite.rms_norm(x, w.shape, w),
                lambda x, w: F.rms_norm(x, w.shape, w),
                (x, w),
                (dy,),
                2,
            )
            yield from _pair("add_layer_norm", _add_layer_norm, _add_layer_norm_by_torch, (x, r, w, b), (dy, dr), 4)
            yield from _pair("add_rms_norm", _add_rms_norm, _add_rms_norm_by_torch, (x, r, w), (dy, dr), 4)


def _add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return allfinite.add_layer_norm(x, r, w.shape, w, b)


def _add_layer_norm_by_torch(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.layer_norm(total, w.shape, w, b), total


def _add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return allfinite.add_rms_norm(x, r, w.shape, w)


def _add_rms_norm_by_torch(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.rms_norm(total, w.shape, w), total
