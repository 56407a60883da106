"""scaled_dot_product_attention: what it takes, and its results and gradients by the textbook with their terms."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import allfinite
from contract import rules
from contract.base import CROSS_CHECKS, OpContract, Shared, cross_check
from contract.case import Case, change
from contract.numbers import DTYPES, LAYOUTS, SEEDS, Array, Fill, fills, make
from contract.rules import Exact, Violation, wide, wide_type
from support import attention_reference
from support.bounds import COLUMN_TERMS

CALL = (
    "torch.manual_seed(seed)\n"
    "output, lse = allfinite.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout_p, "
    "is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, softcap=softcap, window=window, return_lse=True)"
)
# (batch, heads, heads of key and value)
HEADS = ((1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 4, 2), (1, 3, 1))
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 0)
KEYS = (*LENGTHS[:-1], 31, 64, 65, 129, 0)
DEPTHS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 24)
MASKS = (
    "none",
    "none",
    "bool",
    "key padding",
    "bias",
    "bias of one row",
    "fp32 bias",
    "causal",
    "window",
    "all masked",
)
DROPOUTS = (0.0, 0.0, 0.0, 0.0, 0.1, 0.5, 0.875, 1.0)
SCALES = (None, None, None, 1.0, -0.5, 0.0, 1e-8, 8.0)


class Params(NamedTuple):
    """One attention problem."""

    dtype: torch.dtype
    heads: tuple[int, int, int]
    queries: int
    keys: int
    depths: tuple[int, int]
    mask: str
    scale: float | None
    softcap: float
    dropout: float
    query: Fill
    key: Fill
    value: Fill
    grad: Fill
    grad_lse: bool
    layout: str
    cross_check: str
    seed: int


@st.composite
def _params(draw: st.DrawFn) -> Params:
    dtype = draw(st.sampled_from(DTYPES))
    return Params(
        dtype,
        draw(st.sampled_from(HEADS)),
        draw(st.sampled_from(LENGTHS)),
        draw(st.sampled_from(KEYS)),
        draw(st.tuples(st.sampled_from(DEPTHS), st.sampled_from(DEPTHS))),
        draw(st.sampled_from(MASKS)),
        draw(st.sampled_from(SCALES)),
        draw(st.sampled_from([0.0, 0.0, 0.0, 3.0, 1e-3, 1e6])),
        draw(st.sampled_from(DROPOUTS)),
        draw(fills(dtype)),
        draw(fills(dtype)),
        draw(fills(dtype)),
        draw(fills(dtype)),
        draw(st.booleans()),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(CROSS_CHECKS)),
        draw(SEEDS),
    )


def build(p: Params) -> Case:
    """The tensors of a case."""
    rng = np.random.default_rng(p.seed)
    batch, heads, kv_heads = p.heads
    queries = p.queries * 8 if p.cross_check == "threads" else p.queries
    inputs: dict[str, Any] = {
        "query": make(rng, (batch, heads, queries, p.depths[0]), p.dtype, p.query, p.layout),
        "key": make(rng, (batch, kv_heads, p.keys, p.depths[0]), p.dtype, p.key, p.layout),
        "value": make(rng, (batch, kv_heads, p.keys, p.depths[1]), p.dtype, p.value, p.layout),
        "mask": _mask(rng, p, (batch, heads, queries, p.keys)),
    }
    incoming = {"output": make(rng, (batch, heads, queries, p.depths[1]), p.dtype, p.grad, p.layout)}
    if p.grad_lse:
        wide_dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        incoming["lse"] = make(rng, (batch, heads, queries), wide_dtype, p.grad._replace(spread="normal"))
    window = (int(rng.integers(-1, 6)), int(rng.integers(-1, 6))) if p.mask == "window" else None
    options = {
        "is_causal": p.mask == "causal", "scale": p.scale, "enable_gqa": heads != kv_heads, "softcap": p.softcap,
        "window": window, "dropout_p": p.dropout, "seed": p.seed,
    }  # fmt: skip
    wrt = ("query", "key", "value", *(["mask"] if p.mask.endswith(("bias", "row")) else []))
    return Case(CALL, inputs, options, ("output", "lse"), incoming, wrt)


def _mask(rng: np.random.Generator, p: Params, shape: tuple[int, int, int, int]) -> Tensor | None:
    """A bool mask or a bias; every fourth row of a full one is masked as a whole."""
    if p.mask in ("none", "causal", "window"):
        return None
    if p.mask == "all masked":
        return torch.zeros(shape[2:], dtype=torch.bool)
    shape = (1, 1, 1, shape[3]) if p.mask in ("key padding", "bias of one row") else shape
    seen = torch.from_numpy(rng.random(shape) > 0.3)
    if shape[2] > 1:
        seen[..., ::4, :] &= bool(rng.integers(2))
    if p.mask in ("bool", "key padding"):
        return seen
    dtype = torch.float32 if p.mask == "fp32 bias" and p.dtype != torch.float64 else p.dtype
    return make(rng, shape, dtype, Fill(special=str(rng.choice(["none", "lowest", "none"])))).masked_fill(
        ~seen, -torch.inf
    )


@dataclass
class Parts:
    """The inputs in the wide type, one key head a query head; without what is not finite, which the masks tell."""

    q: Array
    k: Array
    v: Array
    bias: Any
    seen: Array
    grad: Array
    grad_lse: Array


@lru_cache(maxsize=4)  # a case and its parts ask for the same
def _kept(p: float, seed: int, shape: tuple[int, int, int, int]) -> Array:
    """What dropout leaves of each weight, 0 or 1 / (1 - p), told by the op: uniform weights through an identity.

    It is a property of seed and position alone, as tests/python/test_attention_dropout.py shows.
    """
    batch, heads, queries, keys = shape
    if p == 0 or 0 in shape:
        return np.ones(shape)
    if p == 1:
        return np.zeros(shape)
    torch.manual_seed(seed)
    query, key = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, heads, keys, 1)
    identity = torch.eye(keys).expand(batch, heads, keys, keys)
    output = allfinite.scaled_dot_product_attention(query, key, identity, dropout_p=p)
    return np.where(output.numpy() > 0, 1 / (1 - p), 0.0)


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0)


# Tensors are packed times powers of two that their largest numbers ask for, so what is below this part of the largest
# (of the largest product, in gradients) may lose digits (docs/numerics.md, "Doubt").
FLOOR = 2.0**-100


def _unit(dtype: torch.dtype) -> float:
    """The part of the terms that an error may be."""
    return 2.0**-49 if dtype == torch.float64 else COLUMN_TERMS


class Problem:
    """A case in the wide type: value, terms, and what may or must not be finite, for every result."""

    def __init__(self, case: Case) -> None:
        dtype = case.inputs["query"].dtype
        self.case, self.dtype, self.kind = case, dtype, wide_type(dtype)
        self.unit = _unit(dtype)
        q, k, v = (wide(case.inputs[name]) for name in ("query", "key", "value"))
        self.group = q.shape[1] // k.shape[1]
        self.shape = (*q.shape[:3], k.shape[2])
        k, v = (np.repeat(t, self.group, 1) for t in (k, v))
        grad = wide(case.incoming["output"])
        lse = case.incoming.get("lse")
        grad_lse = np.zeros(q.shape[:3], self.kind) if lse is None else wide(lse, dtype)
        mask, options = case.inputs["mask"], case.options
        seen = attention_reference.visible(q.shape[2], k.shape[2], mask, options["is_causal"], options["window"])
        self.seen = np.broadcast_to(seen.numpy(), self.shape)
        bias = np.zeros((), self.kind)
        self.additive = mask is not None and mask.is_floating_point()
        if self.additive:
            bias = np.broadcast_to(wide(mask, dtype), self.shape)
        self._reach(q, k, v, bias, grad, grad_lse)
        self._solve(Parts(*(_finite(t) for t in (q, k, v, bias)), self.seen, _finite(grad), _finite(grad_lse)))

    def _reach(self, q: Array, k: Array, v: Array, bias: Array, grad: Array, grad_lse: Array) -> None:
        """Where a NaN or infinity takes part: F2."""
        bad_q, bad_k, bad_v, bad_grad = (~np.isfinite(t) for t in (q, k, v, grad))
        seen = self.seen
        pairs = bad_q.any(-1)[..., None] | bad_k.any(-1)[..., None, :] | ~np.isfinite(bias)
        rows = (seen & pairs).any(-1)
        self.bad_scores = rows
        self.bad_output = rows[..., None] | (seen.astype(np.float32) @ bad_v.astype(np.float32) > 0)
        back = bad_grad.any(-1)[..., None] | bad_v.any(-1)[..., None, :] | ~np.isfinite(grad_lse)[..., None]
        self.bad_rows = rows | (seen & back).any(-1)
        reached = seen & self.bad_rows[..., None]
        self.bad_keys = reached.any(-2)
        columns = np.swapaxes(seen, -1, -2).astype(np.float32) @ (rows[..., None] | bad_grad).astype(np.float32) > 0
        self.bad_values, self.bad_mask = columns, reached

    def _solve(self, p: Parts) -> None:
        """Results and terms; beside each term the part of it that rounded scores may move."""
        options, seen = self.case.options, p.seen
        scale = self.kind(p.q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"])
        kt, vt = np.swapaxes(p.k, -1, -2), np.swapaxes(p.v, -1, -2)
        qs, ks, vs, gs = (np.abs(t) for t in (p.q, p.k, p.v, p.grad))
        q_top, k_top, v_top, g_top, lse_top = (t.max(initial=0) for t in (qs, ks, vs, gs, np.abs(p.grad_lse)))
        kept = _kept(options["dropout_p"], options["seed"], self.shape).astype(self.kind)
        keep = kept.max(initial=1)
        ds_top = max(keep * g_top * v_top * vs.shape[-1], lse_top)
        raw, size = (p.q @ kt) * scale, (qs @ np.swapaxes(ks, -1, -2)) * np.abs(scale)
        raw_size = size
        self.beyond = (seen & (size >= 2.0**127)).any(-1)  # F1 promises nothing there
        slope = 1.0
        scores = raw
        if options["softcap"] > 0:
            bent = np.tanh(raw / options["softcap"])
            scores, slope = options["softcap"] * bent, 1 - bent * bent
        scores = np.where(seen, scores + p.bias, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.where(seen, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
        total = weights.sum(-1, keepdims=True)
        empty = total == 0
        weights = weights / np.where(empty, 1, total)
        self.lse = np.where(empty, -np.inf, np.log(total) + top)[..., 0]
        # A rounding of a score of size s moves it by s ulps, and its weight by the exponential of that, at most to 1.
        size = np.where(seen, size + np.abs(p.bias), 0).max(-1, keepdims=True, initial=0)
        moved = 1 + size + q_top * k_top * np.abs(scale) * FLOOR * qs.shape[-1]
        self.moved = moved[..., 0]
        shift = self.unit * moved
        raised = np.where(seen, np.exp(np.minimum(scores - np.where(np.isfinite(top), top, 0) + shift, 0)), 0)
        sure = weights + np.where(shift < 1, weights * np.expm1(np.minimum(shift, 1)), raised) / self.unit
        self.output, self.output_terms = (weights * kept) @ p.v, (sure * kept) @ vs + keep * v_top * FLOOR
        self.reach = keep * (np.where(seen[..., None], vs[..., None, :, :], 0).max(-2, initial=0) + v_top * FLOOR)
        dp, dp_size = (p.grad @ vt) * kept, (gs @ np.swapaxes(vs, -1, -2)) * kept
        mean, mean_size = (weights * dp).sum(-1, keepdims=True), (weights * dp_size).sum(-1, keepdims=True)
        ds = weights * (dp - mean + p.grad_lse[..., None])
        mean_moved = (sure * dp_size).sum(-1, keepdims=True)
        ds_size = sure * (dp_size + mean_size + self.unit * mean_moved + np.abs(p.grad_lse)[..., None])
        ds_size = ds_size + weights * mean_moved
        self.dmask, self.dmask_terms = ds, ds_size + ds_top * FLOOR
        ds = ds * slope
        if options["softcap"] > 0:  # a rounding of the score moves the slope, too
            ds_size = ds_size * (1 + raw_size / options["softcap"])
        self.dq, self.dq_terms = scale * ds @ p.k, np.abs(scale) * (ds_size @ ks + ds_top * k_top * FLOOR)
        ds, ds_size = np.swapaxes(ds, -1, -2), np.swapaxes(ds_size, -1, -2)
        self.dk, self.dk_terms = scale * ds @ p.q, np.abs(scale) * (ds_size @ qs + ds_top * q_top * FLOOR)
        wt, sure = (np.swapaxes(t * kept, -1, -2) for t in (weights, sure))
        self.dv, self.dv_terms = wt @ p.grad, sure @ gs + keep * g_top * FLOOR
        # F4 is shown where nothing is packed: small numbers beside a packed large one are subnormal or not by their dO.
        tops = (float(np.abs(t).max(initial=0)) for t in (p.q, p.k, p.v))
        plain = all(2.0**-40 <= top <= 2.0**40 for top in tops)
        self.linear = {} if plain else dict.fromkeys(("dquery", "dkey", "dvalue", "dmask"), False)
        # A subnormal dS times a large key is normal again with fewer digits; 24 bits above none of it shows.
        self.least = 0.0 if self.dtype == torch.float64 else 2.0**-102 * max(1, q_top, k_top) * max(1, np.abs(scale))
        # What is subnormal on the way is so times a key or query, and times the powers of two that packing has taken
        # out, for each row of a sum.
        small, large = sorted((q_top, k_top))
        out = max(1, large) * max(1, small * 2.0**-40) * max(1, v_top * 2.0**-40)
        self.lost = p.q.shape[-2] * self.group * out

    def exact(self) -> dict[str, Exact]:
        """All results: of key and value summed over the heads of a group, of the mask where it is broadcast."""
        rows, heads = self.beyond[..., None], self.beyond.any(-1)[..., None, None]
        result = {
            "output": _exact(self.output, self.output_terms, self.bad_output, rows),
            "lse": _exact(self.lse, self.moved, self.bad_scores, self.beyond),
            "dquery": _exact(self.dq, self.dq_terms, self.bad_rows[..., None], rows),
            "dkey": _exact(*self._grouped(self.dk, self.dk_terms, self.bad_keys[..., None], heads)),
            "dvalue": _exact(*self._grouped(self.dv, self.dv_terms, self.bad_values, heads)),
        }
        if self.additive:
            mask = self.case.inputs["mask"]
            axes = tuple(i for i, size in enumerate(mask.shape) if size != self.shape[i])
            value, terms = (t.sum(axes, keepdims=True) for t in (self.dmask, self.dmask_terms))
            bad = self.bad_mask.any(axes, keepdims=True) if axes else self.bad_mask
            result["dmask"] = _exact(value, terms, bad, self.beyond.any())
        return result

    def _grouped(self, value: Array, terms: Array, bad: Array, beyond: Array) -> tuple[Array, ...]:
        batch, heads = value.shape[:2]
        split = (batch, heads // self.group, self.group)
        parts = [
            np.broadcast_to(t, (*value.shape[:2], *t.shape[2:])).reshape(*split, *t.shape[2:]) for t in (bad, beyond)
        ]
        return (
            value.reshape(*split, *value.shape[2:]).sum(2), terms.reshape(*split, *value.shape[2:]).sum(2),
            parts[0].any(2), parts[1].any(2),
        )  # fmt: skip


def _exact(value: Array, terms: Array, bad: Array, may_fail: Any) -> Exact:
    return Exact(np.where(bad, np.nan, value), terms, may_fail=np.broadcast_to(may_fail, value.shape))


def verify(case: Case, p: Params, api: Any) -> dict[str, float]:
    """F1 to F5, F7 of one case."""
    got, rng = case.run(api), np.random.default_rng(p.seed)
    problem = Problem(case)
    shares = {}
    for name, exact in problem.exact().items():
        exact.slack = (2.0**-1070 if p.dtype == torch.float64 else 2.0**-149) * problem.lost
        shares[name] = _compare(name, got[name], exact, p.dtype, case)
    with_reach = Exact(problem.reach, problem.reach)
    _convex(got["output"], with_reach, problem.bad_output | problem.beyond[..., None], case)
    rows = problem.seen.shape[0] * problem.seen.shape[1] * problem.seen.shape[2]
    rows = rows if p.dropout == 0 else 0  # a row alone is another position, so another mask
    shared = Shared(
        case, got, rng, lambda row: _alone(case, problem, row), rows, lambda _: problem.linear, problem.least, _least
    )
    cross_check(p.cross_check, shared, api)
    return shares


def _least(case: Case) -> dict[str, float]:
    """F4 of dvalue: its rows of dO have one unit; what lies 2^-100 below the largest of them may lose digits."""
    if "output" not in case.incoming:
        return {}
    return {"dvalue": 2.0**-100 * float(np.abs(wide(case.incoming["output"])).max(initial=0))}


def _compare(name: str, actual: Tensor, exact: Exact, dtype: torch.dtype, case: Case) -> float:
    """F3 over the tensor: the error in L2 is at most one ulp of each number and 2^-21 of the terms.

    The terms count with what rounded scores move: the bound of 1.25 x fp32 maths is a statement about tensors
    large enough for both errors to be averages, which tests/python/test_attention_accuracy.py looks at.
    """
    unit = _unit(dtype)
    exact.terms = np.where(np.isfinite(exact.terms), exact.terms, 0)
    empty = name == "lse" and np.isneginf(exact.value)
    if np.any(empty):
        if not np.isneginf(wide(actual)[empty]).all():
            raise Violation(f"F7: {name}{rules.at(empty)} of an empty row is not -inf", case)
        exact.value = np.where(empty, 0, exact.value)
        actual = actual.masked_fill(torch.from_numpy(empty), 0)
    got, both = rules.infinities(name, actual, exact, unit * exact.terms + exact.slack, case)
    bound = rules.ulp(exact.value, actual.dtype) + unit * exact.terms + exact.slack
    error, allowed = (float(np.sqrt(np.square(np.where(both, t, 0)).sum())) for t in (got - exact.value, bound))
    share = error / allowed if error else 0.0
    if share > 1:
        worst = np.where(both, np.abs(got - exact.value) / bound, 0)
        i = worst == worst.max()
        raise Violation(
            f"F3: {name} is off by {error:.4g} in L2, {share:.4g} of the bound; most at {rules.at(i)}: "
            f"{got[i][0]!s}, exact {exact.value[i][0]!s}",
            case,
        )
    return share


def _convex(output: Tensor, reach: Exact, skip: Array, case: Case) -> None:
    """F1: an output is a mean of the values its row sees: never beyond the largest of them, whatever the scores."""
    size = np.abs(wide(output))
    wrong = ~skip & np.isfinite(size) & (size > reach.value * (1 + 2.0**-18) + rules.ulp(reach.value, output.dtype))
    if wrong.any():
        raise Violation(
            f"F1: output{rules.at(wrong)} is {size[wrong][0]!s}, its values at most {reach.value[wrong][0]!s}", case
        )


def _alone(case: Case, problem: Problem, row: int) -> tuple[Case, dict[str, Any]]:
    """One query of one head by itself; what causal and window say becomes a mask."""
    batch, heads, queries, _ = problem.shape
    b, h, i = np.unravel_index(row, (batch, heads, queries))
    kv = int(h) // problem.group
    seen = torch.from_numpy(problem.seen[b, h, i : i + 1].copy())
    mask = case.inputs["mask"]
    if problem.additive:
        bias = mask.detach().expand(problem.shape)[b, h, i : i + 1]
        seen = bias.masked_fill(~seen, -torch.inf)
    inputs = {
        "query": case.inputs["query"][b : b + 1, h : h + 1, i : i + 1].clone(), "mask": seen[None, None],
        **{name: case.inputs[name][b : b + 1, kv : kv + 1].clone() for name in ("key", "value")},
    }  # fmt: skip
    incoming = {name: t[b : b + 1, h : h + 1, i : i + 1].clone() for name, t in case.incoming.items()}
    part = change(case, inputs, incoming)
    part.options = {**case.options, "is_causal": False, "window": None, "enable_gqa": False}
    place = (slice(int(b), int(b) + 1), slice(int(h), int(h) + 1), slice(int(i), int(i) + 1))
    return part, {"output": place, "lse": place, "dquery": place}


def parts(case: Case) -> Iterator[Case]:
    """Each query row with its head."""
    problem = Problem(case)
    rows = int(np.prod(problem.shape[:3]))
    return (_alone(case, problem, row)[0] for row in range(rows) if rows > 1)


ATTENTION = OpContract(
    "scaled_dot_product_attention", _params(), build, verify, parts,
    dimensions=("dtype", "mask", "dropout", "query", "key", "value", "grad", "softcap", "layout", "cross_check"),
)  # fmt: skip
