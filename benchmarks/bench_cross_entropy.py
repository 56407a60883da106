"""cross_entropy beside torch.nn.functional.cross_entropy: python benchmarks/bench_cross_entropy.py [--threads N]

Floor: b per element forward, 2 b more for the backward (b = bytes of the dtype). The logits are 4 to 64 MB.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from harness import Case, main

CLASSES = (1000, 32000, 128000)
MEGABYTES = (4, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def step(f: Callable[..., Tensor], x: Tensor, target: Tensor) -> object:
    return torch.autograd.grad(f(x, target), x)


def cases() -> Iterator[Case]:
    for classes in CLASSES:
        for megabytes in MEGABYTES:
            for dtype in DTYPES:
                rows = max(1, round(megabytes * 1e6 / classes / dtype.itemsize))
                x, target = torch.randn(rows, classes).to(dtype), torch.randint(0, classes, (rows,))
                size = x.numel() * x.element_size()
                name = "cross_entropy", "forward", dtype, f"{rows}x{classes}"
                yield Case(
                    *name,
                    lambda x=x, t=target: allfinite.cross_entropy(x, t),
                    lambda x=x, t=target: F.cross_entropy(x, t),
                    size,
                    "GB/s",
                )
                x.requires_grad_()
                yield Case(
                    name[0],
                    "forward+backward",
                    *name[2:],
                    lambda x=x, t=target: step(allfinite.cross_entropy, x, t),
                    lambda x=x, t=target: step(F.cross_entropy, x, t),
                    3 * size,
                    "GB/s",
                )


if __name__ == "__main__":
    main(cases)
