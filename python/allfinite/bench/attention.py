"""scaled_dot_product_attention beside torch's.

Work: 4 B H S² D flops forward, 2.5 times that more for the backward, half of both if causal. Fewer heads where the
sequence is long, so that a call stays below a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from allfinite.bench.case import BOTH, FLOPS, FORWARD, Case

# batch, heads, length, size of a head
SHAPES = (
    (8, 4, 64, 64),
    (8, 3, 64, 32),
    (4, 6, 197, 64),
    (2, 8, 512, 64),
    (1, 4, 1024, 128),
    (1, 2, 2048, 64),
    (1, 1, 4096, 64),
)


def _variants(s: int, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], float]]:
    yield "", {}, 1.0
    yield " causal", {"is_causal": True}, 0.5
    if s <= 1024:
        yield " mask", {"attn_mask": torch.rand(s, s) < 0.8}, 1.0
        yield " bias", {"attn_mask": torch.randn(s, s).to(dtype)}, 1.0


def _pair(
    shape: tuple[int, ...], dtype: torch.dtype, label: str, options: dict[str, Any], share: float
) -> Iterator[Case]:
    q, k, v, grad = (torch.randn(shape).to(dtype) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    b, h, s, d = shape
    flops = 4.0 * b * h * s * s * d * share
    family = "masked attention" if "attn_mask" in options else "attention"
    name = "scaled_dot_product_attention", family
    text = f"{b}x{h}x{s}x{d}{label}"
    ours, theirs = allfinite.scaled_dot_product_attention, F.scaled_dot_product_attention

    def forward(function: Callable[..., Tensor]) -> object:
        return function(q, k, v, **options)

    def both(function: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(function(*leaves, **options), leaves, grad)

    yield Case(*name, FORWARD, dtype, text, lambda: forward(ours), lambda: forward(theirs), flops, FLOPS)
    yield Case(*name, BOTH, dtype, text, lambda: both(ours), lambda: both(theirs), 3.5 * flops, FLOPS)


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases of the family in the given dtypes."""
    for shape in SHAPES:
        for dtype in dtypes:
            for label, options, share in _variants(shape[2], dtype):
                yield from _pair(shape, dtype, label, options, share)
