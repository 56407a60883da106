"""A call that must be refused, and what it may not have changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class BadCall:
    """``function(*arguments, **keywords)``; ``raises`` says what must come of it.

    Attributes:
        name: what is bad; with ``op`` it names the case.
        op: what the message names first.
        error: the class, exactly.
        message: what follows the op's name: ``expected <what>, but got <what came>``.
    """

    name: str
    op: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    error: type[Exception] = Exception
    message: str = ""

    def raises(self, error: type[Exception], message: str) -> BadCall:
        return replace(self, error=error, message=message)

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


@dataclass
class Refusals:
    """Begins the entries of a table: ``bad("dim", X, 3).raises(IndexError, "expected dim in [-3, 2], but got 3")``."""

    op: str
    function: Callable[..., object]

    def __call__(self, name: str, *arguments: Any, **keywords: Any) -> BadCall:
        return BadCall(name, self.op, self.function, arguments, keywords)


def nested(*tensors: Tensor) -> Tensor:
    """A nested tensor, without torch's remark that these are a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(list(tensors))


def snapshot(*values: Any) -> list[tuple[int, Any]]:
    """For each tensor in some arguments the count of writes to it, and its bytes.

    Seen are tensors in lists, tuples and dicts, gradients, the parameters of modules and optimizers, and the generator.
    The bytes are those of the whole storage, so that a write beside a view shows, too.
    """
    return [(t._version, _bytes(t)) for t in _tensors(values)] + [(0, _bytes(torch.get_rng_state()))]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield from _tensors(value.grad)
    elif isinstance(value, torch.nn.Module):
        yield from _tensors(list(value.state_dict(keep_vars=True).values()))
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors([value.param_groups, list(value.state.values())])
    elif isinstance(value, torch.amp.GradScaler):
        yield from _tensors(list(vars(value).values()))
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> bytes | None:
    """None where there are none: meta tensors."""
    if tensor.is_meta:
        return None
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
