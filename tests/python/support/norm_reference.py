"""The norms in float64, with the terms that the bounds of F3 speak of, and the comparison of the ops with them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import allfinite
from support.bounds import SIXTEEN_BIT, assert_relative_l2, assert_within_one_ulp


@dataclass
class Exact:
    """A result in float64, and per element the sum of the absolute values that it adds up."""

    value: Tensor
    terms: Tensor


def rms_eps(eps: float | None, dtype: torch.dtype) -> float:
    """What ``eps=None`` stands for: the machine epsilon of the arithmetic."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps if eps is None else eps


def norm_reference(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dy: Tensor | None,
    *,
    rms: bool,
) -> dict[str, Exact]:
    """``y`` and, with ``dy``, ``dx``, ``dweight``, ``dbias``, from the rounded inputs; xhat = 0 where var + eps = 0."""
    n = math.prod(shape)
    rows = x.double().reshape(-1, n)
    gamma = torch.ones(n, dtype=torch.float64) if weight is None else weight.double().reshape(n)
    beta = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double().reshape(n)
    centred = rows
    if not rms:
        centred = rows - rows.mean(1, keepdim=True)
        centred = centred - centred.mean(1, keepdim=True)
    total = centred.square().mean(1, keepdim=True) + eps
    rstd = torch.where(total == 0, 0.0, total.rsqrt())
    xhat = centred * rstd
    y = xhat * gamma + beta
    result = {"y": Exact(y.reshape(x.shape), (xhat * gamma).abs().add(beta.abs()).reshape(x.shape))}
    if dy is not None:
        grad = dy.double().reshape(-1, n)
        g = grad * gamma

        def of_rows(g: Tensor, xhat: Tensor, sign: int) -> Tensor:
            mean_g = 0.0 if rms else g.mean(1, keepdim=True)
            return rstd * (g + sign * mean_g + sign * xhat * (g * xhat).mean(1, keepdim=True))

        result["dx"] = Exact(
            of_rows(g, xhat, -1).reshape(x.shape),
            of_rows(g.abs(), xhat.abs(), 1).reshape(x.shape),
        )
        for name, columns in (("dweight", grad * xhat), ("dbias", grad)):
            result[name] = Exact(columns.sum(0).reshape(shape), columns.abs().sum(0).reshape(shape))
    return result


def layer_norm_reference(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dy: Tensor | None = None,
) -> dict[str, Exact]:
    """``norm_reference`` with the defaults of ``layer_norm``."""
    return norm_reference(x, shape, weight, bias, eps, dy, rms=False)


def rms_norm_reference(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    dy: Tensor | None = None,
) -> dict[str, Exact]:
    """``norm_reference`` with the defaults of ``rms_norm``."""
    return norm_reference(x, shape, weight, None, rms_eps(eps, x.dtype), dy, rms=True)


def _run(inputs: dict[str, Tensor | None], norm: Callable[..., Tensor], dy: Tensor | None) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_(dy is not None) for name, t in inputs.items() if t is not None}
    y = norm(**leaves)
    result = {"y": y.detach()}
    if dy is not None:
        result.update(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    return result


def run_layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dy: Tensor | None = None,
) -> dict[str, Tensor]:
    """The op under test, with the keys of the reference; gradients of the arguments that are there."""
    inputs = {"dx": x, "dweight": weight, "dbias": bias}
    return _run(inputs, lambda dx, dweight=None, dbias=None: allfinite.layer_norm(dx, shape, dweight, dbias, eps), dy)


def run_rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    dy: Tensor | None = None,
) -> dict[str, Tensor]:
    """The op under test, with the keys of the reference; gradients of the arguments that are there."""
    inputs = {"dx": x, "dweight": weight}
    return _run(inputs, lambda dx, dweight=None: allfinite.rms_norm(dx, shape, dweight, eps), dy)


def assert_within_f3(actual: dict[str, Tensor], exact: dict[str, Exact]) -> None:
    """F3 for every result that is there: an output or a gradient of rows, or of columns (dweight, dbias)."""
    for name, got in actual.items():
        value, terms = exact[name].value, exact[name].terms
        if name in ("dweight", "dbias"):
            assert_within_one_ulp(got, value, terms, factor=2**-21)
        elif got.dtype in SIXTEEN_BIT:
            assert_within_one_ulp(got, value, terms)
        elif got.dtype == torch.float32:
            assert_relative_l2(got, value, 2e-7, None if name == "y" else terms)
        else:
            # The reference has the precision of the result: a few roundings of each, 2^-50 in all.
            assert_relative_l2(got, value, 2**-50, terms)


def assert_layer_norm_accurate(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dy: Tensor | None = None,
) -> None:
    """F3 for the output and every gradient."""
    arguments = (x, shape, weight, bias, eps, dy)
    assert_within_f3(run_layer_norm(*arguments), layer_norm_reference(*arguments))


def assert_rms_norm_accurate(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    dy: Tensor | None = None,
) -> None:
    """F3 for the output and every gradient."""
    arguments = (x, shape, weight, eps, dy)
    assert_within_f3(run_rms_norm(*arguments), rms_norm_reference(*arguments))
