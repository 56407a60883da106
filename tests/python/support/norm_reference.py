"""LayerNorm in float64, with the terms that the bounds of F3 speak of, and the comparison of the op with it."""

import math
from collections.abc import Sequence
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


def layer_norm_reference(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dy: Tensor | None = None,
) -> dict[str, Exact]:
    """``y`` and, with ``dy``, ``dx``, ``dweight``, ``dbias``, from the rounded inputs; xhat = 0 where var + eps = 0."""
    n = math.prod(shape)
    rows = x.double().reshape(-1, n)
    gamma = torch.ones(n, dtype=torch.float64) if weight is None else weight.double().reshape(n)
    beta = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double().reshape(n)
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
        mean_g, mean_gx = g.mean(1, keepdim=True), (g * xhat).mean(1, keepdim=True)
        dx = rstd * (g - mean_g - xhat * mean_gx)
        mean_g, mean_gx = g.abs().mean(1, keepdim=True), (g * xhat).abs().mean(1, keepdim=True)
        dx_terms = rstd * (g.abs() + mean_g + xhat.abs() * mean_gx)
        result["dx"] = Exact(dx.reshape(x.shape), dx_terms.reshape(x.shape))
        for name, columns in (("dweight", grad * xhat), ("dbias", grad)):
            result[name] = Exact(columns.sum(0).reshape(shape), columns.abs().sum(0).reshape(shape))
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
    leaves = {name: t.detach().requires_grad_(dy is not None) for name, t in inputs.items() if t is not None}
    y = allfinite.layer_norm(leaves["dx"], shape, leaves.get("dweight"), leaves.get("dbias"), eps)
    result = {"y": y.detach()}
    if dy is not None:
        result.update(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    return result


def assert_layer_norm_accurate(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dy: Tensor | None = None,
) -> None:
    """F3 for the output and every gradient."""
    exact = layer_norm_reference(x, shape, weight, bias, eps, dy)
    for name, actual in run_layer_norm(x, shape, weight, bias, eps, dy).items():
        value, terms = exact[name].value, exact[name].terms
        if name in ("dweight", "dbias"):
            assert_within_one_ulp(actual, value, terms, factor=2**-21)
        elif x.dtype in SIXTEEN_BIT:
            assert_within_one_ulp(actual, value, terms)
        elif x.dtype == torch.float32:
            assert_relative_l2(actual, value, 2e-7, terms if name == "dx" else None)
        else:
            # The reference has the precision of the result: a few roundings of each, 2^-50 in all.
            assert_relative_l2(actual, value, 2**-50, terms)
