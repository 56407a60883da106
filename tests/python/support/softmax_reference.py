"""Softmax in float64, with the terms that the bounds of F3 speak of, and the comparison of the op with it."""

import torch
from torch import Tensor

import allfinite
from support.bounds import SIXTEEN_BIT, assert_within_one_ulp, rounded
from support.norm_reference import Exact


def scores(x: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """``(score, masked)`` in float64; a masked score is -inf whatever x is."""
    value = x.double() * scale
    masked = torch.zeros_like(value, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        masked = ~mask.expand(x.shape)
    elif mask is not None:
        value = value + mask.double()
        masked = mask.expand(x.shape) == -torch.inf
    masked = masked | (value == -torch.inf)
    return value.masked_fill(masked, -torch.inf), masked


def reduced(full: Tensor, like: Tensor) -> Tensor:
    """``full`` summed to the shape of ``like``."""
    return full.sum_to_size(like.shape)


def softmax_reference(
    x: Tensor, dim: int, mask: Tensor | None = None, scale: float = 1.0, dy: Tensor | None = None
) -> dict[str, Exact]:
    """``y`` and, with ``dy``, ``dx`` and ``dmask`` (of a floating mask), from the rounded inputs."""
    score, masked = scores(x, mask, scale)
    top = score.amax(dim, keepdim=True)
    weight = torch.where(masked, 0.0, (score - top).exp())
    total = weight.sum(dim, keepdim=True)
    y = torch.where(masked, 0.0, weight / total)
    result = {"y": Exact(y, y)}
    if dy is not None:
        grad = torch.where(masked, 0.0, dy.double())
        mean = (grad * y).sum(dim, keepdim=True)
        ds, terms = y * (grad - mean), y * (grad.abs() + (grad * y).abs().sum(dim, keepdim=True))
        result["dx"] = Exact(ds * scale, terms * abs(scale))
        if mask is not None and mask.dtype != torch.bool:
            result["dmask"] = Exact(reduced(ds, mask), reduced(terms, mask))
    return result


def run_softmax(
    x: Tensor, dim: int, mask: Tensor | None = None, scale: float = 1.0, dy: Tensor | None = None
) -> dict[str, Tensor]:
    """The op under test, with the keys of the reference."""
    leaves = {"dx": x.detach()}
    if mask is not None and mask.dtype != torch.bool:
        leaves["dmask"] = mask.detach()
    for leaf in leaves.values():
        leaf.requires_grad_(dy is not None)
    y = allfinite.softmax(leaves["dx"], dim, mask=leaves.get("dmask", mask), scale=scale)
    result = {"y": y.detach()}
    if dy is not None:
        result.update(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    return result


def assert_softmax_accurate(
    x: Tensor, dim: int, mask: Tensor | None = None, scale: float = 1.0, dy: Tensor | None = None
) -> None:
    """F3 for the output and every gradient."""
    exact = softmax_reference(x, dim, mask, scale, dy)
    # Weights below 2^-126 may flush: what their gradients lose by it, for each row that is summed.
    largest = 0.0 if dy is None else float(dy.double().abs().nan_to_num(0, 0, 0).max())
    for name, actual in run_softmax(x, dim, mask, scale, dy).items():
        assert actual.dtype == (mask.dtype if name == "dmask" and mask is not None else x.dtype)
        value, terms = exact[name].value, exact[name].terms
        factor_of = {"y": 1.0, "dx": 2 * largest * abs(scale), "dmask": 2 * largest * x.numel() / actual.numel()}
        flushed = 0.0 if x.dtype == torch.float64 else 2**-126 * factor_of[name]
        if actual.dtype in SIXTEEN_BIT:
            flushed = 0.0 if name == "y" else flushed  # an output of bf16 keeps its subnormal numbers
            assert_within_one_ulp(actual, value, terms + flushed * 2**20)
            continue
        # fp32: 2^-17 of the terms, also for an fp64 mask's gradient beside narrower rows. fp64 has the precision of its
        # reference: there an exponent of 700 costs 2^-43.
        factor = 2**-42 if x.dtype == torch.float64 and actual.dtype == torch.float64 else 2**-17
        near = (actual.double() - value).abs() <= factor * terms + flushed + 2**-149
        bad = ~(near | (torch.isinf(actual) & (actual.double() == rounded(value, actual.dtype))))
        assert not bad.any(), (
            f"{name}: {int(bad.sum())} of {bad.numel()} beyond the bound: got {actual[bad][0].item()!r}, "
            f"exact {value[bad][0].item()!r}, terms {terms[bad][0].item()!r}"
        )
