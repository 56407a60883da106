"""Attention that also returns its weights, by plain torch expressions in float32 or float64."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """``softmax(query @ key.T / sqrt(D)) @ value`` and the softmax.

    Args:
        query: ``(N, heads, L, D)``.
        key: ``(N, heads, S, D)``.
        value: ``(N, heads, S, D)``.
        mask: broadcasts to ``(N, heads, L, S)``; bool: True takes part; float: added, -inf leaves out.
        dropout_p: probability of leaving a weight out.

    Returns:
        The output in value's dtype, and the weights after dropout, ``(N, heads, L, S)``, in float32 (float64).
        A row that may attend to nothing has weights 0, output 0 and gradient 0. Keys and values that no row may attend
        to have no influence, whatever they hold.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    with _without_autocast(query.device.type):
        q, k, v = query.to(wide), key.to(wide), value.to(wide)
        if mask is None:
            weights = (q * q.size(-1) ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
        else:
            left_out = ~mask if mask.dtype == torch.bool else mask == float("-inf")
            unused = left_out.all(-2, keepdim=True).transpose(-2, -1)
            k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)  # a NaN there would survive a weight of 0
            scores = q * q.size(-1) ** -0.5 @ k.transpose(-2, -1)
            if mask.dtype != torch.bool:
                scores = scores + mask.masked_fill(left_out, 0).to(wide)
            # A row with nothing to attend to takes finite scores through the softmax: -inf alone would give NaN.
            empty = left_out.all(-1, keepdim=True)
            scores = scores.masked_fill(left_out, float("-inf")).masked_fill(empty, 0)
            weights = scores.softmax(-1).masked_fill(left_out, 0)
        weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
        return (weights @ v).to(value.dtype), weights


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    # Not torch.amp.is_autocast_available: torch 2.9 cannot compile a call of it.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
