"""``torch.nn.MultiheadAttention`` over ``allfinite.scaled_dot_product_attention``."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from allfinite.attention import scaled_dot_product_attention
from allfinite.nn.attention_arguments import check_arguments, combined_mask
from allfinite.nn.attention_weights import attend_with_weights

Triple = tuple[Tensor, Tensor, Tensor]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Drop-in for ``torch.nn.MultiheadAttention``: same arguments, parameters and state dict.

    What differs: no logit is stored in 16 bits, so none overflows; a query that may attend to nothing gives the output
    projection's bias and weights of 0, with gradient 0, where torch gives NaN; NaN in a key or value that is masked for
    every query does not spread. There is no separate inference path, hence no nested tensors. With ``add_bias_kv`` or
    ``add_zero_attn`` and the hint ``is_causal``, ``attn_mask`` itself is used, so that the added keys stay visible.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from ``query`` to ``key`` and ``value``.

        Args:
            query: ``(L, N, embed_dim)``, with ``batch_first`` ``(N, L, embed_dim)``, or ``(L, embed_dim)``.
            key: ``(S, N, kdim)``, ``(N, S, kdim)`` or ``(S, kdim)``.
            value: ``(S, N, vdim)``, ``(N, S, vdim)`` or ``(S, vdim)``.
            key_padding_mask: ``(N, S)`` or ``(S)``; bool: True leaves the key out; float: added to its scores.
            need_weights: also return the attention weights. They are computed in float32 (float64), in memory of their
                size; with False nothing of the size L x S is stored.
            attn_mask: ``(L, S)`` or ``(N * num_heads, L, S)``; bool: True leaves the pair out; float: added.
            average_attn_weights: the mean of the weights over the heads, else one set a head.
            is_causal: a hint that ``attn_mask``, which must be given, is the causal mask.

        Returns:
            The output in the shape of ``query``, and the weights, ``(N, L, S)`` or ``(N, num_heads, L, S)`` in query's
            dtype (after dropout, as torch), or None.

        Raises:
            ValueError: shapes or dtypes of masks that do not fit, nested tensors, ``is_causal`` without ``attn_mask``.
                The error is an AssertionError and a RuntimeError as well, which is what torch raises.
        """
        check_arguments(self, query, key, value, key_padding_mask, attn_mask, is_causal)
        batched = query.dim() == 3
        if not batched:
            query, key, value = _each(query, key, value, lambda t: t.unsqueeze(0))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _each(query, key, value, lambda t: t.transpose(0, 1))

        q, k, v = _projected(self, query, key, value)
        k, v, added = _with_added_keys(self, k, v)
        q, k, v = (t.view(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        only_causal = is_causal and key_padding_mask is None and not need_weights and not added
        mask = None if only_causal else combined_mask(attn_mask, key_padding_mask, self.num_heads, added)
        dropout_p = self.dropout if self.training else 0.0

        weights: Tensor | None = None
        if need_weights:
            attended, weights = attend_with_weights(q, k, v, mask, dropout_p)
            weights = (weights.mean(1) if average_attn_weights else weights).to(query.dtype)
        else:
            attended = scaled_dot_product_attention(q, k, v, mask, dropout_p, only_causal)
        output = F.linear(attended.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights


def _each(query: Tensor, key: Tensor, value: Tensor, change: Callable[[Tensor], Tensor]) -> Triple:
    """``change`` of each, with arguments that were one tensor still one tensor."""
    new_query = change(query)
    new_key = new_query if key is query else change(key)
    new_value = new_query if value is query else new_key if value is key else change(value)
    return new_query, new_key, new_value


def _projected(module: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Triple:
    """The input projections, each ``(N, length, embed_dim)``; one product where the three inputs are one."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if weight is not None and query is key and key is value:
        q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
        return q, k, v
    if weight is not None:
        weights = weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _with_added_keys(module: torch.nn.MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys and values with the learnt pair and the pair of zeros behind them, and how many there are."""
    added = 0
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.to(k.dtype).expand(k.size(0), 1, -1)], dim=1)
        v = torch.cat([v, module.bias_v.to(v.dtype).expand(v.size(0), 1, -1)], dim=1)
        added += 1
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added += 1
    return k, v, added
