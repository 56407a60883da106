"""Runs the ``forward`` of attention in timm's shape beside its replacement, to see whether they compute the same.

Both run on a bare copy (``bare_copy.py``). The state of torch's random generator is restored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from allfinite.conversion.bare_copy import attributes, bare_copy, first_line, stored

_TOKENS, _BATCH = 5, 2
# fp32 maths in another order moves a result by 1e-6 of its size; another formula by far more than this.
_TOLERANCE = 1e-4


def disagreement(module: Module, replacement: Callable[..., Tensor], optional: list[str]) -> str:
    """Why ``replacement(copy, x, ...)`` is not ``module.forward(x, ...)``; '' where they agree.

    Args:
        module: of timm's shape, as ``split_attention.optional_arguments`` has found.
        replacement: the forward to be, called with the module first.
        optional: which of 'attn_mask' and 'is_causal' the module's forward takes.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False):
        bare = bare_copy(module, torch.Generator().manual_seed(0))
        for what, dropped, arguments in _cases(optional):
            reason = _compare(bare, replacement, dropped, arguments)
            if reason:
                return f"its forward, tried on random input {what}, {reason}"
    return ""


def _cases(optional: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """(words, the dropout that is set to 1, arguments): each a run that has one right result."""
    mask = torch.zeros(_BATCH, 1, _TOKENS, _TOKENS, device="cpu", dtype=torch.float32)
    mask[:, :, 1, 2], mask[:, :, :, 3], mask[1, :, 4, 0] = 1.5, float("-inf"), -0.7
    every: list[tuple[str, str, dict[str, Any]]] = [
        ("in eval mode", "", {}),
        ("with attn_drop at 1", "attn_drop", {}),
        ("with proj_drop at 1", "proj_drop", {}),
    ]
    if "attn_mask" in optional:
        every.append(("with attn_mask", "", {"attn_mask": mask}))
    if "is_causal" in optional:
        every.append(("with is_causal", "", {"is_causal": True}))
    return every


def _compare(bare: Module, replacement: Callable[..., Tensor], dropped: str, arguments: dict[str, Any]) -> str:
    features: int = bare.qkv.in_features  # type: ignore[assignment,union-attr]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_BATCH, _TOKENS, features, generator=generator, device="cpu", dtype=torch.float32)
    bare.train(bool(dropped))
    for name, child in bare.named_children():
        if isinstance(child, torch.nn.Dropout):
            child.p = float(name == dropped)
    state = attributes(bare)
    try:
        expected = bare.forward(x.clone(), **arguments)
    except Exception as error:
        return f"raised {first_line(error)}"
    if changed := stored(bare, state):
        return f"stored something in {', '.join(changed)}"
    if not isinstance(expected, Tensor):
        return f"gave a {type(expected).__name__}, not a tensor"
    actual = replacement(bare, x, **arguments)
    if expected.shape != actual.shape:
        return f"gave shape {list(expected.shape)}, attention gives {list(actual.shape)}"
    difference = float((expected - actual).abs().max())
    size = max(1.0, float(expected.abs().max()))
    return "" if difference <= _TOLERANCE * size else f"differs from attention by {difference / size:.2g} of its size"
