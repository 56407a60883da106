"""What the tests of the scaler share: parameters with given gradients, a scaler that is ready, a pair of models."""

import copy
from typing import Any

import torch
from torch import Tensor

from allfinite.amp import GradScaler

INF, NAN = float("inf"), float("nan")


def parameter(value: float | list[float], grad: float | list[float] | None = None, **kwargs: Any) -> torch.nn.Parameter:
    """A parameter whose gradient is already there, as if a scaled backward had left it."""
    made = torch.nn.Parameter(torch.tensor(value, **kwargs))
    if grad is not None:
        made.grad = torch.tensor(grad, **kwargs)
    return made


def scaler(init_scale: float = 4.0, **kwargs: Any) -> GradScaler:
    """A CPU scaler that has seen a loss, so that unscale_ and step work."""
    made = GradScaler("cpu", init_scale=init_scale, **kwargs)
    made.scale(torch.ones(()))
    return made


def stock(init_scale: float = 4.0, **kwargs: Any) -> torch.amp.GradScaler:
    """torch's scaler likewise, for what it does otherwise."""
    made = torch.amp.GradScaler("cpu", init_scale=init_scale, **kwargs)
    made.scale(torch.ones(()))
    return made


def sgd(*params: Tensor, lr: float = 1.0, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=lr, **kwargs)


def models(optimizer: Any = torch.optim.SGD, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """A small network and its twin, each with an optimizer of its own: one trains plainly, the other is scaled."""
    control = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    scaled = copy.deepcopy(control)
    kwargs = {"lr": 0.5} | kwargs
    return control, scaled, optimizer(control.parameters(), **kwargs), optimizer(scaled.parameters(), **kwargs)


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(count)]


def same_parameters(a: torch.nn.Module, b: torch.nn.Module, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """The tolerances are for sums in another order: the scales in these tests are powers of two, which are exact."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
