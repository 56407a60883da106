"""Attention for transformers under the name ``allfinite``.

Importing this module registers it; then a model takes it as any other implementation::

    import allfinite.integrations.transformers

    model = AutoModel.from_pretrained(name, attn_implementation="allfinite")
    model.set_attn_implementation("allfinite")  # or on a model that is there

Masks arrive as for transformers' ``sdpa``: bool, or None where there is nothing to mask but the future. A row that may
attend to nothing (padding) gives 0 and gradient 0. ``convert(model)`` swaps the norms; the two go together.
"""

from typing import Any

import torch
from torch import Tensor

from allfinite.attention import scaled_dot_product_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise ImportError(
        "allfinite.integrations.transformers: expected transformers 4.53 or newer, but could not import what it needs "
        f"({error}); run `pip install -U transformers`"
    ) from error

NAME = "allfinite"

# Arguments of other implementations that change the result: ignoring one would be wrong in silence.
_REFUSED = {
    "head_mask": "head_mask",
    "output_attentions": "output_attentions=True",
    "s_aux": "attention sinks (s_aux)",
}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' models call.

    Args:
        module: the attention layer; its ``is_causal`` counts where the argument is None (True where it has none).
        query: ``(batch, heads, Sq, D)``.
        key: ``(batch, key heads, Sk, D)``; heads is a multiple of key heads.
        value: ``(batch, key heads, Sk, Dv)``.
        attention_mask: broadcasts to ``(batch, heads, Sq, Sk)``; bool: True takes part; float: added. With a mask, and
            with one query, ``is_causal`` and ``sliding_window`` are taken to be in the mask.
        dropout: probability of leaving a weight out.
        scaling: ``1 / sqrt(D)`` if None.
        is_causal: query i attends to keys up to i (from the top left) where there is no mask.
        softcap: scores become ``softcap * tanh(score / softcap)``; None or 0: they do not.
        sliding_window: with ``is_causal``, query i attends to that many keys up to i.
        position_bias: added to the scores; broadcasts to ``(batch, heads, Sq, Sk)``.
        kwargs: what only other implementations read.

    Returns:
        ``(batch, Sq, heads, Dv)``, contiguous, and None for the attention weights, which are never stored.

    Raises:
        ValueError: ``head_mask``, ``output_attentions`` or ``s_aux``; and see ``scaled_dot_product_attention``.
    """
    for argument, what in _REFUSED.items():
        given = kwargs.get(argument)
        if given is not None and given is not False:
            raise ValueError(
                f"allfinite.integrations.transformers: expected a call without {what}, which needs the stored "
                "attention weights, but got one; use attn_implementation='eager' for it"
            )
    several = query.shape[2] > 1
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(several and attention_mask is None and causal)
    window = (sliding_window - 1, -1) if causal and sliding_window is not None else None
    if position_bias is not None:
        if causal:
            attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        attention_mask, causal = _biased(position_bias, attention_mask), False
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap or 0.0,
        window=window,
    )
    return out.transpose(1, 2).contiguous(), None


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """The bias and the mask as one mask to add."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    wide = torch.promote_types(torch.promote_types(bias.dtype, mask.dtype), torch.float32)
    return bias.to(wide) + mask.to(wide)


def register() -> None:
    """Registers ``attention`` and its mask function; importing this module does it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
