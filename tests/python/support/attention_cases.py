"""Attention problems, run through the kernels and through the reference, and compared by the contract (F3)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import allfinite
from support import attention_reference
from support.bounds import relative_l2


@dataclass
class Case:
    """One problem; mask and options as ``allfinite.scaled_dot_product_attention`` takes them."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    mask: Tensor | None = None
    grad_lse: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Copies of query, key, value and, where it is floating, mask that require a gradient."""
        tensors = [self.query, self.key, self.value]
        if self.mask is not None and self.mask.is_floating_point():
            tensors.append(self.mask)
        return [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]


def random_case(
    dtype: torch.dtype,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    queries: int = 70,
    keys: int = 150,
    depth: int = 24,
    value_depth: int | None = None,
    mask: Tensor | None = None,
    amplitude: float = 1.0,
    **options: Any,
) -> Case:
    """Normal query, key, value and incoming gradients (of output and lse)."""
    kv_heads = kv_heads or heads
    value_depth = value_depth or depth
    return Case(
        torch.randn(batch, heads, queries, depth).to(dtype),
        torch.randn(batch, kv_heads, keys, depth).to(dtype),
        torch.randn(batch, kv_heads, keys, value_depth).to(dtype),
        (torch.randn(batch, heads, queries, value_depth) * amplitude).to(dtype),
        mask,
        (torch.randn(batch, heads, queries) * amplitude).to(torch.float64 if dtype == torch.float64 else torch.float32),
        options,
    )


def run(case: Case) -> dict[str, Tensor]:
    """Output, lse and gradients (query, key, value and perhaps mask) of the op under test."""
    leaves = case.leaves()
    mask = leaves[3] if len(leaves) > 3 else case.mask
    output, lse = allfinite.scaled_dot_product_attention(
        *leaves[:3], mask, return_lse=True, enable_gqa=case.query.size(-3) != case.key.size(-3), **case.options
    )
    incoming = [case.grad, torch.zeros_like(lse) if case.grad_lse is None else case.grad_lse]
    grads = torch.autograd.grad([output, lse], leaves, incoming)
    return dict(
        zip(("output", "lse", "dq", "dk", "dv", "dmask"), (output.detach(), lse.detach(), *grads), strict=False)
    )


def reference(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same by the textbook, in ``dtype``."""
    leaves = case.leaves(dtype)
    mask = leaves[3] if len(leaves) > 3 else case.mask
    result = attention_reference.attention(*leaves[:3], mask, dtype=dtype, **case.options)
    outputs, incoming = [result.output], [case.grad.to(dtype)]
    if case.grad_lse is not None:
        empty = result.lse == -torch.inf
        outputs.append(torch.where(empty, torch.zeros_like(result.lse), result.lse))
        incoming.append(case.grad_lse.to(dtype))
    grads = torch.autograd.grad(outputs, leaves, incoming)
    names = ("output", "lse", "dq", "dk", "dv", "dmask")
    return dict(zip(names, (result.output.detach(), result.lse.detach(), *grads), strict=False))


def assert_accurate(case: Case, factor: float = 1.25) -> dict[str, Tensor]:
    """F3: relative L2 error of every result <= 1.25 x that of fp32 maths (fp64 for fp64) rounded once, + 2^-21.

    2^-21 of the result itself is less than the contract's 2^-21 of the terms; fp64: 2^-48, because the reference is
    fp64 as well. Returns the results.
    """
    wide = case.query.dtype == torch.float64
    got, exact, plain = run(case), reference(case), reference(case, torch.float64 if wide else torch.float32)
    for name, actual in got.items():
        expected = exact[name].detach()
        empty = torch.isinf(expected) & (expected < 0) & (name == "lse")
        assert torch.equal(empty, torch.isinf(actual.double()) & (actual < 0) & (name == "lse")), name
        actual, expected, maths = (t.masked_fill(empty, 0) for t in (actual, expected, plain[name].to(actual.dtype)))
        bound = factor * relative_l2(maths, expected) + (2**-48 if wide else 2**-21)
        error = relative_l2(actual, expected)
        assert error <= bound, f"{name}: relative L2 error {error:.3e}, bound {bound:.3e}"
    return got
