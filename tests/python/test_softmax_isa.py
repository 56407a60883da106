"""Every instruction set's softmax kernels keep the contract, not only the one that this processor would choose."""

import pytest

from support.isa import other_capabilities, run_pytest_with

NUMERIC = ("test_softmax_accuracy.py", "test_softmax_range.py", "test_softmax_invariance.py", "test_softmax_shapes.py")


@pytest.mark.parametrize("capability", other_capabilities())
def test_contract_with_each_instruction_set(capability):
    """F1 to F7: vector widths, tails and conversions differ between the variants, the rules do not."""
    run_pytest_with(capability, *NUMERIC)
