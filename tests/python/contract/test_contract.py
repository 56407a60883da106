"""A few thousand random cases of every op, from the seed in pytest's header; ``make fuzz`` runs a million."""

import pytest

import allfinite
from contract.base import OpContract
from contract.engine import run_batch
from contract.registry import CONTRACTS
from support.contract_seed import SEED

CASES = 300


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_contract(contract: OpContract) -> None:
    """F1 to F7: an input of any dtype, stride, magnitude or special value that breaks a rule."""
    tally = run_batch(contract, SEED, 0, CASES, allfinite)
    assert not tally.failures, "\n" + "\n".join(tally.failures)
    assert tally.cases >= CASES * 0.9  # Hypothesis may run out of different cases, not more
