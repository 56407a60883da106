"""layer_norm, rms_norm and the two with a residual: what they take and what is exact."""

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
from contract.rules import Exact, wide, wide_type
from support.bounds import COLUMN_TERMS, FP32_NORM, OUTPUT_TERMS

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 33, 0)
SIZES = (*range(1, 20), 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 257, 300)
EPS = (1e-5, 0.0, 1e-12, 1e-6, 1e-30, 1e-70, 1e-300, 1.0, 1e300)

FP64 = 2**-48  # relative L2: some eight roundings of 2^-53 each on the way from x to y and dx
FP64_COLUMNS = 2**-44  # of the terms: chains of a few hundred rows in double


class Params(NamedTuple):
    """One norm; ``residual`` is None for the ops without."""

    dtype: torch.dtype
    residual: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    rows: int
    n: int
    two_dims: bool
    eps: float | None
    x: Fill
    parameters: Fill
    dy: Fill
    layout: str
    cross_check: str
    seed: int


@st.composite
def _params(draw: st.DrawFn, has_bias: bool, has_residual: bool) -> Params:
    dtype = draw(st.sampled_from(DTYPES))
    second = torch.float32 if dtype != torch.float64 else dtype  # fp32 parameters beside a 16-bit input
    weight, bias = draw(st.sampled_from([(w, b) for w in (None, dtype, second) for b in (None, dtype, second)]))
    return Params(
        dtype,
        draw(st.sampled_from([dtype, second])) if has_residual else None,
        weight,
        bias if has_bias else None,
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from(SIZES)),
        draw(st.sampled_from([False, False, False, True])),
        draw(st.sampled_from(EPS if has_bias else (*EPS, None))),
        draw(fills(dtype, whole=True)),
        draw(fills(weight or bias or dtype, whole=True)),
        draw(fills(dtype, whole=True)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(CROSS_CHECKS)),
        draw(SEEDS),
    )


class Norm:
    """One op of the family.

    Args:
        name: of the op.
        centred: whether the mean is subtracted (and there is a bias).
        residual: whether another tensor is added first.
    """

    def __init__(self, name: str, centred: bool, residual: bool) -> None:
        self.centred, self.residual = centred, residual
        bias, added = ("bias, " if centred else ""), ("residual, " if residual else "")
        targets = "y, residual_out" if residual else "y"
        self.call = f"{targets} = allfinite.{name}(x, {added}shape, weight, {bias}eps)"
        self.contract = OpContract(
            name, _params(centred, residual), self.build, self.verify, self.parts,
            dimensions=("dtype", "x", "parameters", "dy", "weight", "layout", "eps", "cross_check"),
        )  # fmt: skip

    def build(self, p: Params) -> Case:
        """The tensors of a case."""
        rng = np.random.default_rng(p.seed)
        rows = p.rows * 60 if p.cross_check == "threads" else p.rows
        shape = (2, p.n) if p.two_dims else (p.n,)
        x = make(rng, (rows, *shape), p.dtype, p.x, p.layout, whole=True)
        inputs: dict[str, Any] = {"x": x}
        incoming = {"y": make(rng, x.shape, p.dtype, p.dy, p.layout, whole=True)}
        if p.residual is not None:
            inputs["residual"] = make(rng, x.shape, p.residual, p.x, p.layout, whole=True)
            incoming["residual_out"] = make(rng, x.shape, p.residual, p.dy, whole=True)
        names = ("weight", "bias") if self.centred else ("weight",)
        for name, dtype in zip(names, (p.weight, p.bias), strict=False):
            inputs[name] = None if dtype is None else make(rng, shape, dtype, p.parameters, p.layout, whole=True)
        wrt = tuple(name for name, t in inputs.items() if t is not None)
        return Case(self.call, inputs, {"shape": shape, "eps": p.eps}, tuple(incoming), incoming, wrt)

    def alone(self, case: Case, row: int) -> Case:
        """The case of one row, contiguous."""
        cut = {name: case.inputs[name][row : row + 1].clone() for name in ("x", "residual") if name in case.inputs}
        return change(case, cut, {name: t[row : row + 1].clone() for name, t in case.incoming.items()})

    def parts(self, case: Case) -> Iterator[Case]:
        """Each row by itself."""
        rows = len(case.inputs["x"])
        return (self.alone(case, row) for row in range(rows) if rows > 1)

    def verify(self, case: Case, p: Params, api: Any) -> dict[str, float]:
        """F1 to F5 of one case."""
        got = case.run(api)
        n, rng = int(np.prod(case.options["shape"])), np.random.default_rng(p.seed)
        exact = self.exact(case, got, n)
        shares = {name: _compare(name, got[name], exact[name], case) for name in got}

        def alone(row: int) -> tuple[Case, dict[str, Any]]:
            return self.alone(case, row), {
                name: slice(row, row + 1) for name in got if name not in ("dweight", "dbias")
            }

        # Where rstd multiplies what is subnormal, the result has fewer digits; fp64 rows are not scaled for backward.
        rstd = self._normalised(*self._rows(case, got, n))[1]
        rstd = np.where(np.isfinite(rstd), rstd, 0).max(initial=1)
        least = 2.0**-960 if p.dtype == torch.float64 else 2.0**-102 * float(rstd)

        def linear(part: Case) -> dict[str, Array]:
            """F4 holds bit for bit where nothing is subnormal on the way ("Doubt" in docs/numerics.md).

            A column sum: where no product is. dx: beyond 2^-100 of what the largest dy * gamma of the row gives, whose
            power of two a rescued row takes.
            """
            xhat, rstd = self._normalised(*self._rows(part, got, n))
            dy, gamma = wide(part.incoming["y"]).reshape(-1, n), part.inputs["weight"]
            size = np.abs(dy * xhat)
            columns = ((size == 0) | (size >= 2.0**-125)).all(0).reshape(part.options["shape"])
            g = np.abs(dy if gamma is None else dy * wide(gamma, p.dtype).reshape(n))
            least_dx = rstd * g.max(1, initial=0, keepdims=True) * 2.0**-100
            rows = (np.abs(self.exact(part, got, n)["dx"].value) > least_dx).reshape(part.inputs["x"].shape)
            return {"dweight": columns, "dx": rows, "dresidual": rows}

        cross_check(
            p.cross_check,
            Shared(case, got, rng, alone, len(case.inputs["x"]), linear, least),
            api,
        )
        return shares

    def exact(self, case: Case, got: dict[str, Tensor], n: int) -> dict[str, Exact]:
        """Every result by the definition, from the rounded inputs; the norm is that of the stored sum."""
        dtype, kind = case.inputs["x"].dtype, wide_type(case.inputs["x"].dtype)
        result: dict[str, Exact] = {}
        dres: Any = 0.0
        if self.residual:
            total = wide(case.inputs["x"]) + wide(case.inputs["residual"], dtype)
            result["residual_out"] = Exact(total.reshape(-1, n), np.abs(total).reshape(-1, n))
            dres = wide(case.incoming["residual_out"], dtype).reshape(-1, n)
        rows, eps = self._rows(case, got, n)
        gamma, beta = (
            np.asarray(kind(default)) if t is None else wide(t, dtype).reshape(n)
            for t, default in ((case.inputs["weight"], 1), (case.inputs.get("bias"), 0))
        )
        xhat, rstd = self._normalised(rows, eps)
        # F2: every element of a row takes part in every other, so one that is not finite makes the row NaN.
        xhat = np.where(np.isfinite(rows).all(1, keepdims=True), xhat, np.nan)
        y = xhat * gamma
        result["y"] = Exact(y + beta, np.abs(y) + np.abs(beta))
        dy = wide(case.incoming["y"]).reshape(-1, n)
        g = dy * gamma
        through = xhat * (g * xhat).mean(1, keepdims=True) + (g.mean(1, keepdims=True) if self.centred else 0)
        size = np.abs(xhat) * np.abs(g * xhat).mean(1, keepdims=True)
        size = size + (np.abs(g).mean(1, keepdims=True) if self.centred else 0)
        dx = Exact(rstd * (g - through) + dres, rstd * (np.abs(g) + size) + np.abs(dres))
        result["dx"] = result["dresidual"] = dx
        for name, columns in (("dweight", dy * xhat), ("dbias", dy)):
            result[name] = Exact(columns.sum(0), np.abs(columns).sum(0))
        _excuse_subnormals(result, dtype, gamma, dy, np.where(np.isfinite(rstd), rstd, 0))
        if self.centred:
            stored = got.get("residual_out", case.inputs["x"]).dtype
            _excuse_mean(result, stored, rows, rstd, xhat, gamma, dy)
        return result

    def _rows(self, case: Case, got: dict[str, Tensor], n: int) -> tuple[Array, Any]:
        """What is normalised (the stored sum where there is a residual), and eps, in the wide type."""
        dtype, eps = case.inputs["x"].dtype, case.options["eps"]
        if eps is None:
            eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        source = got["residual_out"] if self.residual else case.inputs["x"]
        return wide(source, dtype).reshape(-1, n), wide_type(dtype)(eps)

    def _normalised(self, rows: Array, eps: Any) -> tuple[Array, Array]:
        """xhat and 1 / sqrt(var + eps); both 0 where that is 1 / 0."""
        if self.centred:
            rows = rows - rows.mean(1, keepdims=True)
            rows = rows - rows.mean(1, keepdims=True)
        total = np.square(rows).mean(1, keepdims=True) + eps
        rstd = np.where(total == 0, 0, 1 / np.sqrt(total))
        return rows * rstd, rstd


def _excuse_subnormals(result: dict[str, Exact], dtype: torch.dtype, gamma: Array, dy: Array, rstd: Array) -> None:
    """Below the normal range of the arithmetic there are fewer digits (docs/numerics.md, "Doubt").

    Half an ulp there, for the result; times its factor for an xhat that is as small (rows of 1e-40 beside a normal eps,
    or x times a row's power of two before the multiplication by some sqrt(n)); for each product of a column sum; and
    for what rstd multiplies, also where a dy * gamma 2^126 times as large in the row decides the power of two.
    """
    # fp64 does not scale such products: some more.
    half = gamma.dtype.type(2.0**-1074 * 4 if dtype == torch.float64 else 2.0**-150)
    of_xhat = half * 2 * (1 + dy.shape[1] ** 0.5)
    for name, e in result.items():
        e.slack = np.full(e.value.shape, 2 * half)
        if name == "y":
            e.slack = e.slack + of_xhat * np.abs(gamma)
        elif name in ("dweight", "dbias"):
            e.slack = e.slack + half * len(dy) + of_xhat * np.abs(dy).sum(0)
        elif name in ("dx", "dresidual"):
            g = np.abs(dy * gamma)
            g = np.where(np.isfinite(g), g, 0)
            largest = g.max(1, initial=0, keepdims=True)
            # An xhat of up to sqrt(n) multiplies the row's mean of g * xhat; g is in units of up to twice its largest.
            of_mean = 2 * dy.shape[1] ** 0.5 * (half * largest + of_xhat * g.mean(1, keepdims=True))
            e.slack = e.slack + rstd * ((4 + 16 * largest) * half + of_mean)


def _excuse_mean(
    result: dict[str, Exact], dtype: torch.dtype, rows: Array, rstd: Array, xhat: Array, gamma: Array, dy: Array
) -> None:
    """A mean is two fp32 numbers, right to 2^-48 of the largest number of the row; an xhat nearer to 0 is not.

    fp64, which has no wider type, finds the low part from deviations rounded to 2^-53 each. 16-bit rows are added in
    fp32 by four first, which rounds where their magnitudes differ by more than 2^13.
    """
    unit = 2.0**-49 if rows.dtype != np.float64 else 2.0**-23 if rules.is_16_bit(dtype) else 2.0**-47
    error = unit * np.abs(rows).max(1, initial=0, keepdims=True) * rstd
    error = np.where(np.isfinite(error), error, 0)
    g = np.abs(dy * gamma)
    through = np.abs(g * xhat).mean(1, keepdims=True) + np.abs(xhat) * g.mean(1, keepdims=True)
    for name, slack in (
        ("y", error * np.abs(gamma)), ("dx", rstd * (error * through)), ("dweight", (np.abs(dy) * error).sum(0)),
    ):  # fmt: skip
        result[name].slack = result[name].slack + slack
    # What is infinite gives the sign of xhat; nearer to 0 than its error that may be either, or NaN.
    near, endless = np.abs(xhat) <= error, np.isinf(g)
    for name, doubtful in (
        ("y", np.isinf(gamma) & near),
        ("dx", endless.any(1, keepdims=True) & near | (endless & near).any(1, keepdims=True)),
        ("dweight", (np.isinf(dy) & near).any(0)),
    ):
        result[name].value = np.where(doubtful, np.nan, result[name].value)


def _compare(name: str, actual: Tensor, exact: Exact, case: Case) -> float:
    """F3 for one result."""
    double, actual = actual.dtype == torch.float64, actual.reshape(exact.value.shape)
    if name in ("dweight", "dbias"):
        return rules.within_ulp(name, actual, exact, FP64_COLUMNS if double else COLUMN_TERMS, case)
    if name == "residual_out" or rules.is_16_bit(actual.dtype):
        return rules.within_ulp(name, actual, exact, OUTPUT_TERMS, case)
    if actual.dtype == torch.float32:
        return rules.within_l2(name, actual, exact, FP32_NORM, case, terms_count=name != "y")
    return rules.within_l2(name, actual, exact, FP64, case, terms_count=True)


LAYER_NORM = Norm("layer_norm", centred=True, residual=False)
RMS_NORM = Norm("rms_norm", centred=False, residual=False)
ADD_LAYER_NORM = Norm("add_layer_norm", centred=True, residual=True)
ADD_RMS_NORM = Norm("add_rms_norm", centred=False, residual=True)
