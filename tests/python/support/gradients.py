"""Tensors for the tests of the gradient ops, and their results in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

import allfinite

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)

# name: a view, made of a contiguous tensor of shape (6, 7, 10)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "columns": lambda t: t[:, :, :5],
    "every second": lambda t: t[:, :, ::2],
    "middle": lambda t: t[1:5, 2:6, 3:9].permute(1, 2, 0),
    "one column": lambda t: t[:, :, 3],
    "misaligned": lambda t: t.flatten()[1:],
    "one number": lambda t: t[1, 2, 3],
}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers; complex32 has no generator of its own."""
    wide = torch.complex64 if dtype == torch.complex32 else dtype
    return torch.randn(shape, dtype=wide).to(dtype)


def random_views(base: Tensor, how_many: int) -> list[Tensor]:
    """Views of a flat tensor with random sizes and strides: gaps, overlaps and repeats included."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, ()))

    views = []
    while len(views) < how_many:
        dims = number(0, 4)
        sizes, strides = [number(0 if d else 1, 4) for d in range(dims)], [number(0, 12) for _ in range(dims)]
        offset = number(0, base.numel() - 1)
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if last < base.numel():
            views.append(base.as_strided(sizes, strides, offset))
    return views


def parts(t: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def unscaled(t: Tensor, inv_scale: float) -> Tensor:
    """The product in float32 (float64 for float64), rounded once."""
    compute = torch.float64 if t.dtype == torch.float64 else torch.float32
    factor = torch.tensor(inv_scale, dtype=torch.float32)
    return (t.to(compute) * factor.to(compute)).to(t.dtype)


def flat64(tensors: list[Tensor]) -> Tensor:
    """All numbers of all tensors, in float64: exact for every dtype."""
    return torch.cat([torch.zeros(0, dtype=torch.float64)] + [parts(t).double().flatten() for t in tensors])


def subnormals(t: Tensor) -> int:
    """How many numbers are neither 0 nor of normal magnitude in their own dtype."""
    numbers = parts(t)
    return int(((numbers != 0) & (numbers.double().abs() < torch.finfo(numbers.dtype).tiny)).sum())


def unscale(grads: list[Tensor], inv_scale: float = 0.5) -> float:
    """``unscale_and_check_``; the flag."""
    found_inf = torch.zeros(())
    allfinite.unscale_and_check_(grads, found_inf, torch.tensor(inv_scale))
    return found_inf.item()


def torch_unscale(grads: list[Tensor], inv_scale: float) -> float:
    """The same by torch's op."""
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, torch.tensor(inv_scale))
    return found_inf.item()
