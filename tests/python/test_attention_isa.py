"""Every instruction set's attention kernels keep the contract, not only the one that this processor would choose."""

import pytest

from support.isa import other_capabilities, run_pytest_with

NUMERIC = (
    "test_attention_accuracy.py",
    "test_attention_range.py",
    "test_attention_nan.py",
    "test_attention_invariance.py",
)


@pytest.mark.parametrize("capability", other_capabilities())
def test_contract_with_each_instruction_set(capability):
    """F1 to F5: register blocks, vector widths and fused products differ between the variants, the rules do not."""
    run_pytest_with(capability, *NUMERIC)
