"""update_scale_ against its rule written in Python, bit for bit."""

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from contract.base import OpContract
from contract.case import Case, change
from contract.rules import Violation


class Params(NamedTuple):
    """One call."""

    scale: float
    tracker: int
    found_inf: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    bounds: tuple[float, float]


def _powers(low: int, high: int) -> st.SearchStrategy[float]:
    return st.tuples(st.integers(low, high), st.sampled_from([1.0, 1.5, 1.1, 1.9999999])).map(
        lambda t: t[1] * 2.0 ** t[0]
    )


@st.composite
def _params(draw: st.DrawFn) -> Params:
    low = draw(st.sampled_from([0, -126, -10, 5]))
    return Params(
        draw(st.one_of(_powers(-30, 30), _powers(-149, 127), st.sampled_from([0.0, math.inf, math.nan]))),
        draw(st.one_of(st.integers(0, 5), st.sampled_from([1999, 2000, 2**31 - 1]))),
        draw(st.sampled_from([0.0, 0.0, 1.0, 2.0, -1.0, math.nan, math.inf])),
        draw(st.sampled_from([2.0, 1.0, 1.5, 1.0000001, 16.0, 1e30])),
        draw(st.sampled_from([0.5, 1.0, 0.3, 0.9999999, 0.1, 1e-30])),
        draw(st.sampled_from([2000, 1, 2, 3, 2**31 - 1, 2**40])),
        (2.0**low, 2.0 ** draw(st.sampled_from([24, 126, max(low, 5)]))),
    )


def _build(p: Params) -> Case:
    inputs = {
        "scale": torch.tensor(p.scale), "growth_tracker": torch.tensor(p.tracker, dtype=torch.int32),
        "found_inf": torch.tensor(p.found_inf),
    }  # fmt: skip
    options = p._asdict()
    options = {name: options[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
    options.update(zip(("min_scale", "max_scale"), p.bounds, strict=True))
    call = (
        "allfinite.update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, "
        "min_scale=min_scale, max_scale=max_scale)"
    )
    return Case(call, inputs, options)


def expected(scale: np.float32, tracker: int, found_inf: float, o: dict[str, Any]) -> tuple[np.float32, int]:
    """The rule: products as float32(double(scale) * factor); a bound stops a scale and never moves one."""
    if found_inf != 0:
        product = np.float32(np.float64(scale) * o["backoff_factor"])
        floor = min(scale, np.float32(o["min_scale"]))
        return (floor if product < floor else product), 0
    if tracker + 1 >= o["growth_interval"]:
        product = np.float32(np.float64(scale) * o["growth_factor"])
        cap = max(scale, np.float32(o["max_scale"]))
        grown = cap if product > cap and scale < cap else product
        keep = (not np.isfinite(product) and not np.isnan(scale)) or scale >= np.float32(o["max_scale"])
        return (scale if keep else grown), 0
    return scale, min(tracker + 1, 2**31 - 1)


def _verify(case: Case, p: Params, api: Any) -> dict[str, float]:
    work = change(case, copy.deepcopy(case.inputs))
    work.run(api)
    got = work.inputs["scale"].numpy()[()], int(work.inputs["growth_tracker"])
    want = expected(case.inputs["scale"].numpy()[()], p.tracker, p.found_inf, case.options)
    same = got[0] == want[0] or bool(np.isnan(got[0]) and np.isnan(want[0]))
    if not (same and got[1] == want[1]):
        raise Violation(f"F3: scale and tracker are {got}, expected {want}", case)
    return {}


UPDATE_SCALE = OpContract(
    "update_scale_", _params(), _build, _verify, share=0.2,
    dimensions=("found_inf", "growth_factor", "backoff_factor", "growth_interval", "bounds"),
)  # fmt: skip
