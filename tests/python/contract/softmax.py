"""softmax with mask and scale: what it takes, and what is exact."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from contract import rules
from contract.base import CROSS_CHECKS, OpContract, Shared, cross_check
from contract.case import Case, change
from contract.numbers import DTYPES, LAYOUTS, SEEDS, Array, Fill, fills, make
from contract.rules import Exact, wide
from support.bounds import FP32_SOFTMAX, OUTPUT_TERMS

OUTER = (1, 2, 3, 4, 7, 9, 17, 0)
SIZES = (*range(1, 20), 31, 32, 33, 64, 65, 100, 129, 300, 0)
MASKS = ("none", "none", "bool", "bool row", "bias", "bias of one row", "bias column", "fp32 bias", "all masked")


class Params(NamedTuple):
    """One softmax over the dimension of ``n`` in ``(outer, n, inner)``."""

    dtype: torch.dtype
    outer: int
    n: int
    inner: int
    mask: str
    scale: float
    input: Fill
    bias: Fill
    dy: Fill
    layout: str
    cross_check: str
    seed: int


@st.composite
def _params(draw: st.DrawFn) -> Params:
    dtype = draw(st.sampled_from(DTYPES))
    return Params(
        dtype,
        draw(st.sampled_from(OUTER)),
        draw(st.sampled_from(SIZES)),
        draw(st.sampled_from([1, 1, 1, 2, 5])),
        draw(st.sampled_from(MASKS)),
        draw(st.sampled_from([1.0, 1.0, 0.125, -1.0, 0.3, 0.0, 1e-30, 1e5, 1e30])),
        draw(fills(dtype)),
        draw(fills(dtype)),
        draw(fills(dtype)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(CROSS_CHECKS)),
        draw(SEEDS),
    )


def build(p: Params) -> Case:
    """The tensors of a case."""
    rng = np.random.default_rng(p.seed)
    outer = p.outer * (60 if p.inner == 1 else 8) if p.cross_check == "threads" else p.outer
    shape = (outer, p.n) if p.inner == 1 else (outer, p.n, p.inner)
    x = make(rng, shape, p.dtype, p.input, p.layout)
    mask = _mask(rng, p, shape)
    incoming = {"y": make(rng, shape, p.dtype, p.dy, p.layout)}
    wrt = ("x", "mask") if mask is not None and mask.is_floating_point() else ("x",)
    call = "y = allfinite.softmax(x, dim, mask=mask, scale=scale)"
    return Case(call, {"x": x, "mask": mask}, {"dim": 1, "scale": p.scale}, ("y",), incoming, wrt)


def _mask(rng: np.random.Generator, p: Params, shape: tuple[int, ...]) -> Tensor | None:
    if p.mask == "none":
        return None
    if p.mask == "all masked":
        return torch.zeros(shape, dtype=torch.bool)
    if p.mask in ("bool row", "bias of one row"):
        shape = (1, *shape[1:])
    elif p.mask == "bias column":
        shape = (shape[0], 1, *shape[2:])
    seen = torch.from_numpy(rng.random(shape) > 0.3)
    if len(seen) > 1:
        seen[::4] &= bool(rng.integers(2))
    if p.mask.startswith("bool"):
        return seen
    dtype = torch.float32 if p.mask == "fp32 bias" and p.dtype != torch.float64 else p.dtype
    return make(rng, shape, dtype, p.bias).masked_fill(~seen, -torch.inf)


def verify(case: Case, p: Params, api: Any) -> dict[str, float]:
    """F1 to F5, F7 of one case."""
    got, rng = case.run(api), np.random.default_rng(p.seed)
    shares = {}
    for name, exact in _exact(case).items():
        if rules.is_16_bit(got[name].dtype):
            unit = OUTPUT_TERMS
        else:  # fp64: exponents of up to 700 are rounded to 2^-44
            unit = FP32_SOFTMAX if p.dtype != torch.float64 else 2.0**-42
        shares[name] = rules.within_ulp(name, got[name], exact, unit, case)

    def alone(row: int) -> tuple[Case, dict[str, Any]]:
        return _alone(case, row), {name: slice(row, row + 1) for name in ("y", "dx")}

    cross_check(p.cross_check, Shared(case, got, rng, alone, len(case.inputs["x"]), _linear(case)), api)
    return shares


def _alone(case: Case, row: int) -> Case:
    inputs = {"x": case.inputs["x"][row : row + 1].clone()}
    mask = case.inputs["mask"]
    if mask is not None and len(mask) > 1:
        inputs["mask"] = mask[row : row + 1].clone()
    return change(case, inputs, {name: t[row : row + 1].clone() for name, t in case.incoming.items()})


def parts(case: Case) -> Iterator[Case]:
    """Each outer row by itself."""
    rows = len(case.inputs["x"])
    return (_alone(case, row) for row in range(rows) if rows > 1)


class _Weights(NamedTuple):
    """Weights in longdouble; how far a rounded sum with a bias may move them; what takes part; rows that are NaN."""

    y: Array
    moved: Array
    seen: Array
    bad: Array


def _weights(case: Case) -> _Weights:
    """By differences from the largest score, because scores may be far larger than what separates them."""
    x, mask = wide(case.inputs["x"]).astype(np.longdouble), case.inputs["mask"]
    scale = np.longdouble(case.options["scale"])
    scores, bias = x * scale, np.zeros(x.shape, np.longdouble)
    seen = np.ones(x.shape, bool)
    if mask is not None and mask.dtype == torch.bool:
        seen = np.broadcast_to(mask.numpy(), x.shape)
    elif mask is not None:
        bias = np.broadcast_to(wide(mask).astype(np.longdouble), x.shape)
        seen = ~np.isneginf(bias)
    scores = scores + bias
    seen = seen & ~np.isneginf(scores)
    bad = (seen & ~np.isfinite(scores)).any(1, keepdims=True)
    if not x.size:
        return _Weights(np.zeros(x.shape, np.longdouble), np.zeros(x.shape), seen, bad)
    top = np.where(seen & np.isfinite(scores), scores, -np.inf).argmax(1, keepdims=True)
    x, bias = (_finite(t) - np.take_along_axis(_finite(t), top, 1) for t in (x, bias))
    exponents = np.where(seen, x * scale + bias, -np.inf)
    weights = np.exp(np.minimum(exponents, 700))
    total = weights.sum(1, keepdims=True)
    total = np.where(total == 0, 1, total)
    # The sum with a bias is taken in double (fp64: long double) and moves a weight by its rounding.
    unit = 2.0**-62 if case.inputs["x"].dtype == torch.float64 else 2.0**-51
    size = np.where(seen, np.abs(scores) + np.abs(bias), 0) if mask is not None and mask.is_floating_point() else 0 * x
    shift = unit * np.where(np.isfinite(size), size, 0).max(1, keepdims=True)
    raised = np.where(seen, np.exp(np.minimum(exponents + shift, 0)), 0)
    moved = np.where(shift < 1, weights / total * np.expm1(np.minimum(shift, 1)), raised)
    return _Weights(weights / total, moved, seen, bad)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0)


def _exact(case: Case) -> dict[str, Exact]:
    """Output and gradients: the weights by the definition, then y (dy - sum dy y)."""
    y, moved, seen, bad = _weights(case)
    double = case.inputs["x"].dtype == torch.float64
    # A weight below fp32's normal range may be 0; in 16 bits that is below half of the smallest number.
    flushed = np.longdouble(2.0**-1020 if double else 2.0**-126)
    dy = np.where(seen, wide(case.incoming["y"]).astype(np.longdouble), 0)
    mean, mean_size = ((t * y).sum(1, keepdims=True) for t in (dy, np.abs(dy)))
    ds, terms = np.where(seen, y * (dy - mean), 0), np.where(seen, y * (np.abs(dy) + mean_size), 0)
    mean_moved = (np.abs(dy) * moved).sum(1, keepdims=True)
    moved_ds = moved * (np.abs(dy) + mean_size + mean_moved) + y * mean_moved
    ds = np.where(seen & (bad | (seen & ~np.isfinite(dy)).any(1, keepdims=True)), np.nan, ds)
    largest = np.abs(_finite(dy)).max(1, initial=0, keepdims=True)
    lost = 2 * flushed * largest + np.longdouble(2.0**-1074 if double else 2.0**-149) + _finite(moved_ds)
    scale = np.longdouble(case.options["scale"])
    result = {
        "y": Exact(np.where(seen & bad, np.nan, y), y, flushed + moved, bad),
        "dx": Exact(np.where(np.isnan(ds), np.nan, scale * ds), np.abs(scale) * terms, (np.abs(scale) + 1) * lost),
    }
    mask = case.inputs["mask"]
    if mask is not None and mask.is_floating_point():
        axes = tuple(i for i, size in enumerate(mask.shape) if size != y.shape[i])
        value, terms, lost = (np.broadcast_to(t, y.shape).sum(axes, keepdims=True) for t in (ds, terms, lost))
        result["dmask"] = Exact(value, terms, lost)
    for exact in result.values():
        exact.terms = _finite(exact.terms)
    return result


def _linear(case: Case) -> Any:
    """F4 holds where no weight was flushed."""
    y = _weights(case).y
    fine = ((y == 0) | (y > 2.0**-120)).all(1, keepdims=True)
    return lambda _: {"dx": fine, "dmask": bool(fine.all())}


SOFTMAX = OpContract(
    "softmax", _params(), build, verify, parts,
    dimensions=("dtype", "mask", "scale", "input", "bias", "dy", "layout", "cross_check"),
)  # fmt: skip
