"""What a process of ``make fuzz`` is asked to do (by name: contracts do not travel between processes)."""

import allfinite
from contract.engine import Tally, run_batch
from contract.registry import CONTRACTS

BY_NAME = {contract.name: contract for contract in CONTRACTS}


def run_named(op: str, seed: int, batch: int, cases: int) -> Tally:
    """``run_batch`` of one op of the registry."""
    return run_batch(BY_NAME[op], seed, batch, cases, allfinite)
