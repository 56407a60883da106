"""Runs cases of one op: Hypothesis draws and shrinks, the tally counts what was seen and how near the bounds came."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase

from contract.base import OpContract
from contract.numbers import Fill
from contract.rules import Violation
from contract.simplify import simplify

# Hypothesis keeps every example of a run in a tree: batches bound its memory, and are what processes share.
BATCH = 2500


@dataclass
class Tally:
    """What the cases of one op were.

    Attributes:
        cases: how many.
        kinds: how often each value of each dimension came up.
        combinations: the distinct combinations of them.
        worst: per result and dtype the largest error in units of its bound, and the case.
        failures: reports of what did not hold, each a few lines of Python.
    """

    op: str
    cases: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    combinations: set[tuple[str, ...]] = field(default_factory=set)
    worst: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, contract: OpContract, params: Any, shares: dict[str, float]) -> None:
        """One case that held."""
        self.cases += 1
        kinds = tuple(_kind(getattr(params, name)) for name in contract.dimensions)
        self.kinds.update(zip(contract.dimensions, kinds, strict=True))
        self.combinations.add(kinds)
        dtype = _kind(getattr(params, "dtype", ""))
        for name, share in shares.items():
            if share > self.worst.get((name, dtype), (-1.0, ""))[0]:
                self.worst[name, dtype] = (share, repr(params))

    def merge(self, other: "Tally") -> None:
        """Adds what another process saw."""
        self.cases += other.cases
        self.kinds += other.kinds
        self.combinations |= other.combinations
        self.failures += other.failures
        for key, value in other.worst.items():
            self.worst[key] = max(value, self.worst.get(key, value))


def _kind(value: Any) -> str:
    """How the summary names a value: a fill by its special (or else its spread)."""
    if isinstance(value, Fill):
        return value.special if value.special != "none" else value.spread
    return str(value).removeprefix("torch.")


def batch_seed(seed: int, op: str, batch: int) -> int:
    """A seed for each batch of each op, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {op} {batch}".encode()).digest()[:6], "big")


def run_batch(contract: OpContract, seed: int, batch: int, cases: int, api: Any) -> Tally:
    """Runs ``cases`` examples; of a failure the smallest that shows it is reported, and the batch ends."""
    tally = Tally(contract.name)
    failure: list[tuple[Any, Violation]] = []

    @hypothesis.seed(batch_seed(seed, contract.name, batch))
    @hypothesis.settings(
        max_examples=cases, database=None, deadline=None, phases=(Phase.generate, Phase.shrink), print_blob=False,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(contract.params)
    def holds(params: Any) -> None:
        try:
            shares = contract.check(params, api)
        except Violation as violation:
            failure[:] = [(params, violation)]
            raise
        if not failure:  # shrinking is not counted
            tally.add(contract, params, shares)

    with np.errstate(all="ignore"):
        try:
            holds()
        except Violation:
            params, violation = failure[0]
            violation = simplify(contract, params, violation, api)
            where = f"# {contract.name}, seed {seed}, batch {batch}: {params!r}\n"
            tally.failures.append(where + violation.report())
        except hypothesis.errors.Flaky:
            params, violation = failure[0]
            where = f"# {contract.name}, seed {seed}, batch {batch}, not every time: {params!r}\n"
            tally.failures.append(where + violation.report())
    return tally
