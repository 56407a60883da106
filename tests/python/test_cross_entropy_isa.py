"""Every instruction set's cross_entropy kernels keep the contract, not only the one this processor would choose."""

import pytest

from support.isa import other_capabilities, run_pytest_with

NUMERIC = ("test_cross_entropy_accuracy.py", "test_cross_entropy_range.py", "test_cross_entropy_invariance.py")


@pytest.mark.parametrize("capability", other_capabilities())
def test_contract_with_each_instruction_set(capability):
    """F1 to F7: vector widths, tails and conversions differ between the variants, the rules do not."""
    run_pytest_with(capability, *NUMERIC)
