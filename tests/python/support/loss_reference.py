"""Cross entropy in float64, with the terms that the bounds of F3 speak of, and the comparison of the op with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

import allfinite
from support.bounds import SIXTEEN_BIT, assert_within_one_ulp, ulp


@dataclass
class Options:
    """Arguments of ``allfinite.cross_entropy`` behind the target."""

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass
class Exact:
    """A result in float64, and per element the sum of the absolute values that it adds up."""

    value: Tensor
    terms: Tensor


def by_rows(t: Tensor) -> Tensor:
    """(C), (N, C) or (N, C, d1, ...) as (rows, C)."""
    return t.movedim(0 if t.dim() == 1 else 1, -1).reshape(-1, t.shape[0 if t.dim() == 1 else 1])


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The other way: (rows, C) in the shape of ``like``."""
    dim = 0 if like.dim() == 1 else 1
    return rows.reshape(like.movedim(dim, -1).shape).movedim(-1, dim)


def cross_entropy_reference(x: Tensor, target: Tensor, o: Options, grad: Tensor | None = None) -> dict[str, Exact]:
    """``loss`` and, with ``grad``, ``dx`` and (class probabilities) ``dtarget``, from the rounded inputs."""
    z = by_rows(x.double())
    rows, classes = z.shape
    w = torch.ones(classes, dtype=torch.float64) if o.weight is None else o.weight.double()
    share = o.label_smoothing / classes
    if target.shape == x.shape:
        counted = torch.ones(rows, dtype=torch.bool)
        mass = w * (by_rows(target.double()) * (1 - o.label_smoothing) + share)
        row_weight, denominator = torch.ones(rows, dtype=torch.float64), float(rows)
        index = None
    else:
        t = target.long().reshape(-1)
        counted = t != o.ignore_index
        index = torch.where(counted, t, 0)
        row_weight = w[index]
        mass = share * w.expand(rows, classes)
        mass = mass.scatter_add(1, index[:, None], (1 - o.label_smoothing) * row_weight[:, None])
        denominator = float((row_weight * counted).sum())
    z = torch.where(counted[:, None], z, 0.0)
    largest = z.max(1, keepdim=True).values
    below = largest - z
    e = torch.exp(-below)
    others = e.clone().scatter_(1, z.argmax(1, keepdim=True), 0.0).sum(1, keepdim=True)
    log_sum = torch.log1p(others)  # right where the largest is all there is, too
    p = e / (1 + others)
    minus_log_p = below + log_sum
    products = torch.where((mass == 0) & minus_log_p.isinf(), 0.0, mass * minus_log_p)
    lse = largest + log_sum
    z_terms = o.z_loss * row_weight * (largest.abs() + log_sum)[:, 0].square()
    loss = products.sum(1) + o.z_loss * row_weight * lse[:, 0].square()
    terms = products.abs().sum(1) + z_terms
    if target.shape == x.shape:  # no number is set apart here, so log_sum is right to 2^-22 of 1
        terms = terms + mass.abs().sum(1)
    loss, terms = torch.where(counted, loss, 0.0), torch.where(counted, terms, 0.0)
    divisor = {"none": 1.0, "sum": 1.0, "mean": denominator}[o.reduction]
    if o.reduction == "none":
        shape = x.shape[:0] if x.dim() == 1 else x.shape[:1] + x.shape[2:]
        result = {"loss": Exact(loss.reshape(shape), terms.reshape(shape))}
    else:
        result = {"loss": Exact(loss.sum() / divisor, terms.sum() / divisor)}
    if grad is not None:
        g = (grad.double().reshape(-1) / divisor).expand(rows)[:, None]
        total, z_factor = mass.sum(1, keepdim=True), 2 * o.z_loss * row_weight[:, None]
        dx = g * (total * p - mass + z_factor * lse * p)
        dx_terms = g.abs() * (total * p + mass.abs() + z_factor * (largest.abs() + log_sum) * p)
        if index is not None:  # the target: minus the sum of the others, which are what is added up there
            i = index[:, None]
            rest = 1 - p.gather(1, i)
            rest = torch.where(rest > 0.25, rest, p.clone().scatter_(1, i, 0.0).sum(1, keepdim=True))
            mass_rest = share * (w.sum() - w[i])
            p_t = p.gather(1, i)
            dx.scatter_(1, i, g * (mass_rest - total * rest + z_factor * lse * p_t))
            t_terms = mass_rest.abs() + total * rest + z_factor * (largest.abs() + log_sum) * p_t
            dx_terms.scatter_(1, i, g.abs() * t_terms)
        dx, dx_terms = (torch.where(counted[:, None], v, 0.0) for v in (dx, dx_terms))
        result["dx"] = Exact(from_rows(dx, x), from_rows(dx_terms, x))
        if index is None:
            dtarget = g * w * (1 - o.label_smoothing) * minus_log_p
            result["dtarget"] = Exact(from_rows(dtarget, x), from_rows(dtarget.abs(), x))
    return result


def flushed(x: Tensor, o: Options, grad: Tensor | None, name: str) -> float:
    """At most what the weights below 2^-126 of a row come to, times the largest factor of a row."""
    lost = x.numel() * 2.0**-126
    weight = 1.0 if o.weight is None else float(o.weight.abs().max())
    return lost * weight * (1.0 if name == "loss" or grad is None else float(grad.abs().max()))


def run_cross_entropy(x: Tensor, target: Tensor, o: Options, grad: Tensor | None = None) -> dict[str, Tensor]:
    """The op under test, with the keys of the reference."""
    leaves = {"dx": x.detach().clone().requires_grad_(grad is not None)}
    if target.is_floating_point():
        leaves["dtarget"] = target.detach().clone().requires_grad_(grad is not None)
    loss = allfinite.cross_entropy(
        leaves["dx"],
        leaves.get("dtarget", target),
        o.weight,
        o.ignore_index,
        o.reduction,
        o.label_smoothing,
        z_loss=o.z_loss,
    )
    result = {"loss": loss.detach()}
    if grad is not None:
        result.update(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), grad.to(loss.dtype)), strict=True))
    return result


def assert_cross_entropy_accurate(x: Tensor, target: Tensor, o: Options, grad: Tensor | None = None) -> None:
    """F3 for the loss and every gradient."""
    exact = cross_entropy_reference(x, target, o, grad)
    for name, actual in run_cross_entropy(x, target, o, grad).items():
        value, terms = exact[name].value, exact[name].terms
        # Weights exp(x - max) below 2^-126 may be 0, in fp32 arithmetic; then they are missing in sums of them as well.
        if x.dtype != torch.float64:
            terms = terms + 2**20 * flushed(x, o, grad, name)
        if actual.dtype == torch.float64:
            # The reference has the precision of the result: a few roundings of each, and of exp's argument (up to 64).
            assert ((actual - value).abs() <= 2**-44 * (terms + value.abs()) + 1e-300).all()
        elif name == "loss":
            assert_within_one_ulp(actual, value, terms)
        elif actual.dtype in SIXTEEN_BIT:
            assert_within_one_ulp(actual, value, terms, factor=2**-19)
        else:
            wrong = (actual.double() - value).abs() > 2**-19 * terms + ulp(value, actual.dtype)
            assert not wrong.any(), (name, int(wrong.sum()), (actual.double() - value)[wrong][:3], terms[wrong][:3])
