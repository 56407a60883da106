"""unscale_and_check_, grad_stats and update_scale_ beside torch's ways: python benchmarks/bench_gradients.py

Floors: unscale_and_check_ reads and writes each gradient once (2 b per element), grad_stats reads it once (b).
update_scale_ moves 12 bytes; what is timed is the call.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import allfinite
from harness import Case, main

LISTS = ((50, 1_000_000), (10_000, 64))  # tensors, elements of each
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stats_by_torch(grads: Sequence[Tensor]) -> object:
    """The same answers (but subnormals and fp64 sums) by torch's own multi-tensor ops."""
    norms = torch._foreach_norm(grads)
    largest = torch._foreach_norm(grads, float("inf"))
    zeros = [torch.count_nonzero(g) for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms)), torch.stack(largest).max(), torch.stack(zeros).sum()


def scale_state() -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((), 65536.0), torch.zeros((), dtype=torch.int32), torch.zeros(())


def cases() -> Iterator[Case]:
    for count, n in LISTS:
        for dtype in DTYPES:
            grads = [torch.randn(n).to(dtype) for _ in range(count)]
            found = torch.zeros(1)
            size = count * n * grads[0].element_size()
            shape = f"{count} x {n}"
            # 1 - 2^-24 instead of 1: with 1 ours would not have to write.
            inverse = torch.full((1,), 1 - 2**-24)
            yield Case(
                "unscale_and_check_",
                "forward",
                dtype,
                shape,
                lambda g=grads, f=found, i=inverse: torch.ops.allfinite.unscale_and_check_(g, f, i),
                lambda g=grads, f=found, i=inverse: torch._amp_foreach_non_finite_check_and_unscale_(g, f, i),
                2 * size,
                "GB/s",
            )
            yield Case(
                "grad_stats",
                "forward",
                dtype,
                shape,
                lambda g=grads: allfinite.grad_stats(g),
                lambda g=grads: stats_by_torch(g),
                size,
                "GB/s",
            )
    ours, reference = scale_state(), scale_state()
    yield Case(
        "update_scale_",
        "forward",
        torch.float32,
        "1",
        lambda: torch.ops.allfinite.update_scale_(*ours, 2.0, 0.5, 2000, 1.0, 2.0**24),
        lambda: torch._amp_update_scale_(*reference, 2.0, 0.5, 2000),
        12,
        "GB/s",
    )


if __name__ == "__main__":
    main(cases)
