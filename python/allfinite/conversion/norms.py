"""Norms of other projects: layer norms and RMS norms under names of their own, with forms of their own.

Models carry many such classes, so a module is known by duck type, in this order:

1. It has no submodules and no buffers; its parameters are at most ``weight`` and ``bias``, of one shape; a number is in
   ``eps``, ``variance_epsilon`` or another of the usual names. torch's batch, group and instance norms are not meant.
2. Its ``forward`` takes one tensor.
3. A trial (``norm_trial.py``) finds a ``NormForm`` with which the ``forward`` below gives what its own gives, in shape,
   memory layout, dtype and value: over several shapes and magnitudes, with a random weight, in float32, with every
   pair of activation and weight dtypes that it takes, and under autocast.

Only then is it swapped; otherwise the report says which of these failed.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from allfinite.norms import layer_norm, rms_norm

_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
_OTHER_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.GroupNorm,
    torch.nn.LocalResponseNorm,
    torch.nn.CrossMapLRN2d,
)


DtypeRule = Literal["input", "promoted", "weight"]


class NormForm(NamedTuple):
    """In which of the usual forms a module computes its norm.

    Attributes:
        kind: which op.
        eps: the attribute that holds epsilon.
        argument: the name of forward's argument.
        offset: 1 where ``1 + weight`` multiplies, else 0.
        axis: the normalised dimension, -1, or 1: channels first.
        keeps_layout: channels first, and a contiguous input gives a contiguous output.
        dtype: that of the output: the input's, what torch promotes input and weight to, or the weight's where that is a
            16-bit one and else what torch promotes them to.
    """

    kind: Literal["layer_norm", "rms_norm"]
    eps: str
    argument: str
    offset: int = 0
    axis: Literal[-1, 1] = -1
    keeps_layout: bool = False
    dtype: DtypeRule = "input"


class NormLike(Module):
    """Holds the ``forward`` that a swapped module gets; never instantiated."""

    _allfinite_form: NormForm

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The norm of the one tensor given, ``(..., features)``, or ``(batch, features, ...)`` with channels first.

        16-bit tensors and weights of any dtype mix; computed in float32 (float64), rounded once to the dtype that the
        module's own forward gives.
        """
        form = self._allfinite_form
        (x,) = args or (kwargs[form.argument],)
        weight, bias = _tensor(self, "weight"), _tensor(self, "bias")
        dtype = _output_dtype(form.dtype, x, weight)
        wide = torch.promote_types(x.dtype, dtype)
        rows = (x if form.axis == -1 else x.movedim(1, -1)).to(wide)
        shape = normalized_shape(self)
        weight = _beside(weight, wide, form.offset)
        eps: Any = getattr(self, form.eps)
        if form.kind == "layer_norm":
            out = layer_norm(rows, shape, weight, _beside(bias, wide, 0), eps)
        else:
            out = rms_norm(rows, shape, weight, eps)
        out = out.to(dtype)
        if form.axis == -1:
            return out
        out = out.movedim(-1, 1)
        return out.contiguous() if form.keeps_layout and x.is_contiguous() else out


def normalized_shape(module: Module) -> Sequence[int]:
    """The lengths of the dimensions that the norm goes over."""
    weight = _tensor(module, "weight")
    shape: Sequence[int] = module.normalized_shape if weight is None else weight.shape  # type: ignore[assignment]
    return shape


def _tensor(module: Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None  # some keep a flag under the name of a bias


def _output_dtype(rule: DtypeRule, x: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is None or rule == "input":
        return x.dtype
    if rule == "weight" and weight.dtype in (torch.float16, torch.bfloat16):
        return weight.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def _beside(parameter: Tensor | None, dtype: torch.dtype, offset: int) -> Tensor | None:
    """The parameter plus ``offset`` in a dtype that the ops take beside activations of ``dtype``."""
    if parameter is None or (parameter.dtype == dtype and not offset):
        return parameter
    wide = parameter.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return wide + offset if offset else wide


def looks_like_norm(module: Module) -> bool:
    """Whether the module's attributes or name make it a candidate."""
    if any(child is not None for child in module._modules.values()) or isinstance(module, _OTHER_NORMS):
        return False
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    name = type(module).__name__.lower()
    return "layernorm" in name or "rmsnorm" in name or (bool(_eps_name(module)) and _has_weight_row(module))


def structure(module: Module) -> tuple[str, str] | str:
    """(the attribute that holds epsilon, the argument of forward), or the reason why rule 1 or 2 fails."""
    if buffers := [name for name, _ in module.named_buffers()]:
        return f"it has buffers: {', '.join(buffers)}"
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if others := [name for name in parameters if name not in ("weight", "bias")]:
        return f"it has parameters that a norm does not have: {', '.join(others)}"
    if len({p.shape for p in parameters.values()}) > 1:
        return "its weight and bias differ in shape"
    if "weight" not in parameters and not hasattr(module, "normalized_shape"):
        return "it has neither a weight nor a normalized_shape from which its width can be read"
    if not all(p.dim() for p in parameters.values()):
        return "its weight is one number"
    eps = _eps_name(module)
    if not eps:
        return f"no number is in any of {', '.join(_EPS)}"
    arguments = list(inspect.signature(module.forward).parameters.values())
    if len(arguments) != 1 or arguments[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return f"its forward takes ({', '.join(a.name for a in arguments)}), not one tensor"
    return eps, arguments[0].name


def _has_weight_row(module: Module) -> bool:
    """Whether there is a weight of one dimension, or one that may become it; a convolution's is none."""
    if "weight" not in module._parameters:
        return False
    weight = module._parameters["weight"]
    return weight is None or isinstance(weight, UninitializedParameter) or weight.dim() == 1


def _eps_name(module: Module) -> str:
    for name in _EPS:
        value = module.__dict__.get(name, "")
        if isinstance(value, float) or (value is None and isinstance(module, torch.nn.RMSNorm)):
            return name
    return ""
