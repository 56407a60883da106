"""Ops on gradients and on the loss scale beside torch's ways.

Floors: unscale_and_check_ reads and writes each gradient once (2 b per element, b bytes of the dtype), grad_stats reads
it once (b), clip_grad_norm_ reads it, and reads and writes it (3 b). update_scale_ moves 12 bytes; what is timed is the
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import allfinite
from allfinite.bench.case import FORWARD, Case

LISTS = (("large gradients", 50, 1_000_000), ("small gradients", 10_000, 64))  # tensors, elements of each


def _stats_by_torch(grads: list[Tensor]) -> object:
    """The same answers (but subnormals and fp64 sums) by torch's own multi-tensor ops."""
    norms = torch._foreach_norm(grads)
    largest = torch._foreach_norm(grads, float("inf"))
    zeros = [torch.count_nonzero(g) for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms)), torch.stack(largest).max(), torch.stack(zeros).sum()


def _list_cases(family: str, count: int, n: int, dtype: torch.dtype) -> Iterator[Case]:
    grads = [torch.randn(n).to(dtype) for _ in range(count)]
    parameters = [torch.nn.Parameter(torch.empty(n, dtype=dtype)) for _ in range(count)]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    found = torch.zeros(1)
    inverse = torch.full((1,), 1 - 2**-24)  # with 1 ours would not have to write
    # Just below the norm, so that there is something to multiply and the gradients keep their size.
    limit = float(allfinite.grad_stats(grads).norm) * (1 - 1e-5)
    size = count * n * grads[0].element_size()
    name = family, FORWARD, dtype, f"{count} x {n}"
    yield Case(
        "unscale_and_check_",
        *name,
        lambda: allfinite.unscale_and_check_(grads, found, inverse),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse),
        2 * size,
    )
    yield Case("grad_stats", *name, lambda: allfinite.grad_stats(grads), lambda: _stats_by_torch(grads), size)

    def clip_ours() -> object:
        return allfinite.clip_grad_norm_(parameters, limit)

    def clip_torch() -> object:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    yield Case("clip_grad_norm_", *name, clip_ours, clip_torch, 3 * size)


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases of the family in the given dtypes."""
    for family, count, n in LISTS:
        for dtype in dtypes:
            yield from _list_cases(family, count, n, dtype)
    ours, reference = ((torch.full((), 65536.0), torch.zeros((), dtype=torch.int32), torch.zeros(())) for _ in range(2))
    if torch.float32 in dtypes:
        yield Case(
            "update_scale_",
            "loss scale",
            FORWARD,
            torch.float32,
            "1",
            lambda: allfinite.update_scale_(*ours),
            lambda: torch._amp_update_scale_(*reference, 2.0, 0.5, 2000),
            12,
        )
