"""One call of an op with its inputs: run it with its gradients, or print it as Python that does the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor


@dataclass
class Case:
    """A call as source text, so that what is printed is what was run.

    Attributes:
        call: statements that use ``allfinite``, ``torch``, the names of ``inputs`` and of ``options``, and assign the
            names of ``results``.
        inputs: tensors, lists of them, or None, by name.
        options: other arguments by name; their ``repr`` is Python.
        results: names that ``call`` assigns.
        incoming: the gradient that comes in for a result, by the result's name.
        wrt: names of the inputs that are differentiated.
    """

    call: str
    inputs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    incoming: dict[str, Tensor] = field(default_factory=dict)
    wrt: tuple[str, ...] = ()

    def run(self, api: object) -> dict[str, Tensor]:
        """Results, and gradients as ``d<input>``; ``api`` stands for the module allfinite."""
        leaves = {name: self.inputs[name].detach().requires_grad_() for name in self.wrt}
        names: dict[str, Any] = {**self.inputs, **self.options, **leaves, "allfinite": api, "torch": torch}
        exec(_compiled(self.call), names)
        got = {name: names[name] for name in self.results}
        if leaves:
            # A result that none of these inputs reaches takes no gradient.
            self.incoming = {name: t for name, t in self.incoming.items() if got[name].requires_grad}
            outputs = [got[name] for name in self.incoming]
            grads = torch.autograd.grad(outputs, list(leaves.values()), list(self.incoming.values()))
            got = {name: t.detach() for name, t in got.items()}
            got.update(zip(("d" + name for name in leaves), grads, strict=True))
        return got

    def source(self) -> str:
        """Python that makes the tensors, calls the op and takes the gradients."""
        lines = ["import torch, allfinite", "from math import inf, nan"]
        for name, value in self.inputs.items():
            lines.append(f"{name} = {_source(value)}{'.requires_grad_()' if name in self.wrt else ''}")
        lines += [f"{name} = {value!r}" for name, value in self.options.items()]
        lines.append(self.call)
        if self.wrt:
            for name, t in self.incoming.items():
                lines.append(f"grad_{name} = {_source(t)}")
            outputs, grads = ", ".join(self.incoming), ", ".join(f"grad_{name}" for name in self.incoming)
            wrt = ", ".join(self.wrt)
            targets = ", ".join("d" + name for name in self.wrt)
            lines.append(f"{targets}, = torch.autograd.grad([{outputs}], [{wrt}], [{grads}])")
        return "\n".join(lines)


@cache
def _compiled(call: str) -> CodeType:
    return compile(call, "<the call of the case>", "exec")


def _source(value: Any) -> str:
    """A tensor as an expression with the same numbers, dtype, sizes, strides and offset."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_source, value)) + "]"
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() == 0:
        return f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
    if value.is_contiguous() and value.storage_offset() == 0:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = value.detach().as_strided((value.storage_offset() + reach,), (1,), 0)
    layout = f"{tuple(value.shape)}, {value.stride()}, {value.storage_offset()}"
    return f"torch.tensor({memory.tolist()}, dtype={value.dtype}).as_strided({layout})"


def change(case: Case, inputs: Mapping[str, Any] | None = None, incoming: Mapping[str, Tensor] | None = None) -> Case:
    """The same call with some other inputs or incoming gradients."""
    return Case(
        case.call, {**case.inputs, **(inputs or {})}, case.options, case.results,
        {**case.incoming, **(incoming or {})}, case.wrt,
    )  # fmt: skip
