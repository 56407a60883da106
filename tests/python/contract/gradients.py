"""unscale_and_check_ and grad_stats: lists of tensors of any dtypes and strides that may share memory."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from contract import rules
from contract.base import OpContract, threads
from contract.case import Case, change
from contract.numbers import DTYPES, LAYOUTS, SEEDS, Fill, fills, make
from contract.rules import Violation, wide
from support.bounds import GRADIENT_NORM
from support.gradients import subnormals, unscaled

SHAPES = ((3,), (1,), (), (2, 3), (17,), (5, 7), (64,), (2, 3, 4), (0,), (130,), (33, 9))
SHARED = ("none", "none", "none", "same tensor twice", "overlapping views")
INV_SCALES = (2.0**-16, 1.0, 0.5, 2.0**-24, 1.0 / 3, 2.0, 2.0**-126, 2.0**126, 0.0, np.inf, np.nan)


class Params(NamedTuple):
    """A list of gradients; ``dtype`` is that of the first."""

    dtype: torch.dtype
    others: tuple[tuple[torch.dtype, tuple[int, ...], str], ...]
    shape: tuple[int, ...]
    layout: str
    fill: Fill
    shared: str
    found_inf: float
    inv_scale: float
    cross_check: str
    seed: int


@st.composite
def params(draw: st.DrawFn) -> Params:
    """Lists of one to four tensors."""
    dtype = draw(st.sampled_from(DTYPES))
    other = st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from(LAYOUTS))
    return Params(
        dtype,
        tuple(draw(st.lists(other, max_size=3))),
        draw(st.sampled_from(SHAPES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(fills(dtype)),
        draw(st.sampled_from(SHARED)),
        draw(st.sampled_from([0.0, 0.0, 1.0])),
        draw(st.sampled_from(INV_SCALES)),
        draw(st.sampled_from(["none"] * 19 + ["threads"])),
        draw(SEEDS),
    )


def tensors(p: Params) -> list[Tensor]:
    """The gradients."""
    rng = np.random.default_rng(p.seed)
    shape = (300, *p.shape) if p.cross_check == "threads" else p.shape
    grads = [make(rng, shape, p.dtype, p.fill, p.layout)]
    grads += [make(rng, shape, dtype, Fill(p.fill.spread), layout) for dtype, shape, layout in p.others]
    if p.shared == "same tensor twice":
        grads.append(grads[0])
    elif p.shared == "overlapping views" and grads[0].dim():
        grads.append(grads[0][: 1 + len(grads[0]) // 2])
    return grads


def _build_unscale(p: Params) -> Case:
    inputs = {"grads": tensors(p), "found_inf": torch.tensor(p.found_inf), "inv_scale": torch.tensor(p.inv_scale)}
    return Case("allfinite.unscale_and_check_(grads, found_inf, inv_scale)", inputs)


def _run_unscale(case: Case, api: Any) -> dict[str, Tensor]:
    """The call on a copy of all memory: the memory of each gradient afterwards, gaps included, and the flag."""
    work = change(case, copy.deepcopy(case.inputs))
    work.run(api)
    after = {f"grads[{i}]": memory(t) for i, t in enumerate(work.inputs["grads"])}
    return {**after, "found_inf": work.inputs["found_inf"], "inv_scale": work.inputs["inv_scale"]}


def memory(t: Tensor) -> Tensor:
    """All numbers of the storage."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def touched(t: Tensor, grads: list[Tensor]) -> Tensor:
    """Which numbers of the memory of ``t`` are elements of any gradient."""
    places = torch.zeros(memory(t).shape, dtype=torch.bool)
    for other in grads:
        if other.untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
            places.as_strided(other.shape, other.stride(), other.storage_offset()).fill_(True)
    return places


def _verify_unscale(case: Case, p: Params, api: Any) -> dict[str, float]:
    """F1, F2, F3, F5: each number is multiplied once, in fp32 (fp64), rounded once; gaps stay; the flag is right."""
    inv_scale, grads = case.inputs["inv_scale"], case.inputs["grads"]
    got = _run_unscale(case, api)
    expected, bad = {}, float(case.inputs["found_inf"]) != 0
    for i, t in enumerate(grads):
        result = unscaled(memory(t), float(inv_scale))
        bad |= not bool((t.isfinite() & unscaled(t, float(inv_scale)).isfinite()).all())
        expected[f"grads[{i}]"] = torch.where(touched(t, grads), result, memory(t))
    for name, value in expected.items():
        rules.same_bits("F3, multiplied once and rounded once", f"memory of {name}", got[name], value, case)
    if float(got["found_inf"]) != float(bad):
        raise Violation(f"F2: found_inf is {float(got['found_inf'])}, expected {float(bad)}", case)
    rules.same_bits("F6", "inv_scale", got["inv_scale"], inv_scale, case)
    if p.cross_check == "threads":
        threads(case, got, lambda: _run_unscale(case, api))
    return {}


UNSCALE = OpContract(
    "unscale_and_check_", params(), _build_unscale, _verify_unscale, share=0.5,
    dimensions=("dtype", "fill", "layout", "shared", "inv_scale", "found_inf", "cross_check"),
)  # fmt: skip


def _build_stats(p: Params) -> Case:
    call = "found_inf, norm, amax, zeros, subnormals = allfinite.grad_stats(grads)"
    return Case(call, {"grads": tensors(p)}, results=("found_inf", "norm", "amax", "zeros", "subnormals"))


def _verify_stats(case: Case, p: Params, api: Any) -> dict[str, float]:
    """F1, F2, F3, F5: counts and maximum exact, the norm to 1e-6."""
    grads, got = case.inputs["grads"], case.run(api)
    numbers = np.concatenate([wide(t).astype(np.longdouble).reshape(-1) for t in grads])
    finite = bool(np.isfinite(numbers).all())
    amax = float(np.abs(numbers).max(initial=0))
    expected = {
        "found_inf": float(not finite),
        "amax": amax,
        "zeros": int((numbers == 0).sum()),
        "subnormals": sum(subnormals(t) for t in grads),
    }
    for name, value in expected.items():
        if got[name].item() != value and not (np.isnan(value) and got[name].isnan()):
            raise Violation(f"F2/F3: {name} is {got[name].item()!r}, expected {value!r}", case)
    norm = got["norm"].item()
    if p.cross_check == "threads":
        threads(case, got, lambda: case.run(api))
    if not finite:
        if norm != amax and not (np.isnan(norm) and np.isnan(amax)):
            raise Violation(f"F2: norm is {norm!r} where the largest magnitude is {amax!r}", case)
        return {}
    exact = np.sqrt(np.square(numbers).sum())
    share = float(abs(norm - exact) / (GRADIENT_NORM * exact)) if exact else float(norm != 0) * 2
    if not share <= 1:
        raise Violation(f"F3: norm is {norm!r}, exact {exact!s}", case)
    return {"norm": share}


GRAD_STATS = OpContract(
    "grad_stats", params(), _build_stats, _verify_stats, share=0.5,
    dimensions=("dtype", "fill", "layout", "shared", "cross_check"),
)  # fmt: skip
