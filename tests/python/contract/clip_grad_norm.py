"""clip_grad_norm_: the norm to 1e-6, and every number times the same factor, once."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from contract import gradients, rules
from contract.base import OpContract, threads
from contract.case import Case, change
from contract.rules import Exact, Violation, wide
from support.bounds import GRADIENT_NORM, OUTPUT_TERMS

CALL = """params = [torch.nn.Parameter(torch.empty(g.shape, dtype=g.dtype)) for g in grads]
for p, g in zip(params, grads):
    p.grad = g
norm = allfinite.clip_grad_norm_(params, max_norm, norm_type)"""


class Params(NamedTuple):
    """Gradients, and the limit as a part of their norm."""

    grads: gradients.Params
    part: float
    norm_type: float

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    @property
    def fill(self) -> Any:
        return self.grads.fill

    @property
    def layout(self) -> str:
        return self.grads.layout


@st.composite
def _params(draw: st.DrawFn) -> Params:
    return Params(
        draw(gradients.params()),
        draw(st.sampled_from([0.5, 2.0, 1.0, 1e-3, 1e-10, 1e-30, 0.0, np.inf])),
        draw(st.sampled_from([2.0, 2.0, 2.0, 1.0, np.inf, 3.0, 0.5])),
    )


def _norm(grads: list[Tensor], order: float) -> Any:
    """In longdouble, whose range holds the third power of every number."""
    numbers = np.concatenate([np.abs(wide(t).astype(np.longdouble)).reshape(-1) for t in grads])
    if np.isinf(order) or not np.isfinite(numbers).all():
        return numbers.max(initial=0)
    return (numbers**order).sum() ** (np.longdouble(1) / np.longdouble(order))


def _build(p: Params) -> Case:
    grads = gradients.tensors(p.grads)
    norm = float(_norm(grads, p.norm_type))
    max_norm = norm * p.part if np.isfinite(norm) and norm else 1.0
    options = {"max_norm": 0.0 if np.isnan(max_norm) else max_norm, "norm_type": p.norm_type}
    return Case(CALL, {"grads": grads}, options, ("norm",))


def _run(case: Case, api: Any) -> dict[str, Tensor]:
    work = change(case, copy.deepcopy(case.inputs))
    got = work.run(api)
    return got | {f"grads[{i}]": gradients.memory(t) for i, t in enumerate(work.inputs["grads"])}


def _verify(case: Case, p: Params, api: Any) -> dict[str, float]:
    """F1, F2, F3, F5; a norm that is not finite, and a factor of 1, change nothing."""
    grads, got = case.inputs["grads"], _run(case, api)
    exact, norm = _norm(grads, p.norm_type), got["norm"].item()
    if p.grads.cross_check == "threads":
        threads(case, got, lambda: _run(case, api))
    if not np.isfinite(exact):
        if np.isfinite(norm):
            raise Violation(f"F2: norm is {norm!r} over gradients that are not all finite", case)
        factor = np.longdouble(1)
    else:
        share = float(abs(norm - exact) / (GRADIENT_NORM * exact)) if exact else float(norm != 0) * 2
        if not share <= 1 and not (np.isinf(norm) and exact > np.finfo(np.float64).max):
            raise Violation(f"F3: norm is {norm!r}, exact {exact!s}", case)
        factor = np.minimum(1, np.longdouble(case.options["max_norm"]) / (np.longdouble(norm) + np.longdouble(1e-6)))
    shares = {}
    for i, t in enumerate(grads):
        name, before = f"grads[{i}]", gradients.memory(t)
        touched = gradients.touched(t, grads)
        if factor == 1:
            rules.same_bits("F3, a factor of 1", name, before, got[name], case)
            continue
        rules.same_bits("F6, gaps", name, before[~touched], got[name][~touched], case)
        value = wide(before[touched]) * factor.astype(wide(before).dtype)
        # The factor is rounded to fp32 (fp64: not), the product to the dtype.
        terms = Exact(value, np.abs(value), slack=np.full(value.shape, 2.0**-1074))
        unit = 2.0**-50 if t.dtype == torch.float64 else 2.0**-23 if t.dtype == torch.float32 else OUTPUT_TERMS
        shares[f"{t.dtype} gradient".removeprefix("torch.")] = rules.within_ulp(
            name, got[name][touched], terms, unit, case
        )
    return shares


CLIP_GRAD_NORM = OpContract(
    "clip_grad_norm_",
    _params(),
    _build,
    _verify,
    share=0.5,
    dimensions=("dtype", "fill", "layout", "part", "norm_type"),
)
