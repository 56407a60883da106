"""Scaled dot product attention, in the argument order of ``torch.nn.functional``."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from allfinite import _C
from allfinite._direct import direct

_KEYWORDS = ("softcap", "window")
_attention = direct(
    _C.ops.scaled_dot_product_attention, torch.ops.allfinite.scaled_dot_product_attention, keywords=_KEYWORDS
)
_attention_lse = direct(
    _C.ops.scaled_dot_product_attention_lse, torch.ops.allfinite.scaled_dot_product_attention_lse, keywords=_KEYWORDS
)
_OP = "allfinite::scaled_dot_product_attention"


def _without_causal_bias(
    query: Tensor, key: Tensor, mask: CausalBias, is_causal: bool, window: Sequence[int] | None
) -> tuple[Tensor | None, bool, Sequence[int] | None]:
    """What torch's ``CausalBias`` says, as ``(attn_mask, is_causal, window)``."""
    if is_causal:
        raise ValueError(f"{_OP}: expected a CausalBias or is_causal, but got both")
    lengths = query.size(-2), key.size(-2)
    if (mask.seq_len_q, mask.seq_len_kv) != lengths:
        raise ValueError(
            f"{_OP}: expected a CausalBias of lengths {lengths}, but got {(mask.seq_len_q, mask.seq_len_kv)}"
        )
    shift = lengths[1] - lengths[0]
    if mask.variant == CausalVariant.UPPER_LEFT or shift == 0:
        return None, True, window
    if shift < 0:  # the first rows see nothing, which no window says
        rows = torch.arange(lengths[0], device=query.device).unsqueeze(-1)
        return torch.arange(lengths[1], device=query.device) <= rows + shift, False, window
    left, right = (-1, -1) if window is None else window
    return None, False, (left, shift if right == -1 else min(right, shift))


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float = 0.0,
    window: Sequence[int] | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float = 0.0,
    window: Sequence[int] | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float = 0.0,
    window: Sequence[int] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(query @ key.T * scale) @ value``, as ``torch.nn.functional.scaled_dot_product_attention``.

    Scores are made in this order: scale, softcap, ``attn_mask``, ``is_causal`` and ``window``.

    Args:
        query: ``(..., heads, Sq, D)``, float16, bfloat16, float32 or float64; two dimensions or more.
        key: ``(..., heads, Sk, D)``, of query's dtype. Leading dimensions broadcast.
        value: ``(..., heads, Sk, Dv)``, of query's dtype.
        attn_mask: broadcasts to ``(..., heads, Sq, Sk)``. bool: True takes part. float16, bfloat16, float32 or float64,
            whatever query's dtype: added in float32 (float64); -inf masks, a finite value never does; differentiable,
            also where it is broadcast. Or torch's ``CausalBias``.
        dropout_p: probability in [0, 1] of leaving a weight out, exact to 2^-32, drawn from torch's default generator.
        is_causal: key j takes part in row i where j <= i (top left). Not together with ``attn_mask``.
        scale: any finite number; ``1 / sqrt(D)`` if None.
        enable_gqa: query's heads are a multiple of key's and value's.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: they do not.
        window: ``(left, right)``: -left <= j - i <= right, from the same diagonal as ``is_causal``; -1 is unbounded.
        return_lse: also return the logarithm of the sum of exp(score).

    Returns:
        ``(..., heads, Sq, Dv)`` in query's dtype, contiguous, computed in float32 (float64) and rounded once; with
        ``return_lse`` also the natural logarithm, before dropout, ``(..., heads, Sq)``, float32 (float64 for float64),
        differentiable. A row in which no key takes part: 0, lse -inf, gradients 0. A NaN or infinity shows in the rows
        in which it takes part; one in a masked key or value never shows, forward or backward.

    Raises:
        TypeError: dtypes. ValueError: shapes, probabilities, ``window``. RuntimeError: tensors on several devices,
        ``attn_mask`` together with ``is_causal``. NotImplementedError: a sparse or nested tensor, forward-mode and
        double differentiation.
    """
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal, window = _without_causal_bias(query, key, attn_mask, is_causal, window)
    attend = _attention_lse if return_lse else _attention
    result: Tensor | tuple[Tensor, Tensor] = attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, window
    )
    return result
