"""What ``MultiheadAttention`` takes: the checks of its arguments, and its two masks as one."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_NAME = "allfinite.nn.MultiheadAttention"


class AttentionArgumentError(ValueError, RuntimeError, AssertionError):
    """An argument of MultiheadAttention that does not fit; also of the types that torch raises for it."""


def _expect(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise AttentionArgumentError(f"{_NAME}: expected {expected}, but got {got}")


def check_arguments(
    module: torch.nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Raises AttentionArgumentError for shapes, mask dtypes and combinations that make no sense."""
    nested = query.is_nested or key.is_nested or value.is_nested
    _expect(not nested, "dense tensors with a key_padding_mask", "a nested tensor")
    _expect(query.dim() in (2, 3), "query of 2 or 3 dimensions", f"shape {list(query.shape)}")
    _expect(query.size(-1) == module.embed_dim, f"query of {module.embed_dim} features", list(query.shape))
    for name, tensor, size in (("key", key, module.kdim), ("value", value, module.vdim)):
        _expect(tensor.dim() == query.dim(), f"{name} of {query.dim()} dimensions as query", list(tensor.shape))
        _expect(tensor.size(-1) == size, f"{name} of {size} features", list(tensor.shape))
    _expect(
        key.shape[:-1] == value.shape[:-1],
        "key and value of one length and batch",
        f"{list(key.shape)} and {list(value.shape)}",
    )

    batched = query.dim() == 3
    batch_dim, length_dim = (0, 1) if module.batch_first and batched else (1, 0)
    length, keys = query.size(length_dim), key.size(length_dim)
    if batched:
        batch = query.size(batch_dim)
        _expect(key.size(batch_dim) == batch, f"key of batch {batch} as query", list(key.shape))
    else:
        batch = 1
    for name, mask, shapes in (
        ("key_padding_mask", key_padding_mask, [(batch, keys)] if batched else [(keys,)]),
        ("attn_mask", attn_mask, [(length, keys), (batch * module.num_heads, length, keys)]),
    ):
        if mask is not None:
            known = mask.dtype == torch.bool or mask.is_floating_point()
            _expect(known, f"{name} of bool or a floating dtype", mask.dtype)
            _expect(any(mask.shape == s for s in shapes), f"{name} of shape {_either(shapes)}", list(mask.shape))
    _expect(not is_causal or attn_mask is not None, "attn_mask with the hint is_causal=True", "None")


def _either(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


def combined_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, added: int
) -> Tensor | None:
    """The mask for ``scaled_dot_product_attention``, broadcasting to ``(N, num_heads, L, S + added)``.

    Args:
        attn_mask: ``(L, S)`` or ``(N * num_heads, L, S)``; bool: True leaves out; float: added.
        key_padding_mask: ``(N, S)``; bool: True leaves out; float: added.
        num_heads: to split the first dimension of a 3-D ``attn_mask``.
        added: keys behind the S of the masks, which take part always.

    Returns:
        bool, True takes part; where one of the two is a float mask, float, -inf leaves out, added up in float32 or
        wider (two masks of -65504 in fp16 must not become -inf); None without masks.
    """
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(attn_mask.size(0) // num_heads, num_heads, *attn_mask.shape[1:])
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    if not masks:
        return None
    left_out = [mask for mask in masks if mask.dtype == torch.bool]
    biases = [mask for mask in masks if mask.dtype != torch.bool]
    if not biases:
        allowed = ~left_out[0] if len(left_out) == 1 else ~(left_out[0] | left_out[1])
        return F.pad(allowed, (0, added), value=True)
    if len(biases) == 2:
        wide = torch.promote_types(torch.promote_types(biases[0].dtype, biases[1].dtype), torch.float32)
        bias = biases[0].to(wide) + biases[1].to(wide)
    else:
        bias = biases[0]
        if left_out:
            bias = torch.where(left_out[0], float("-inf"), bias)
    return F.pad(bias, (0, added))
