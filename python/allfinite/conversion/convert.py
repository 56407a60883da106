"""The walk over a model that decides, module by module, what is swapped."""

import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized

from allfinite import nn
from allfinite.conversion import split_attention, trial
from allfinite.conversion.classes import is_replacement, replacement_class
from allfinite.conversion.report import ConversionReport, Left, Swapped, SwitchedOff

_ATTENTION_OP = "allfinite::_scaled_dot_product_attention_forward"
# torch's class, what replaces it, and the op that must be there on the module's device
_KINDS: tuple[tuple[type[Module], type[Module], str], ...] = (
    (torch.nn.LayerNorm, nn.LayerNorm, "allfinite::_layer_norm_forward"),
    (torch.nn.MultiheadAttention, nn.MultiheadAttention, _ATTENTION_OP),
)

# Read by the fast paths of torch's encoder, and by nothing else: where, and what turns the path off.
_FAST_PATHS: tuple[tuple[type[Module], str, object], ...] = (
    (torch.nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (torch.nn.TransformerEncoder, "use_nested_tensor", False),
)


def convert(model: Module) -> ConversionReport:
    """Swaps layer norms and attention of ``model`` for finite ones, in place.

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
    verdicts: dict[object, str] = {}
    for module, (name, *also) in names.items():
        if is_replacement(module):
            report.already.append(name)
            continue
        choice = _choice(module, verdicts)
        if isinstance(choice, str):
            report.left.append(Left(name, _class_name(type(module)), choice))
        elif choice is not None:
            was, note = _class_name(type(module)), _note(module)
            report.change_class(module, replacement_class(type(module), choice))
            report.swapped.append(Swapped(name, was, _now(choice), tuple(also), note))
    _switch_off_fast_paths(names, report)


def _choice(module: Module, verdicts: dict[object, str]) -> type[Module] | str | None:
    """The class whose forward the module is to get, the reason to leave it, or None: not of a kind that is swapped."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        compiled = module.original_name in [base.__name__ for base, _, _ in _KINDS]
        return "it is compiled by TorchScript: convert the model before that" if compiled else None
    for base, replacement, op in _KINDS:
        if isinstance(module, base):
            own = kind.forward is not base.forward or kind.__call__ is not base.__call__
            return "it has a forward of its own" if own else _obstacle(module, op) or replacement
    if split_attention.looks_split(module):
        return _obstacle(module, _ATTENTION_OP) or _tried(module, verdicts) or split_attention.SplitAttention
    if "attention" in kind.__name__.lower():
        return (
            "not attention of a shape that convert knows; its forward can call allfinite.scaled_dot_product_attention"
        )
    return None


def _obstacle(module: Module, op: str) -> str:
    """What stands against any swap of this module, or ''."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the object"
    if is_parametrized(module):
        return "it is parametrized, which changes its class as well"
    device = next((t.device.type for t in module.parameters()), "cpu")
    if device not in ("cpu", "meta") and not torch._C._dispatch_has_kernel_for_dispatch_key(op, device.upper()):
        return f"it is on {device}, for which this build has no kernel"
    return ""


def _tried(module: Module, verdicts: dict[object, str]) -> str:
    """Why a module of timm's shape is left, or ''; modules that are built alike are tried once."""
    plain = {k: v for k, v in module.__dict__.items() if isinstance(v, int | float | str | None) and k != "training"}
    key = (type(module), repr(module), tuple(sorted(plain.items(), key=lambda item: item[0])))
    if key not in verdicts:
        optional = split_attention.optional_arguments(module)
        if isinstance(optional, str):
            verdicts[key] = optional
        else:
            verdicts[key] = trial.disagreement(module, split_attention.SplitAttention.forward, optional)
    return verdicts[key]


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


def _now(choice: type[Module]) -> str:
    if choice is split_attention.SplitAttention:
        return "allfinite.scaled_dot_product_attention"
    return f"allfinite.nn.{choice.__name__}"
