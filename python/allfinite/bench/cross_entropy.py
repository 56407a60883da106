"""cross_entropy beside torch.nn.functional.cross_entropy.

Floor: b an element forward, 2 b more for the backward (b bytes of the dtype). The logits are 4 and 64 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from allfinite.bench.case import BOTH, FORWARD, Case

CLASSES = (1_000, 32_000, 128_000)
MEGABYTES = (4, 64)


def _pair(x: Tensor, target: Tensor) -> Iterator[Case]:
    size, leaf = x.numel() * x.element_size(), x.clone().requires_grad_()
    name = "cross_entropy", "cross_entropy"
    shape = f"{x.shape[0]}x{x.shape[1]}"
    ours, theirs = allfinite.cross_entropy, F.cross_entropy
    yield Case(*name, FORWARD, x.dtype, shape, lambda: ours(x, target), lambda: theirs(x, target), size)

    def both(function: Callable[[Tensor, Tensor], Tensor]) -> object:
        return torch.autograd.grad(function(leaf, target), leaf)

    yield Case(*name, BOTH, x.dtype, shape, lambda: both(ours), lambda: both(theirs), 3 * size)


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases of the family in the given dtypes."""
    for dtype in dtypes:
        for classes in CLASSES:
            for megabytes in MEGABYTES:
                rows = max(1, round(megabytes * 1e6 / classes / dtype.itemsize))
                yield from _pair(torch.randn(rows, classes).to(dtype), torch.randint(0, classes, (rows,)))
