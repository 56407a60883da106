"""scaled_dot_product_attention beside torch's: python benchmarks/bench_scaled_dot_product_attention.py [--threads N]

Work: 4 B H S² D flops forward, 2.5 times that for the backward, half of both if causal.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from harness import Case, main

SHAPES = ((8, 4, 64, 64), (1, 8, 197, 64), (1, 4, 512, 64), (1, 4, 1024, 128))  # B, H, S, D
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Attention = Callable[..., Tensor]


def step(f: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor, options: dict[str, Any]) -> object:
    return torch.autograd.grad(f(q, k, v, **options), (q, k, v), do)


def variants(s: int, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], float]]:
    yield "", {}, 1.0
    yield " causal", {"is_causal": True}, 0.5
    yield " bias", {"attn_mask": torch.randn(s, s).to(dtype)}, 1.0


def cases() -> Iterator[Case]:
    for b, h, s, d in SHAPES:
        for dtype in DTYPES:
            q, k, v, do = (torch.randn(b, h, s, d).to(dtype) for _ in range(4))
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            for name, options, share in variants(s, dtype):
                flops = 4 * b * h * s * s * d * share
                shape = f"{b}x{h}x{s}x{d}{name}"
                yield Case(
                    "scaled_dot_product_attention",
                    "forward",
                    dtype,
                    shape,
                    lambda a=(q, k, v), o=options: allfinite.scaled_dot_product_attention(*a, **o),
                    lambda a=(q, k, v), o=options: F.scaled_dot_product_attention(*a, **o),
                    flops,
                    "GFLOP/s",
                )
                yield Case(
                    "scaled_dot_product_attention",
                    "forward+backward",
                    dtype,
                    shape,
                    lambda a=(*leaves, do), o=options: step(allfinite.scaled_dot_product_attention, *a, o),
                    lambda a=(*leaves, do), o=options: step(F.scaled_dot_product_attention, *a, o),
                    3.5 * flops,
                    "GFLOP/s",
                )


if __name__ == "__main__":
    main(cases)
