"""Measurements taken beside the model's own maths, the same for every recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class LogitProbe:
    """Largest |q . k| of every attention, before any scale, computed in fp32 from the output of `qkv`.

    It hangs on the `qkv` submodules, so it sees the same numbers whatever is done with them afterwards: eager products,
    a fused op, or a converted module.

    Args:
        model: a model whose attentions have `qkv` and `num_heads`; put the probe on before converting.

    Raises:
        ValueError: the model has no such attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self._largest: Tensor | None = None
        watched = 0
        for module in model.modules():
            qkv, num_heads = getattr(module, "qkv", None), getattr(module, "num_heads", None)
            if isinstance(qkv, nn.Module) and isinstance(num_heads, int):
                self._watch(qkv, num_heads)
                watched += 1
        if not watched:
            raise ValueError("LogitProbe: expected attentions with `qkv` and `num_heads` in the model, but got none")

    def reset(self) -> None:
        """Forgets what was seen; call it before each forward that counts."""
        self._largest = None

    def largest(self) -> float:
        """Largest logit since `reset`: inf or NaN where q or k hold one.

        Raises:
            RuntimeError: no `qkv` ran since `reset`, so there is nothing to report.
        """
        if self._largest is None:
            raise RuntimeError("LogitProbe: expected a forward through `qkv` since reset(), but got none")
        return float(self._largest)

    def _watch(self, qkv: nn.Module, num_heads: int) -> None:
        def measure(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            largest = largest_logit(output, num_heads)
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

        qkv.register_forward_hook(measure)


@torch.no_grad()
def largest_logit(qkv: Tensor, num_heads: int) -> Tensor:
    """Largest |q . k| over batch, heads and token pairs.

    Args:
        qkv: shape (batch, tokens, 3 * dim), any float dtype.
        num_heads: number of heads.

    Returns:
        A 0-dimensional fp32 tensor; NaN if any q or k that meets is NaN.
    """
    batch, tokens, width = qkv.shape
    with torch.autocast(qkv.device.type, enabled=False):
        heads = qkv.float().reshape(batch, tokens, 3, num_heads, width // (3 * num_heads))
        q, k, _ = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return (q @ k.transpose(-2, -1)).abs().amax()


@torch.no_grad()
def underflow_share(parameters: Iterable[Tensor], dtype: torch.dtype) -> float:
    """Share of the gradient's elements that are zero or below the smallest normal number of `dtype`.

    Args:
        parameters: parameters after backward, their gradients still scaled; those without a gradient are left out.
        dtype: the type in which backward ran, whose range counts.

    Returns:
        A number in [0, 1]; NaN without any gradient. NaN and inf elements count as not underflowed.
    """
    smallest = torch.finfo(dtype).tiny
    grads = [p.grad for p in parameters if p.grad is not None]
    total = sum(g.numel() for g in grads)
    lost = sum(int((g.abs() < smallest).sum()) for g in grads)
    return lost / total if total else math.nan
