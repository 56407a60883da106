"""softmax beside torch.softmax; torch has no mask, so it is given softmax(x * scale + mask).

Floor: 2 b an element forward, 3 b more for the backward (b bytes of the dtype), and the mask once each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import allfinite
from allfinite.bench.case import BOTH, FORWARD, Case

SHAPES = ((197, 384), (256, 768), (4096, 768), (2048, 4096), (12 * 8 * 128, 128))
SCALE = 0.125


def _pair(
    label: str, x: Tensor, mask_bytes: int, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> Iterator[Case]:
    size, dy, leaf = x.numel() * x.element_size(), torch.randn(x.shape).to(x.dtype), x.clone().requires_grad_()
    name = x.dtype, "x".join(map(str, x.shape)) + label
    work = 2 * size + mask_bytes
    yield Case("softmax", "softmax", FORWARD, *name, lambda: ours(x), lambda: theirs(x), work)

    def both(function: Callable[[Tensor], Tensor]) -> object:
        return torch.autograd.grad(function(leaf), leaf, dy)

    work += 3 * size + mask_bytes
    yield Case("softmax", "softmax", BOTH, *name, lambda: both(ours), lambda: both(theirs), work)


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases of the family in the given dtypes."""
    for dtype in dtypes:
        for shape in SHAPES:
            x = torch.randn(shape).to(dtype)
            yield from _pair("", x, 0, lambda t: allfinite.softmax(t, -1), lambda t: torch.softmax(t, -1))
        x = torch.randn(768, 4096).to(dtype)
        yield from _pair(" dim 0", x, 0, lambda t: allfinite.softmax(t, 0), lambda t: torch.softmax(t, 0))
        yield from _masked(dtype)


def _masked(dtype: torch.dtype) -> Iterator[Case]:
    """Scores of attention with a causal mask, and with a bias."""
    x, seen = torch.randn(8, 12, 128, 128).to(dtype), torch.ones(128, 128, dtype=torch.bool).tril()
    bias = torch.randn(128, 128).to(dtype).masked_fill(~seen, -torch.inf)
    hidden = torch.zeros(128, 128, dtype=dtype).masked_fill(~seen, -torch.inf)
    for label, mask, added in ((" mask", seen, hidden), (" bias", bias, bias)):

        def ours(t: Tensor, mask: Tensor = mask) -> Tensor:
            return allfinite.softmax(t, -1, mask=mask, scale=SCALE)

        def theirs(t: Tensor, added: Tensor = added) -> Tensor:
            return torch.softmax(t * SCALE + added, -1)

        yield from _pair(label, x, mask.numel() * mask.element_size(), ours, theirs)
