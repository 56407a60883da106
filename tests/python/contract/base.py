"""What the engine wants of an op, and the checks that every differentiable op shares (F4, F5, layouts)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from contract import rules
from contract.case import Case, change

THREADS = (1, 2, 5)
# One more run of each case looks at one of these; the larger tensors of "threads" cost most.
CROSS_CHECKS = ("row alone", "loss scale", "layout", "one gradient") * 8 + ("threads",)


@dataclass(frozen=True)
class OpContract:
    """One op under the contract.

    Attributes:
        name: of the op.
        params: draws what a case is made of: a NamedTuple of dtypes, sizes, fills, options and a seed.
        build: the case of such a tuple.
        verify: runs a case with the module given and raises ``rules.Violation``, or returns for each result the error
            in units of its bound.
        parts: smaller cases within a case.
        share: how many cases it gets beside the other ops.
        dimensions: fields of the tuple that the summary counts.
    """

    name: str
    params: st.SearchStrategy[Any]
    build: Callable[[Any], Case]
    verify: Callable[[Case, Any, Any], dict[str, float]]
    parts: Callable[[Case], Iterator[Case]] | None = None
    share: float = 1.0
    dimensions: tuple[str, ...] = ("dtype",)

    def check(self, params: Any, api: Any) -> dict[str, float]:
        """One case."""
        return self.try_case(self.build(params), params, api)

    def try_case(self, case: Case, params: Any, api: Any) -> dict[str, float]:
        """``verify``, where an error that the op raises is a violation, too: every case is a call that it takes."""
        try:
            return self.verify(case, params, api)
        except RuntimeError as error:
            raise rules.Violation(f"F6: the call raises {error!s}", case) from error


class Shared(NamedTuple):
    """What the cross checks need to know of a case."""

    case: Case
    results: dict[str, Tensor]
    rng: np.random.Generator
    alone: Callable[[int], tuple[Case, dict[str, Any]]] | None = None  # row -> its case, and where its results lie
    rows: int = 0
    linear: Callable[[Case], dict[str, Any]] = lambda case: {}  # where F4 holds, for the results where not everywhere
    least: float = 0.0  # and from which magnitude on, beside the smallest normal number
    least_of: Callable[[Case], dict[str, float]] = lambda case: {}  # the same for some results of a case


def cross_check(kind: str, shared: Shared, api: object) -> None:
    """One more run that must not change a bit (or, for the loss scale, a mantissa)."""
    case, got = shared.case, shared.results
    if kind == "row alone" and shared.alone is not None and shared.rows:
        part, places = shared.alone(int(shared.rng.integers(shared.rows)))
        results = part.run(api)
        for name, place in places.items():
            rules.same_bits("F5, a row alone", name, got[name][place], results[name], case, part)
    elif kind == "loss scale" and case.incoming:
        base, scaled, k = rules.scalable(shared.rng, case)
        first, second = base.run(api), scaled.run(api)
        where = shared.linear(base if k > 0 else scaled)
        least = shared.least_of(scaled if k > 0 else base)
        for name in ("d" + name for name in case.wrt):
            lowest = max(shared.least, least.get(name, 0.0))
            rules.linear(name, first[name], second[name], k, where.get(name, True), lowest, base, scaled)
    elif kind == "layout":
        plain = change(
            case,
            {
                n: t.clone(memory_format=torch.contiguous_format)
                for n, t in case.inputs.items()
                if isinstance(t, Tensor)
            },
            {n: t.clone(memory_format=torch.contiguous_format) for n, t in case.incoming.items()},
        )
        rules.same_results("F6, contiguous and not", got, plain.run(api), case, plain)
    elif kind == "one gradient" and case.wrt:
        name = case.wrt[int(shared.rng.integers(len(case.wrt)))]
        part = change(case)
        part.wrt = (name,)
        results = part.run(api)
        rules.same_bits("F5, this gradient alone", "d" + name, got["d" + name], results["d" + name], case, part)
    elif kind == "threads":
        threads(case, got, lambda: case.run(api))


def threads(case: Case, got: dict[str, Tensor], run: Callable[[], dict[str, Tensor]]) -> None:
    """F5: the same bits with 1, 2 and 5 threads."""
    before = torch.get_num_threads()
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            rules.same_results(f"F5, {before} and {count} threads", got, run(), case)
    finally:
        torch.set_num_threads(before)
