"""layer_norm beside torch.nn.functional.layer_norm: python benchmarks/bench_layer_norm.py [--threads N]

Floor: 2 b per element forward, 3 b more for the backward (b = bytes of the dtype).
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from harness import Case, main

SHAPES = ((197, 384), (256, 768), (4096, 768), (2048, 4096))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def step(f: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> object:
    return torch.autograd.grad(f(x, (x.shape[-1],), w, b), (x, w, b), dy)


def cases() -> Iterator[Case]:
    for rows, n in SHAPES:
        for dtype in DTYPES:
            x, dy = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
            w, b = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
            size = x.numel() * x.element_size()
            name = "layer_norm", "forward", dtype, f"{rows}x{n}"
            yield Case(
                *name,
                lambda x=x, n=n, w=w, b=b: allfinite.layer_norm(x, (n,), w, b),
                lambda x=x, n=n, w=w, b=b: F.layer_norm(x, (n,), w, b),
                2 * size,
                "GB/s",
            )
            for t in (x, w, b):
                t.requires_grad_()
            yield Case(
                name[0],
                "forward+backward",
                *name[2:],
                lambda a=(x, w, b, dy): step(allfinite.layer_norm, *a),
                lambda a=(x, w, b, dy): step(F.layer_norm, *a),
                5 * size,
                "GB/s",
            )
            for t in (x, w, b):
                t.requires_grad_(False)


if __name__ == "__main__":
    main(cases)
