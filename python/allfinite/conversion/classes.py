"""Classes that differ from a given one in ``forward`` alone."""

import types
from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import Module

from allfinite import nn

# For the very classes of torch there are named ones; for others a class is made.
_NAMED: dict[type[Module], type[Module]] = {
    torch.nn.LayerNorm: nn.LayerNorm,
    torch.nn.RMSNorm: nn.RMSNorm,
    torch.nn.MultiheadAttention: nn.MultiheadAttention,
    torch.nn.CrossEntropyLoss: nn.CrossEntropyLoss,
    torch.nn.Softmax: nn.Softmax,
}


def replacement_class(base: type[Module], source: type[Module], form: Hashable = None) -> type[Module]:
    """``base`` with the ``forward`` of ``source``: a subclass of ``base``, one for each triple.

    ``form``, which can be pickled, is what that ``forward`` reads in ``self._allfinite_form``.
    """
    if _NAMED.get(base) is source:
        return source
    return _derived_class(base, source, form)


def is_replacement(module: Module) -> bool:
    """Whether ``module`` runs through allfinite already."""
    return isinstance(module, tuple(_NAMED.values())) or hasattr(type(module), "_allfinite_base")


_derived: dict[tuple[type[Module], type[Module], Hashable], type[Module]] = {}


def _derived_class(base: type[Module], source: type[Module], form: Hashable) -> type[Module]:
    if (base, source, form) not in _derived:
        _derived[base, source, form] = _new_class(base, source, form)
    return _derived[base, source, form]


def _new_class(base: type[Module], source: type[Module], form: Hashable) -> type[Module]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = base.__module__
        namespace["__doc__"] = f"{base.__qualname__} with the forward of {source.__module__}.{source.__qualname__}."
        namespace["_allfinite_base"] = base
        namespace["_allfinite_source"] = source
        namespace["_allfinite_form"] = form
        namespace["forward"] = source.forward
        namespace["__reduce_ex__"] = _reduce

    return types.new_class(f"AllFinite{base.__name__}", (base,), {}, fill)


def _reduce(self: Module, protocol: int) -> tuple[Any, ...]:
    """Copies and pickles name the two classes and the form: the class made of them cannot be imported."""
    getstate = getattr(self, "__getstate__", None)  # from Python 3.11 on every object has one
    state = self.__dict__ if getstate is None else getstate()
    kind: Any = type(self)
    return _empty_module, (kind._allfinite_base, kind._allfinite_source, kind._allfinite_form), state


def _empty_module(base: type[Module], source: type[Module], form: Hashable) -> Module:
    new = _derived_class(base, source, form)
    return new.__new__(new)
