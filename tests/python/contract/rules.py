"""The checks of F1 to F5 on numpy arrays; each raises ``Violation`` or tells how near to the bound the result came."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract.case import Case, change
from contract.numbers import Array
from support.bounds import COLUMN_TERMS, OUTPUT_TERMS, SIXTEEN_BIT


class Violation(AssertionError):
    """A rule does not hold: what was expected and what came, and the calls that show it."""

    def __init__(self, text: str, *cases: Case) -> None:
        super().__init__(text)
        self.text, self.cases = text, cases

    def report(self) -> str:
        """A few lines of Python that reproduce it, the expectation as the last comment."""
        parts = [case.source() for case in self.cases]
        return "\n# and compared with it:\n".join(parts) + "\n" + "\n".join(f"# {x}" for x in self.text.splitlines())


@dataclass
class Exact:
    """A result in float64 (longdouble for float64 ops).

    Attributes:
        value: NaN or infinite where a NaN or infinity of the inputs takes part.
        terms: the sum of the absolute values that are added up.
        slack: absolute, what the contract excuses beyond its bound.
        may_fail: elements that may be NaN although ``value`` is finite (outside the range that F1 promises, or in a row
            in which a NaN or infinity takes part with weight 0).
    """

    value: Array
    terms: Any = 0.0
    slack: Any = 0.0
    may_fail: Any = False


def wide_type(dtype: torch.dtype) -> type[Any]:
    """The numpy type in which an op on ``dtype`` is exact enough: float64, for float64 x86's longdouble."""
    return np.longdouble if dtype == torch.float64 else np.float64


def wide(t: Tensor, dtype: torch.dtype | None = None) -> Array:
    """A tensor's numbers in the wide type of ``dtype`` (default: its own)."""
    return t.detach().double().numpy().astype(wide_type(dtype or t.dtype))


@cache
def _limits(dtype: torch.dtype) -> tuple[float, float, float, float]:
    info = torch.finfo(dtype)
    half_ulp = float(np.ldexp(info.eps, int(np.frexp(info.max)[1]) - 2))  # of the largest number
    return info.tiny, info.max, info.eps, half_ulp


def ulp(value: Array, dtype: torch.dtype) -> Array:
    """Distance between neighbours of ``dtype`` at ``value``; subnormals included."""
    tiny, largest, eps, _ = _limits(dtype)
    _, exponent = np.frexp(np.clip(np.abs(value), tiny, largest))
    return np.ldexp(value.dtype.type(eps), exponent - 1)


def infinities(name: str, actual: Tensor, exact: Exact, noise: Array, case: Case) -> tuple[Array, Array]:
    """F1 and F2: NaN and infinity exactly where they belong. Returns the numbers, and where both sides are finite.

    Args:
        name: of the result.
        actual: the op's result, shaped as ``exact.value``.
        exact: what is right.
        noise: how much fp32 arithmetic may move the value before it is rounded: decides whether infinity is in order.
        case: for the message.
    """
    if tuple(actual.shape) != exact.value.shape:
        raise Violation(f"F6: {name} has shape {tuple(actual.shape)}, expected {exact.value.shape}", case)
    got, value = actual.detach().double().numpy().astype(exact.value.dtype), exact.value
    _, largest, _, half = _limits(actual.dtype)
    got_finite, finite = np.isfinite(got), np.isfinite(value)
    limit = value.dtype.type(largest)  # subtracted first, because largest + half would round
    must_overflow = finite & (np.abs(value) - limit - noise >= half)
    in_order = np.isinf(got) & (np.sign(got) * value - limit + noise >= half)
    hidden = ~finite & got_finite
    wrong = ~finite & ~np.isnan(value) & ~np.isnan(got) & (got != value)
    spread = finite & ~got_finite & ~in_order & ~np.broadcast_to(exact.may_fail, value.shape)
    saturated = must_overflow & got_finite
    for bad, rule, what in (
        (hidden, "F2", "hides what is not finite"),
        (wrong, "F2", "is the wrong infinity"),
        (spread, "F1/F2", "is not finite where the exact result is"),
        (saturated, "F1", "is finite where the exact result is beyond the range"),
    ):
        if bad.any():
            raise Violation(f"{rule}: {name}{at(bad)} {what}: got {got[bad][0]!s}, exact {value[bad][0]!s}", case)
    return got, finite & got_finite & ~must_overflow


def within_ulp(name: str, actual: Tensor, exact: Exact, factor: float, case: Case) -> float:
    """F1, F2, F3: |actual - exact| <= 1 ulp + factor * terms (+ slack) elementwise. The largest share of the bound."""
    noise = factor * exact.terms + exact.slack
    got, both = infinities(name, actual, exact, noise, case)
    bound = ulp(exact.value, actual.dtype) + noise
    share = np.where(both, np.abs(got - exact.value) / bound, 0)
    worst = float(share.max(initial=0))
    if worst > 1:
        i = share == share.max()
        raise Violation(
            f"F3: {name}{at(i)} is {got[i][0]!r}, exact {exact.value[i][0]!r}: "
            f"{worst:.4g} of the bound {np.broadcast_to(bound, i.shape)[i][0]!s}",
            case,
        )
    return worst


# F3's L2 bounds speak of averages of roundings. Where fewer numbers than this carry the norm (or a sum that cancels is
# alone in its row), roundings add up to at most some eight ulps of fp32: 2^-21 of the terms.
ENOUGH = 64


def within_l2(name: str, actual: Tensor, exact: Exact, limit: float, case: Case, terms_count: bool) -> float:
    """F1, F2, F3: ||error|| <= limit * (||exact|| (+ ||terms||)) + slack over the tensor, where that is an average.

    Row by row (F5: a row is a tensor of its own) the bound is 2^-21 of the terms (fp64: ``limit`` of them).
    """
    got, both = infinities(name, actual, exact, OUTPUT_TERMS * exact.terms + exact.slack, case)
    squares = [
        np.square(np.where(both, t, 0)).sum(-1) for t in (got - exact.value, exact.value, exact.terms, exact.slack)
    ]
    error, value, terms, slack = (np.sqrt(t) for t in squares)
    bound = (COLUMN_TERMS if actual.dtype == torch.float32 else limit) * terms + slack
    share = np.where(error == 0, 0, error / np.where(bound == 0, np.finfo(np.float64).tiny, bound))
    row_share = float(share.max(initial=0))
    if row_share > 1:
        row = int(share.argmax())
        numbers = [float(x) for x in exact.value.reshape(-1, exact.value.shape[-1])[row]]
        raise Violation(
            f"F3: row {row} of {name} is off by {float(error.flat[row]):.4g} in L2, {row_share:.4g} of the bound; "
            f"exact {numbers!r}",
            case,
        )
    error, value, terms, slack = (np.sqrt(t.sum()) for t in squares)
    if _carriers(exact.terms, both) < ENOUGH or (not terms_count and terms > 2 * value):
        return row_share
    tensor_share = float(error / (limit * (value + terms * terms_count) + slack))
    if tensor_share > 1:
        raise Violation(f"F3: {name} is off by {float(error):.4g} in L2, {tensor_share:.4g} of the bound", case)
    return max(row_share, tensor_share)


def _carriers(terms: Array, both: Array) -> float:
    """How many numbers carry the L2 norm: n for n equal ones, 1 where one is far larger than the others."""
    square = np.square(np.where(both, terms, 0))
    largest = square.max(initial=0)
    if not largest or not np.isfinite(largest):
        return 0.0
    square = square / largest
    return float(square.sum() ** 2 / np.square(square).sum())


def at(bad: Array) -> str:
    """The first marked place, as an index."""
    return str([int(i) for i in np.argwhere(bad)[0]]) if bad.ndim else ""


def same_bits(rule: str, name: str, first: Tensor, second: Tensor, *cases: Case) -> None:
    """Equal bit by bit, but for the payload of a NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        raise Violation(f"{rule}: {name} is {first.dtype} {first.shape} and {second.dtype} {second.shape}", *cases)
    a, b = first.double().numpy(), second.double().numpy()
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
    if not same.all():
        raise Violation(
            f"{rule}: {name}{at(~same)} is {a[~same][0]!r} in the one and {b[~same][0]!r} in the other", *cases
        )


def scalable(rng: np.random.Generator, case: Case) -> tuple[Case, Case, int]:
    """F4: the case with incoming gradients that the rule speaks of, the same with 2^k times them, and k.

    What would leave [2^-60, 2^60] (fp16: its normal numbers), before or after, becomes 0.
    """
    half = any(t.dtype == torch.float16 for t in case.incoming.values())
    k = int(rng.integers(-14, 15)) if half else int(rng.integers(-60, 61))
    base, scaled = {}, {}
    for name, t in case.incoming.items():
        low, high = (2.0**-14, 65504.0) if t.dtype == torch.float16 else (2.0**-60, 2.0**60)
        size = t.double().abs()
        inside = (size >= max(low, low * 2.0**-k)) & (size <= min(high, high * 2.0**-k))
        base[name] = torch.where(inside, t, 0)
        scaled[name] = torch.ldexp(base[name], torch.tensor(k))
    return change(case, incoming=base), change(case, incoming=scaled), k


def linear(
    name: str, base: Tensor, scaled: Tensor, k: int, where: Any, least: float, base_case: Case, scaled_case: Case
) -> None:
    """F4: ``scaled`` is 2^k times ``base`` bit for bit, wherever both are normal and finite.

    And where ``where`` holds and both are beyond ``least``: what an op excuses.
    """
    least = max(least, _limits(base.dtype)[0])
    a, b = wide(base), wide(scaled)
    normal = np.isfinite(a) & np.isfinite(b) & (np.abs(a) > least) & (np.abs(b) > least)  # equal: perhaps rounded up
    wrong = normal & where & (np.ldexp(a, k) != b)
    if wrong.any():
        raise Violation(
            f"F4: {name}{at(wrong)} is {a[wrong][0]!s}, and {b[wrong][0]!s} with the gradient times 2^{k}",
            base_case,
            scaled_case,
        )


def same_results(rule: str, first: dict[str, Tensor], second: dict[str, Tensor], *cases: Case) -> None:
    """``same_bits`` for every result."""
    for name, value in first.items():
        same_bits(rule, name, value, second[name], *cases)


def is_16_bit(dtype: torch.dtype) -> bool:
    return dtype in SIXTEEN_BIT
