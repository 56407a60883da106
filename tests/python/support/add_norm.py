"""add_layer_norm and add_rms_norm side by side: cases, float64 references and the comparison with them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import allfinite
from support.bounds import assert_same_bits
from support.norm_reference import Exact, assert_within_f3, norm_reference, rms_eps

NAMES = ("add_layer_norm", "add_rms_norm")


@dataclass
class AddNorm:
    """One call of an op. ``dy`` and ``dsum``: the gradients of the two outputs that arrive, if any."""

    name: str
    x: Tensor
    residual: Tensor
    shape: tuple[int, ...]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = 1e-5
    dy: Tensor | None = None
    dsum: Tensor | None = None

    @property
    def rms(self) -> bool:
        return self.name == "add_rms_norm"

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable arguments that are there, by the name of their gradient."""
        named = {"dx": self.x, "dresidual": self.residual, "dweight": self.weight, "dbias": self.bias}
        return {name: t for name, t in named.items() if t is not None}

    def call(self, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The op, on ``leaves`` in place of the tensors."""
        arguments: list[Any] = [leaves["dx"], leaves["dresidual"], self.shape, leaves.get("dweight")]
        if not self.rms:
            arguments.append(leaves.get("dbias"))
        result: tuple[Tensor, Tensor] = getattr(allfinite, self.name)(*arguments, self.eps)
        return result

    def run(self) -> dict[str, Tensor]:
        """``y``, ``sum`` and the gradients that depend on a gradient that arrives."""
        with_grad = self.dy is not None or self.dsum is not None
        leaves = {name: t.detach().requires_grad_(with_grad) for name, t in self.leaves().items()}
        y, total = self.call(leaves)
        result = {"y": y.detach(), "sum": total.detach()}
        if with_grad:
            outputs, arriving = zip(
                *((t, d) for t, d in ((y, self.dy), (total, self.dsum)) if d is not None), strict=True
            )
            if self.dy is None:
                leaves = {name: leaves[name] for name in ("dx", "dresidual")}
            result.update(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), arriving), strict=True))
        return result

    def rounded_sum(self) -> Tensor:
        """input + residual in fp32 (fp64), rounded once to residual's dtype."""
        compute = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        return (self.x.to(compute) + self.residual.to(compute)).to(self.residual.dtype)

    def reference(self) -> dict[str, Exact]:
        """The norm of the stored sum, in float64, and all gradients; ``dx`` and ``dresidual`` are the same numbers."""
        eps = rms_eps(self.eps, self.x.dtype)
        total = self.rounded_sum()
        dy = torch.zeros_like(self.x) if self.dy is None else self.dy
        exact = norm_reference(total, self.shape, self.weight, self.bias, eps, dy, rms=self.rms)
        if self.dsum is not None:
            dsum = self.dsum.double()
            exact["dx"] = Exact(exact["dx"].value + dsum, exact["dx"].terms + dsum.abs())
        exact["dresidual"] = exact["dx"]
        return exact

    def assert_accurate(self) -> None:
        """The sum bit for bit, and F3 for the output and every gradient."""
        actual = self.run()
        assert_same_bits(actual.pop("sum"), self.rounded_sum())
        assert_within_f3(actual, self.reference())


def random_case(
    name: str,
    dtype: torch.dtype,
    *,
    residual_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    batch: tuple[int, ...] = (5,),
    shape: tuple[int, ...] = (33,),
    **changes: Any,
) -> AddNorm:
    """A case of ordinary numbers with all arguments and gradients, but for ``changes``; dtypes are x's where None."""

    def draw(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64).to(dtype)

    full = (*batch, *shape)
    residual_dtype, weight_dtype = residual_dtype or dtype, weight_dtype or dtype
    case = AddNorm(
        name,
        x=draw(*full, dtype=dtype),
        residual=draw(*full, dtype=residual_dtype).mul(2).add(0.5),
        shape=shape,
        weight=draw(*shape, dtype=weight_dtype),
        bias=None if name == "add_rms_norm" else draw(*shape, dtype=weight_dtype),
        dy=draw(*full, dtype=dtype),
        dsum=draw(*full, dtype=residual_dtype),
    )
    return replace(case, **changes)
