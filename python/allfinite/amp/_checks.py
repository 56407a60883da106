"""What a scaler accepts from outside: numbers of the right kind, within the bounds of the C++ ``ScalePolicy``.

The bounds, and the words that name them, are C++'s, so that both languages refuse the same values alike.
"""

import operator
from numbers import Real
from typing import Any

import torch

from allfinite._C import ScalePolicy


class ScalerValueError(ValueError, AssertionError):
    """A value that no scaler can have. Also an AssertionError, which is what torch raises for some of them."""


class ScalerStateError(RuntimeError, AssertionError):
    """A call out of order. Also an AssertionError, which is what torch raises for some of them."""


def number(name: str, value: Any) -> float:
    """``value`` as a float.

    Args:
        name: what the value is, for the message.
        value: a real number, of NumPy too, or a tensor of one element without ``requires_grad``; of a tensor on a
            device the value is read, which waits for the device.

    Raises:
        TypeError: anything else, and bool. ScalerValueError: a tensor of several elements, or one with a gradient.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.requires_grad:
            raise ScalerValueError(
                f"allfinite.amp.GradScaler: expected {name} to be a number or a tensor of one element with "
                f"requires_grad=False, but got {value.numel()} elements and requires_grad={value.requires_grad}"
            )
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"allfinite.amp.GradScaler: expected {name} to be a real number, but got {type(value).__name__}"
        )
    return float(value)


def integer(name: str, value: Any) -> int:
    """``value`` as an int. Raises TypeError for bool and for anything that is not integral by its type."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"allfinite.amp.GradScaler: expected {name} to be an integer, but got {type(value).__name__}"
        ) from None


def scale(name: str, value: Any) -> float:
    """``value`` rounded to float32. Raises ScalerValueError unless it is finite and > 0 then; see :func:`number`."""
    try:
        return ScalePolicy.check_scale(name, number(name, value))
    except ValueError as error:
        raise ScalerValueError(str(error)) from None


def tracker(value: Any) -> int:
    """``value`` as a growth tracker. Raises ScalerValueError below 0 and beyond int32; see :func:`integer`."""
    try:
        return ScalePolicy.check_tracker(integer("growth_tracker", value))
    except ValueError as error:
        raise ScalerValueError(str(error)) from None


def policy(
    growth_factor: Any, backoff_factor: Any, growth_interval: Any, min_scale: Any, max_scale: Any
) -> ScalePolicy:
    """The hyper-parameters as one validated object.

    Raises:
        TypeError: a value of the wrong kind. ScalerValueError: a value out of its bounds (see ``ScalePolicy``).
    """
    try:
        return ScalePolicy(
            number("growth_factor", growth_factor),
            number("backoff_factor", backoff_factor),
            integer("growth_interval", growth_interval),
            number("min_scale", min_scale),
            number("max_scale", max_scale),
        )
    except ValueError as error:
        raise ScalerValueError(str(error)) from None
