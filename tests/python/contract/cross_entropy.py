"""cross_entropy: what it takes, and loss and gradients by the definition."""

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
from support.bounds import LOSS_GRADIENT_TERMS, OUTPUT_TERMS

ROWS = (1, 2, 3, 4, 5, 7, 9, 17, 0)
CLASSES = (*range(1, 20), 31, 32, 33, 64, 65, 100, 129, 300)
CALL = "loss = allfinite.cross_entropy(x, target, weight, ignore_index, reduction, label_smoothing, z_loss=z_loss)"


class Params(NamedTuple):
    """One loss over ``(rows, classes)`` or ``(rows, classes, inner)``."""

    dtype: torch.dtype
    rows: int
    classes: int
    inner: int
    target: str
    weight: str
    reduction: str
    label_smoothing: float
    z_loss: float
    x: Fill
    grad: Fill
    layout: str
    cross_check: str
    seed: int


@st.composite
def _params(draw: st.DrawFn) -> Params:
    dtype = draw(st.sampled_from(DTYPES))
    return Params(
        dtype,
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from(CLASSES)),
        draw(st.sampled_from([1, 1, 1, 3])),
        draw(st.sampled_from(["indices", "indices", "some ignored", "all ignored", "probabilities", "masses"])),
        draw(st.sampled_from(["none", "none", "own dtype", "fp32", "some 0"])),
        draw(st.sampled_from(["mean", "sum", "none"])),
        draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        draw(st.sampled_from([0.0, 0.0, 1e-4, 1.0])),
        draw(fills(dtype)),
        draw(fills(torch.float64 if dtype == torch.float64 else torch.float32)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(CROSS_CHECKS)),
        draw(SEEDS),
    )


def build(p: Params) -> Case:
    """The tensors of a case."""
    rng = np.random.default_rng(p.seed)
    rows = p.rows * (60 if p.inner == 1 else 8) if p.cross_check == "threads" else p.rows
    inner = () if p.inner == 1 else (p.inner,)
    x = make(rng, (rows, p.classes, *inner), p.dtype, p.x, p.layout)
    out_dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    weight, ignore = None, int(rng.choice([-100, 0]))
    if p.weight != "none":
        weight = torch.from_numpy(rng.random(p.classes) + 0.1).to(out_dtype if p.weight == "fp32" else p.dtype)
        if p.weight == "some 0":
            weight[:: int(rng.integers(1, 4))] = 0
    if p.target in ("probabilities", "masses"):
        masses = np.abs(rng.standard_normal((rows, p.classes, *inner))) * (rng.random((rows, p.classes, *inner)) < 0.7)
        scale = masses.sum(1, keepdims=True) if p.target == "probabilities" else 1
        target = torch.from_numpy(np.nan_to_num(masses / scale)).to(p.dtype)
        ignore = -100
    else:
        target = torch.from_numpy(rng.integers(0, p.classes, (rows, *inner)))
        if p.target == "some ignored":
            target[torch.from_numpy(rng.random((rows, *inner)) < 0.4)] = ignore
        elif p.target == "all ignored":
            target.fill_(ignore)
    shape = (rows, *inner) if p.reduction == "none" else ()
    grad = make(rng, shape, out_dtype, p.grad)
    options = {
        "ignore_index": ignore, "reduction": p.reduction, "label_smoothing": p.label_smoothing, "z_loss": p.z_loss,
    }  # fmt: skip
    wrt = ("x", "target") if target.is_floating_point() else ("x",)
    return Case(CALL, {"x": x, "target": target, "weight": weight}, options, ("loss",), {"loss": grad}, wrt)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0)


class Problem:
    """The case in longdouble, one row a prediction: ``(rows, classes)``."""

    def __init__(self, case: Case) -> None:
        self.case, options = case, case.options
        self.shape = case.inputs["x"].shape
        x, weight = self._rows(case.inputs["x"]), case.inputs["weight"]
        rows, classes = x.shape
        w = np.ones(classes, np.longdouble) if weight is None else wide(weight).astype(np.longdouble)
        smooth, target = np.longdouble(options["label_smoothing"]), case.inputs["target"]
        self.soft = target.is_floating_point()
        if self.soft:
            self.counted = np.ones(rows, bool)
            self.slope = np.broadcast_to(w * (1 - smooth), x.shape)  # of the loss in a target, times -log p
            q = w * (self._rows(target) * (1 - smooth) + smooth / classes)
            row_weight = np.ones(rows, np.longdouble)
            total = np.longdouble(rows)
        else:
            index = target.reshape(-1).numpy()
            self.counted = index != options["ignore_index"]
            index = np.where(self.counted, index, 0)
            row_weight = w[index] * self.counted
            q = np.broadcast_to(w * smooth / classes, x.shape).copy()
            q[np.arange(rows), index] += (1 - smooth) * w[index]
            self.index, total = index, row_weight.sum()
        self.denominator = total if options["reduction"] == "mean" else np.longdouble(1)
        self.x, self.q, self.z = x, q * self.counted[:, None], np.longdouble(options["z_loss"]) * row_weight
        self._solve()

    def _rows(self, t: Tensor) -> Array:
        values = wide(t).astype(np.longdouble)
        return np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])

    def _solve(self) -> None:
        """Loss, probabilities, and the terms of a row's loss."""
        top = self.x.max(1, keepdims=True)
        self.bad = self.counted & ~(np.isfinite(top[:, 0]) & ~np.isnan(self.x).any(1))
        x = np.where((self.bad | ~self.counted)[:, None], 0, self.x)
        top = x.max(1, keepdims=True)
        self.e = np.exp(x - top)
        others = self.e.copy()
        others[np.arange(len(x)), x.argmax(1)] = 0
        log = np.log1p(others.sum(1, keepdims=True))  # the 1 of the largest would swallow small ones
        self.p = self.e / self.e.sum(1, keepdims=True)
        self.depth = (top - x) + log  # -log p
        loss = np.where(self.q == 0, 0, self.q * self.depth)
        self.lse = (top + log)[:, 0]
        self.row_loss = loss.sum(1) + self.z * self.lse**2
        terms = np.where(self.q == 0, 0, np.abs(self.q) * (np.abs(top - x) + log + (1 if self.soft else 0)))
        # exp below fp32's normal range is 0.
        self.row_lost = np.abs(self.q).sum(1) * len(x.T) * 2.0**-125 + 2.0**-149
        self.row_terms = terms.sum(1) + self.z * (np.abs(top[:, 0]) + log[:, 0]) ** 2

    def exact(self) -> dict[str, Exact]:
        """The loss and the gradients."""
        row_loss = np.where(self.bad, np.nan, self.row_loss)
        reduction = self.case.options["reduction"]
        shape = [size for i, size in enumerate(self.shape) if i != 1]
        terms = np.where(np.isfinite(self.row_terms), self.row_terms, 0)
        if reduction == "none":
            parts = (row_loss, terms, self.row_lost)
            result = {"loss": Exact(*(t.reshape(shape) for t in parts))}
        else:
            value, *rest = (t.sum() / self.denominator for t in (row_loss, terms, self.row_lost))
            result = {"loss": Exact(value, *map(_finite, rest))}
        result["dx"] = self._dx()
        if self.soft:
            g = self._incoming()
            slope = np.abs(self.slope)
            value = np.where(self.bad[:, None], np.nan, g * self.slope * self.depth)
            size = np.abs(g) * slope * np.where(np.isfinite(self.depth), np.abs(self.depth) + 1, 0)
            may = np.broadcast_to(slope == 0, value.shape)  # a weight of 0: 0 times what is not finite is either
            value = np.where(may, 0, value)
            # An incoming gradient that is subnormal, times a weight or over the rows, has fewer digits.
            lost = 2.0**-148 * (1 + np.where(np.isfinite(self.depth), np.abs(self.depth), 0)) * (1 + slope)
            result["dtarget"] = self._like(Exact(value, size, lost, may))
        return result

    def _incoming(self) -> Array:
        g = wide(self.case.incoming["loss"]).astype(np.longdouble).reshape(-1, 1)
        denominator = self.denominator
        return g / denominator if denominator else g * 0

    def _dx(self) -> Exact:
        """g ((Q + Z) p - q); a target beyond 1/2 as minus the sum of the others."""
        g, q, p = self._incoming(), self.q, self.p
        mass = q.sum(1, keepdims=True)
        z = 2 * (self.z * self.lse)[:, None]
        value = (mass + z) * p - q
        terms = (np.abs(mass) + np.abs(z)) * p + np.abs(q)
        if not self.soft and len(p):
            at = (np.arange(len(p)), self.index)
            others = self.e.copy()
            others[at] = 0
            others = others.sum(1) / self.e.sum(1)
            rest = mass[:, 0] - q[at]
            fine = p[at] > 0.5
            value[at] = np.where(fine, -mass[:, 0] * others + rest + z[:, 0] * p[at], value[at])
            size = np.abs(mass[:, 0]) * others + np.abs(rest) + np.abs(z[:, 0]) * p[at]
            terms[at] = np.where(fine, size, terms[at])
        ignored = ~self.counted[:, None]
        value = np.where(ignored, 0, np.where(self.bad[:, None] | ~np.isfinite(g), np.nan, g * value))
        lost = np.abs(g) * (np.abs(mass) + np.abs(z)) * 2.0**-125  # exp below fp32's normal range is 0
        lost = np.broadcast_to(np.where(np.isfinite(lost), lost, 0) + 2.0**-149, value.shape)
        no_weight = np.broadcast_to(self.denominator == 0, value.shape)
        return self._like(Exact(value, np.where(ignored, 0, np.abs(g) * terms), lost, no_weight))

    def _like(self, exact: Exact) -> Exact:
        """Shaped as the logits."""
        moved = (self.shape[0], *self.shape[2:], self.shape[1])
        parts = (np.moveaxis(np.asarray(t).reshape(moved), -1, 1) if np.ndim(t) else t for t in vars(exact).values())
        return Exact(*parts)


def verify(case: Case, p: Params, api: Any) -> dict[str, float]:
    """F1 to F5 of one case."""
    got, rng = case.run(api), np.random.default_rng(p.seed)
    shares = {}
    for name, exact in Problem(case).exact().items():
        unit = 2.0**-44 if p.dtype == torch.float64 else OUTPUT_TERMS if name == "loss" else LOSS_GRADIENT_TERMS
        exact.terms = np.where(np.isfinite(exact.terms), exact.terms, 0)
        shares[name] = rules.within_ulp(name, got[name], exact, unit, case)

    def alone(row: int) -> tuple[Case, dict[str, Any]]:
        names = {"none": ("loss", "dx", "dtarget"), "sum": ("dx", "dtarget"), "mean": ()}[p.reduction]
        return _alone(case, row), {name: slice(row, row + 1) for name in names if name in got}

    cross_check(p.cross_check, Shared(case, got, rng, alone, len(case.inputs["x"])), api)
    return shares


def _alone(case: Case, row: int) -> Case:
    inputs = {name: case.inputs[name][row : row + 1].clone() for name in ("x", "target")}
    grad = case.incoming["loss"]
    return change(case, inputs, {"loss": grad[row : row + 1].clone() if grad.dim() else grad})


def parts(case: Case) -> Iterator[Case]:
    """Each first index by itself."""
    rows = len(case.inputs["x"])
    return (_alone(case, row) for row in range(rows) if rows > 1)


CROSS_ENTROPY = OpContract(
    "cross_entropy", _params(), build, verify, parts,
    dimensions=("dtype", "target", "weight", "reduction", "label_smoothing", "z_loss", "x", "grad", "cross_check"),
)  # fmt: skip
