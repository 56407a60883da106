"""Bad input of GradScaler, and calls out of order. The bounds, and the words for them, are those of the C++ policy."""

from collections.abc import Callable
from typing import Any

import torch

from allfinite.amp import GradScaler
from allfinite.amp._checks import ScalerStateError, ScalerValueError
from bad_calls.case import BadCall, Refusals
from support.amp import INF, NAN, parameter, scaler, sgd

NAME, POLICY = "allfinite.amp.GradScaler", "allfinite::ScalePolicy"
BOUNDS = "in [2^-126, 2^126]"
RANGES: dict[str, tuple[str, tuple[float, ...]]] = {
    "init_scale": ("to be finite and > 0 as float32", (0.0, -1.0, NAN, INF, 1e39, 1e-50)),
    "growth_factor": ("to be finite and > 1", (1.0, 0.5, -2.0, NAN, INF)),
    "backoff_factor": ("in (0, 1)", (0.0, 1.0, -0.5, NAN, 2.0)),
    "growth_interval": (">= 1", (0, -3)),
    "min_scale": (BOUNDS, (0.0, -1.0, NAN, INF, 2.0**127)),
    "max_scale": (BOUNDS, (0.0, -1.0, NAN, INF, 2.0**127)),
}
KINDS = {"init_scale": True, "growth_factor": "2", "backoff_factor": None, "growth_interval": 2.5, "min_scale": [1.0]}


def made(name: str, **options: Any) -> BadCall:
    return Refusals(NAME, GradScaler)(name, "cpu", **options)


def _of_policy(case: BadCall) -> BadCall:
    case.op = POLICY
    return case


def _text(value: float) -> str:
    return f"{value:g}"


CONSTRUCTOR = [
    _of_policy(made(f"{name} {value}", **{name: value})).raises(
        ScalerValueError, f"expected {name} {expected}, but got {_text(value)}"
    )
    for name, (expected, values) in RANGES.items()
    for value in values
] + [
    made(f"{name} of another kind", **{name: value}).raises(
        TypeError,
        f"expected {name} to be {'an integer' if name == 'growth_interval' else 'a real number'}, but got "
        f"{type(value).__name__}",
    )
    for name, value in KINDS.items()
]
CONSTRUCTOR.append(
    _of_policy(made("floor above cap", min_scale=8.0, max_scale=4.0)).raises(
        ScalerValueError, "expected min_scale <= max_scale, but got min_scale 8 and max_scale 4"
    )
)


def method(op: str, case: str, call: Callable[..., object], *arguments: Any, **keywords: Any) -> BadCall:
    return Refusals(op, call)(f"{call.__name__}: {case}", *arguments, **keywords)


def optimizer() -> torch.optim.SGD:
    """One parameter whose gradient would change by unscaling, and itself by a step."""
    return sgd(parameter([1.0, 2.0], [4.0, 8.0]), momentum=0.5)


def after(*calls: str) -> tuple[GradScaler, torch.optim.SGD]:
    """A scaler and an optimizer on which these methods were called."""
    ready, opt = scaler(), optimizer()
    for name in calls:
        getattr(ready, name)(*([] if name == "update" else [opt]))
    return ready, opt


def out_of_order(name: str, calls: tuple[str, ...], *more: Any) -> BadCall:
    ready, opt = after(*calls)
    case = f"after {' and '.join(calls)}" if calls else "at once"
    return method(NAME, case, getattr(ready, name), *([] if name == "update" else [opt]), *more)


SETTERS = [
    method(POLICY, _text(bad), getattr(scaler(), f"set_{name}"), bad).raises(
        ScalerValueError, f"expected {name} {RANGES[name][0]}, but got {_text(bad)}"
    )
    for name, bad in (
        ("growth_factor", 1.0),
        ("backoff_factor", NAN),
        ("growth_interval", 0),
        ("min_scale", 0.0),
        ("max_scale", INF),
    )
]
UPDATES = [
    method(POLICY, f"{type(bad).__name__} {float(bad)}", scaler().update, bad).raises(
        ScalerValueError, f"expected new_scale to be finite and > 0 as float32, but got {_text(float(bad))}"
    )
    for bad in (0.0, -4.0, NAN, INF, 1e39, torch.tensor(NAN), torch.tensor(0.0))
] + [
    method(NAME, "a string", scaler().update, "8").raises(
        TypeError, "expected new_scale to be a real number, but got str"
    ),
    *(
        method(NAME, f"{n} elements, {grad}", scaler().update, torch.ones(n, requires_grad=grad)).raises(
            ScalerValueError,
            "expected new_scale to be a number or a tensor of one element with requires_grad=False, but got "
            f"{n} elements and requires_grad={grad}",
        )
        for n, grad in ((2, False), (0, False), (1, True))
    ),
]

_HALF = sgd(parameter(1.0, 4.0), parameter(1.0, 4.0, dtype=torch.float16))
ORDER = [
    method(NAME, "a number", scaler().scale, 3.0).raises(
        ValueError, "expected outputs to be a Tensor or an iterable of Tensors, but got float"
    ),
    method(NAME, "a dict", scaler().scale, {"loss": torch.ones(())}).raises(
        ValueError, "expected outputs to be a Tensor or an iterable of Tensors, but got dict"
    ),
    out_of_order("unscale_", ("unscale_",)).raises(
        RuntimeError,
        "expected one unscale_() in an iteration, but got a second: unscale_() has already been called on this "
        "optimizer since the last update().",
    ),
    out_of_order("unscale_", ("step",)).raises(
        RuntimeError, "expected unscale_() before step(), but got it later: unscale_() is being called after step()."
    ),
    out_of_order("step", ("step",)).raises(
        RuntimeError,
        "expected one step() in an iteration, but got a second: step() has already been called since the last "
        "update().",
    ),
    out_of_order("step", (), lambda: None).raises(
        RuntimeError,
        "expected no closure, but got one: Closure use is not currently supported if GradScaler is enabled.",
    ),
    out_of_order("update", ()).raises(
        ScalerStateError,
        "expected unscale_() or step() since the last update(), but got neither: No inf checks were recorded prior to "
        "update.",
    ),
    method(NAME, "float16", scaler().unscale_, _HALF).raises(
        ValueError,
        "expected gradients of another dtype, but got float16: Attempting to unscale FP16 gradients. The gradient of "
        "parameter 1 (group 0, shape ()) is float16, where unscaled values vanish: keep the parameters in float32 and "
        "let torch.autocast cast them",
    ),
    method(NAME, "nothing", scaler().load_state_dict, {}).raises(
        RuntimeError,
        "expected the state of an enabled GradScaler, but got none: The source state dict is empty, possibly because "
        "it was saved from a disabled instance of GradScaler.",
    ),
    method(POLICY, "a scale of 0", scaler().load_state_dict, scaler().state_dict() | {"scale": 0.0}).raises(
        ScalerValueError, "expected scale to be finite and > 0 as float32, but got 0"
    ),
    method(
        POLICY, "a tracker below 0", scaler().load_state_dict, scaler().state_dict() | {"_growth_tracker": -1}
    ).raises(ScalerValueError, "expected growth_tracker in [0, 2^31 - 1), but got -1"),
    method(POLICY, "a back-off of 1", scaler().load_state_dict, scaler().state_dict() | {"backoff_factor": 1.0}).raises(
        ScalerValueError, "expected backoff_factor in (0, 1), but got 1"
    ),
]

CASES = [*CONSTRUCTOR, *SETTERS, *UPDATES, *ORDER]
