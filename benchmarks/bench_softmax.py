"""softmax beside torch.softmax: python benchmarks/bench_softmax.py [--threads N]

Floor: 2 b per element forward, 3 b more for the backward (b = bytes of the dtype), and the mask once each. torch has no
mask: it is given softmax(x * scale + mask).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import allfinite
from harness import Case, main

SHAPES = ((197, 384), (256, 768), (4096, 768), (2048, 4096), (12 * 8 * 128, 128))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 0.125
Softmax = Callable[[Tensor], Tensor]


def step(f: Softmax, x: Tensor, dy: Tensor) -> object:
    return torch.autograd.grad(f(x), x, dy)


def pair(name: str, x: Tensor, extra: int, ours: Softmax, theirs: Softmax) -> Iterator[Case]:
    """Forward and forward + backward of two functions of x; extra: bytes of the mask."""
    size, dy = x.numel() * x.element_size(), torch.randn(x.shape).to(x.dtype)
    shape = "x".join(map(str, x.shape))
    yield Case(name, "forward", x.dtype, shape, lambda: ours(x), lambda: theirs(x), 2 * size + extra, "GB/s")
    leaf = x.clone().requires_grad_()
    yield Case(
        name,
        "forward+backward",
        x.dtype,
        shape,
        lambda: step(ours, leaf, dy),
        lambda: step(theirs, leaf, dy),
        5 * size + 2 * extra,
        "GB/s",
    )


def cases() -> Iterator[Case]:
    for rows, n in SHAPES:
        for dtype in DTYPES:
            x = torch.randn(rows, n).to(dtype)
            yield from pair("softmax", x, 0, lambda t: allfinite.softmax(t, -1), lambda t: torch.softmax(t, -1))
    for dtype in DTYPES:
        x = torch.randn(768, 4096).to(dtype)
        yield from pair("softmax, dim 0", x, 0, lambda t: allfinite.softmax(t, 0), lambda t: torch.softmax(t, 0))
    for dtype in DTYPES:
        x, seen = torch.randn(8, 12, 128, 128).to(dtype), torch.ones(128, 128, dtype=torch.bool).tril()
        for kind, mask in (("bool", seen), ("bias", torch.randn(128, 128).to(dtype).masked_fill(~seen, -torch.inf))):
            added = mask if kind == "bias" else torch.zeros(128, 128, dtype=dtype).masked_fill(~seen, -torch.inf)
            yield from pair(
                f"softmax, {kind}",
                x,
                mask.numel() * mask.element_size(),
                lambda t, mask=mask: allfinite.softmax(t, -1, mask=mask, scale=SCALE),
                lambda t, added=added: torch.softmax(t * SCALE + added, -1),
            )


if __name__ == "__main__":
    main(cases)
