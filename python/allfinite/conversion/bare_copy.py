"""A copy of a module that a trial may run: it shares no tensor and no hook with the model.

Its weights are random float32 on the CPU. So a trial has no side effect, needs no device, and a weight that starts at
zero or one cannot hide a difference.
"""

import torch
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter


def obstacle(module: Module) -> str:
    """Why the module cannot be copied and tried, or ''."""
    parameters = list(module.parameters())
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        return "its parameters are not initialised yet"
    if not all(p.is_floating_point() for p in parameters):
        return "its parameters are not floating point numbers"
    return ""


def bare_copy(module: Module, generator: torch.Generator) -> Module:
    """The module and its submodules in eval mode, without hooks, with new weights."""
    bare = module.__class__.__new__(module.__class__)
    plain = {name: value for name, value in module.__dict__.items() if name != "forward"}
    bare.__dict__.update({**plain, **Module().__dict__, "training": False})
    for name, parameter in module._parameters.items():
        bare._parameters[name] = None if parameter is None else _random_parameter(parameter.shape, generator)
    for name, buffer in module._buffers.items():
        on_cpu = None if buffer is None else torch.ones(buffer.shape, dtype=buffer.dtype, device="cpu")
        bare._buffers[name] = on_cpu.float() if on_cpu is not None and on_cpu.is_floating_point() else on_cpu
    for name, child in module._modules.items():
        bare._modules[name] = None if child is None else bare_copy(child, generator)
    return bare


def attributes(module: Module) -> dict[str, object]:
    """What a ``forward`` might store something in; to compare before and after it."""
    return {**module.__dict__, **module._buffers, "training": None}


def stored(module: Module, before: dict[str, object]) -> list[str]:
    """The names in which something was stored since ``before = attributes(module)``."""
    return [name for name, value in attributes(module).items() if before.get(name, before) is not value]


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _random_parameter(shape: torch.Size, generator: torch.Generator) -> torch.nn.Parameter:
    values = torch.empty(shape, device="cpu", dtype=torch.float32)
    if len(shape) >= 2:
        values.normal_(0, shape[-1] ** -0.5, generator=generator)  # keeps the size of activations
    else:
        values.uniform_(0.5, 1.5, generator=generator)
    return torch.nn.Parameter(values, requires_grad=False)
