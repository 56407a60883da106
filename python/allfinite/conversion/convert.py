"""The walk over a model that decides, module by module, what is swapped."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized

from allfinite import nn
from allfinite.conversion import attention_trial, bare_copy, norm_trial, norms, split_attention
from allfinite.conversion.classes import is_replacement, replacement_class
from allfinite.conversion.report import ConversionReport, Left, Swapped, SwitchedOff

_ATTENTION_OP = "allfinite::_scaled_dot_product_attention_forward"
_NORM_OPS = {"layer_norm": "allfinite::_layer_norm_forward", "rms_norm": "allfinite::_rms_norm_forward"}
# torch's class, what replaces it, and the op that must be there on the module's device
_KINDS: tuple[tuple[type[Module], type[Module], str], ...] = (
    (torch.nn.LayerNorm, nn.LayerNorm, _NORM_OPS["layer_norm"]),
    (torch.nn.RMSNorm, nn.RMSNorm, _NORM_OPS["rms_norm"]),
    (torch.nn.MultiheadAttention, nn.MultiheadAttention, _ATTENTION_OP),
    (torch.nn.CrossEntropyLoss, nn.CrossEntropyLoss, "allfinite::_cross_entropy_forward"),
    (torch.nn.Softmax, nn.Softmax, "allfinite::_softmax_forward"),
)

# Read by the fast paths of torch's encoder, and by nothing else: where, and what turns the path off.
_FAST_PATHS: tuple[tuple[type[Module], str, object], ...] = (
    (torch.nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (torch.nn.TransformerEncoder, "use_nested_tensor", False),
)


@dataclass(frozen=True)
class _Choice:
    """What a module is to become.

    Attributes:
        source: the class that has the forward.
        now: what the report says.
        op: the op that must be there on the module's device.
        form: for that forward to read.
    """

    source: type[Module]
    now: str
    op: str
    form: Hashable = None


def convert(model: Module) -> ConversionReport:
    """Swaps norms, attention, softmax and cross entropy of ``model`` for finite ones, in place.

    The outputs stay what they were within rounding; where the former modules overflowed, they are finite. The optimizer
    need not be made anew: every Parameter stays the same object. Call it before or after moving the model, before
    ``torch.compile``. A second call finds nothing more to do. See ``allfinite.conversion`` for what is swapped and how.

    Args:
        model: any module; its own class may be one of those that are swapped.

    Returns:
        What was swapped, what was left alone and why, to print; ``undo()`` takes everything back.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"allfinite.convert: expected a torch.nn.Module, but got {type(model).__name__}")
    names: dict[Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    report = ConversionReport()
    try:
        _convert(names, report)
    except BaseException:
        report.undo()  # nobody holds the report, so a half converted model could not be undone
        raise
    return report


def _convert(names: dict[Module, list[str]], report: ConversionReport) -> None:
    verdicts: dict[object, _Choice | str] = {}
    for module, (name, *also) in names.items():
        if is_replacement(module):
            report.already.append(name)
            continue
        choice = _choice(module, verdicts)
        if isinstance(choice, str):
            report.left.append(Left(name, _class_name(type(module)), choice))
        elif choice is not None:
            was, note = _class_name(type(module)), _note(module)
            report.change_class(module, replacement_class(type(module), choice.source, choice.form))
            report.swapped.append(Swapped(name, was, choice.now, tuple(also), note))
    _switch_off_fast_paths(names, report)


def _choice(module: Module, verdicts: dict[object, _Choice | str]) -> _Choice | str | None:
    """What the module is to become, the reason to leave it, or None: not of a kind that is swapped."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        compiled = module.original_name in [base.__name__ for base, _, _ in _KINDS]
        return "it is compiled by TorchScript: convert the model before that" if compiled else None
    for base, replacement, op in _KINDS:
        if isinstance(module, base) and kind.forward is base.forward:
            choice = _Choice(replacement, f"allfinite.nn.{replacement.__name__}", op)
            return _obstacle(module) or _no_kernel(module, op) or choice
    if norms.looks_like_norm(module):
        return _obstacle(module) or _norm(module, verdicts)
    if isinstance(module, tuple(base for base, _, _ in _KINDS)):
        return "it has a forward of its own"
    if split_attention.looks_split(module):
        return _obstacle(module) or _no_kernel(module, _ATTENTION_OP) or _once(module, verdicts, _as_split_attention)
    return _unknown_attention(module)


def _once(
    module: Module, verdicts: dict[object, _Choice | str], decide: Callable[[Module], _Choice | str]
) -> _Choice | str:
    """``decide(module)`` where a copy can be tried; modules that are built alike are tried once."""
    if reason := bare_copy.obstacle(module):
        return reason
    plain = {k: v for k, v in module.__dict__.items() if isinstance(v, int | float | str | None) and k != "training"}
    shapes = tuple((name, p.shape) for name, p in module.named_parameters())
    key = (type(module), repr(module), shapes, tuple(sorted(plain.items(), key=lambda item: item[0])))
    if key not in verdicts:
        verdicts[key] = decide(module)
    return verdicts[key]


def _norm(module: Module, verdicts: dict[object, _Choice | str]) -> _Choice | str:
    choice = _once(module, verdicts, _as_norm)
    return choice if isinstance(choice, str) else _no_kernel(module, choice.op) or choice


def _as_norm(module: Module) -> _Choice | str:
    structure = norms.structure(module)
    form = structure if isinstance(structure, str) else norm_trial.find_form(module, *structure)
    return (
        form if isinstance(form, str) else _Choice(norms.NormLike, f"allfinite.{form.kind}", _NORM_OPS[form.kind], form)
    )


def _as_split_attention(module: Module) -> _Choice | str:
    optional = split_attention.optional_arguments(module)
    source = split_attention.SplitAttention
    reason = optional if isinstance(optional, str) else attention_trial.disagreement(module, source.forward, optional)
    return reason or _Choice(source, "allfinite.scaled_dot_product_attention", _ATTENTION_OP)


def _unknown_attention(module: Module) -> str | None:
    """Why a module that is attention by its name is left; None: it is not, or another one inside it is named."""
    named = [m for m in module.modules() if "attention" in type(m).__name__.lower()]
    if module not in named or len(named) > 1:
        return None
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation == "allfinite":
        return None
    if implementation is not None:
        return (
            f"transformers chooses its attention by name, now {implementation!r}: import "
            "allfinite.integrations.transformers, then call model.set_attn_implementation('allfinite')"
        )
    return "not attention of a shape that convert knows; its forward can call allfinite.scaled_dot_product_attention"


def _obstacle(module: Module) -> str:
    """What stands against any swap of this module, or ''."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the object"
    if is_parametrized(module):
        return "it is parametrized, which changes its class as well"
    if type(module).__call__ is not Module.__call__:
        return "it has a __call__ of its own"
    return ""


def _no_kernel(module: Module, op: str) -> str:
    """Why the op cannot run on the module's device, or ''."""
    device = next((t.device.type for t in module.parameters()), "cpu")
    if device not in ("cpu", "meta") and not torch._C._dispatch_has_kernel_for_dispatch_key(op, device.upper()):
        return f"it is on {device}, for which this build has no kernel"
    return ""


def _note(module: Module) -> str:
    attn_drop = module._modules.get("attn_drop")
    hooked = attn_drop is not None and (attn_drop._forward_hooks or attn_drop._forward_pre_hooks)
    return "hooks on attn_drop no longer run: the attention weights are never stored" if hooked else ""


def _switch_off_fast_paths(names: dict[Module, list[str]], report: ConversionReport) -> None:
    for module, (name, *_) in names.items():
        for kind, attribute, off in _FAST_PATHS:
            bypasses = isinstance(module, kind) and any(is_replacement(child) for child in module.modules())
            if bypasses and getattr(module, attribute, None):
                report.change_attribute(module, attribute, off)
                report.switched_off.append(SwitchedOff(name, attribute))


def _class_name(kind: type) -> str:
    path = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
    return f"{path}.{kind.__qualname__}"
