"""Attention in float64 by the textbook, with masks as selections: what the kernels are measured against."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Reference:
    """Results of ``attention``: a float64 graph, so gradients come from autograd."""

    output: Tensor
    lse: Tensor
    weights: Tensor


def visible(
    queries: int, keys: int, mask: Tensor | None = None, is_causal: bool = False, window: tuple[int, int] | None = None
) -> Tensor:
    """Bool, broadcastable to (..., queries, keys): which key takes part in which row."""
    offset = torch.arange(keys) - torch.arange(queries).unsqueeze(-1)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if is_causal:
        seen = seen & (offset <= 0)
    if window is not None:
        left, right = window
        seen = seen & (offset >= -left) if left >= 0 else seen
        seen = seen & (offset <= right) if right >= 0 else seen
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    return seen


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] | None = None,
    kept: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Reference:
    """Attention computed in ``dtype``; kept: what dropout leaves of each weight (0 or 1 / (1 - p)).

    Key heads are repeated where query has a multiple of them. Masked keys are left out by selection before and after
    the exponential, so nothing in a masked row of key or value, and no gradient of it, can show.
    """
    q, k, v = (t.to(dtype) for t in (query, key, value))
    if q.dim() > 2 and k.size(-3) not in (1, q.size(-3)) and q.size(-3) > 1:
        k, v = (t.repeat_interleave(q.size(-3) // k.size(-3), -3) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.size(-1) ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.size(-2), k.size(-2), mask, is_causal, window).expand_as(scores)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.to(dtype)
        scores = scores + torch.where(bias == -torch.inf, torch.zeros_like(bias), bias)
    masked = torch.where(seen, scores, torch.full_like(scores, -torch.inf))
    empty = ~seen.any(-1, keepdim=True)
    largest = masked.detach().amax(-1, keepdim=True) if masked.size(-1) else torch.zeros_like(masked.sum(-1, True))
    largest = torch.where(empty, torch.zeros_like(largest), largest)
    shifted = torch.where(seen, scores - largest, torch.zeros_like(scores))
    exponentials = torch.where(seen, shifted.exp(), torch.zeros_like(shifted))
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(total, -torch.inf), total.clamp_min(1e-300).log() + largest).squeeze(-1)
    dropped = weights if kept is None else weights * kept
    return Reference(dropped @ v, lse, weights)


def gradients(outputs: list[tuple[Tensor, Tensor]], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of ``inputs`` (leaves of a reference graph) for (output, incoming gradient) pairs."""
    values = [o for o, _ in outputs]
    incoming = [g.to(o.dtype) for o, g in outputs]
    return list(torch.autograd.grad(values, inputs, incoming, allow_unused=True))
