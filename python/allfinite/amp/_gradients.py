"""The gradients of a Python optimizer, over all its parameter groups: who they are and the memory to unscale."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Entry(NamedTuple):
    """A parameter of an optimizer that has a gradient."""

    param: Tensor
    group: int
    number: int  # over all groups, as in the optimizer's state dict
    name: str | None  # where the optimizer was made from named parameters

    def label(self) -> str:
        """The parameter in words, for messages."""
        if self.name is not None:
            return f"parameter '{self.name}'"
        return f"parameter {self.number} (group {self.group}, shape {tuple(self.param.shape)})"


def entries(optimizer: Any) -> Iterator[Entry]:
    """The parameters with a gradient, in the order of the groups.

    Raises:
        AssertionError: a parameter that is no tensor.
    """
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            if not isinstance(param, Tensor):
                raise AssertionError(
                    f"allfinite.amp.GradScaler: expected parameters to be tensors, but got {type(param).__name__}"
                )
            if param.grad is not None:
                yield Entry(param, number, index, names[i] if names else None)
            index += 1


def device_of(optimizer: Any) -> torch.device | None:
    """Where the optimizer works: the device of its first gradient, or else of its first parameter."""
    for entry in entries(optimizer):
        return entry.param.device
    for group in optimizer.param_groups:
        for param in group["params"]:
            device: torch.device = param.device
            return device
    return None


def values(param: Tensor) -> Tensor:
    """The memory of ``param.grad`` as a strided tensor.

    A sparse gradient with duplicate indices is summed first (``param.grad`` is replaced), because it is the sum
    that an optimizer applies, and that may overflow where no summand did.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout is torch.sparse_coo:
        if not grad.is_coalesced():
            grad = grad.coalesce()
            param.grad = grad
        return grad._values()
    return grad


def separate_shared(found: list[Entry]) -> None:
    """Gives each parameter a gradient of its own where one piece of memory serves several, or several elements."""
    seen: set[int] = set()
    for entry in found:
        grad = entry.param.grad
        assert grad is not None
        if grad.layout is not torch.strided or grad.numel() == 0 or is_traceable_wrapper_subclass(grad):
            continue
        expanded = not grad.is_contiguous() and 0 in grad.stride()
        if expanded or grad.data_ptr() in seen:
            entry.param.grad = grad.clone()
        seen.add(grad.data_ptr())
