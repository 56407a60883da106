"""Attention modules in timm's shape: one ``qkv`` projection that is split into heads, attention, ``proj``.

Many projects carry a class of this shape under names of their own, so a module is known by duck type, in this order:

1. It has ``qkv`` and ``proj`` with the features of linear layers and an integer ``num_heads`` that divides them; other
   submodules are only the optional ``q_norm``, ``k_norm``, ``norm``, ``attn_drop`` and ``proj_drop``; no parameter or
   buffer lies in the module itself (a table of relative positions, a learnt temperature).
2. Its ``forward`` takes ``(x)``, ``(x, attn_mask=None)`` or ``(x, attn_mask=None, is_causal=False)``.
3. A trial agrees (``attention_trial.py``): on a bare copy with random float32 weights its own ``forward`` and the
   replacement give the same result for a small random input, with each optional argument, and with each dropout at 1.

Only then is it swapped; otherwise the report says which of these failed.
"""

import inspect

import torch
from torch import Tensor
from torch.nn import Module

from allfinite.attention import scaled_dot_product_attention

_OPTIONAL = ("q_norm", "k_norm", "norm", "attn_drop", "proj_drop")
_ARGUMENTS = ("attn_mask", "is_causal")


class SplitAttention(Module):
    """Holds the ``forward`` that a swapped module gets; never instantiated."""

    qkv: Module
    proj: Module
    num_heads: int

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Self-attention over ``x``.

        Args:
            x: ``(batch, tokens, features)``.
            attn_mask: broadcasts to ``(batch, heads, tokens, tokens)``; bool: True takes part; float: added.
            is_causal: token i attends to tokens up to i; not together with ``attn_mask``.

        Returns:
            ``(batch, tokens, features)``. No logit is stored, so none overflows. A token that may attend to nothing
            gives ``proj`` of zeros.
        """
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q_norm, k_norm = _child(self, "q_norm"), _child(self, "k_norm")
        q, k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
        attn_drop = _child(self, "attn_drop")
        dropout_p = attn_drop.p if self.training and isinstance(attn_drop, torch.nn.Dropout) else 0.0
        out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, getattr(self, "scale", None))
        out = out.transpose(1, 2).flatten(2)
        for name in ("norm", "proj", "proj_drop"):
            child = _child(self, name)
            out = out if child is None else child(out)
        return out


def _child(module: Module, name: str) -> Module | None:
    return module._modules.get(name)


def looks_split(module: Module) -> bool:
    """Whether the module has the three names of the shape."""
    return _child(module, "qkv") is not None and _child(module, "proj") is not None and hasattr(module, "num_heads")


def optional_arguments(module: Module) -> list[str] | str:
    """The optional arguments of the module's ``forward``, or the reason why it is not of the shape (rules 1 and 2)."""
    return _wrong_structure(module) or _optional_arguments(module)


def _wrong_structure(module: Module) -> str:
    heads = module.num_heads
    if not isinstance(heads, int) or heads < 1:
        return f"num_heads is {heads!r}, not a positive integer"
    sizes = [getattr(_child(module, n), f, None) for n, f in (("qkv", "out_features"), ("proj", "in_features"))]
    if not all(isinstance(size, int) for size in sizes):
        return "qkv and proj are not linear layers"
    if sizes[0] != 3 * sizes[1] or sizes[1] % heads:  # type: ignore[operator]
        return f"qkv gives {sizes[0]} features, which is not 3 x {heads} heads of what proj takes, {sizes[1]}"
    others = [name for name, child in module.named_children() if name not in ("qkv", "proj", *_OPTIONAL)]
    if others:
        return f"it has submodules that are not of the known shape: {', '.join(others)}"
    own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if own:
        return f"it has parameters or buffers of its own: {', '.join(own)}"
    for name in ("attn_drop", "proj_drop"):
        child = _child(module, name)
        if child is not None and not isinstance(child, torch.nn.Dropout | torch.nn.Identity):
            return f"{name} is a {type(child).__name__}, not a Dropout"
    scale = getattr(module, "scale", None)
    if scale is not None and not isinstance(scale, float | int):
        return f"scale is a {type(scale).__name__}, not a number"
    return ""


def _optional_arguments(module: Module) -> list[str] | str:
    parameters = list(inspect.signature(module.forward).parameters.values())
    if not parameters:
        return "its forward takes no input"
    for position, parameter in enumerate(parameters[1:]):
        expected = _ARGUMENTS[position] if position < len(_ARGUMENTS) else ""
        optional = parameter.default is not inspect.Parameter.empty and not parameter.default
        if parameter.name != expected or not optional:
            return f"its forward takes {parameter.name!r}, which is not of the known shape"
    return [parameter.name for parameter in parameters[1:]]
