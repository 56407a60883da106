"""Every instruction set's kernels keep the contract of rms_norm."""

import pytest

from support.isa import other_capabilities, run_pytest_with

NUMERIC = (
    "test_rms_norm_accuracy.py",
    "test_rms_norm_range.py",
    "test_rms_norm_invariance.py",
)


@pytest.mark.parametrize("capability", other_capabilities())
def test_contract_with_each_instruction_set(capability):
    """F1 to F7: vector widths, tails and conversions differ between the variants, the rules do not."""
    run_pytest_with(capability, *NUMERIC)
