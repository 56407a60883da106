"""Every instruction set's layer_norm kernels keep the contract, not only the one that this processor would choose."""

import pytest

from support.isa import other_capabilities, run_pytest_with

NUMERIC = (
    "test_layer_norm_accuracy.py",
    "test_layer_norm_range.py",
    "test_layer_norm_invariance.py",
    "test_norm_places.py",
)


@pytest.mark.parametrize("capability", other_capabilities())
def test_contract_with_each_instruction_set(capability):
    """F1 to F7: vector widths, tails and conversions differ between the variants, the rules do not."""
    run_pytest_with(capability, *NUMERIC)


def test_unknown_capability_is_an_error():
    """A misspelt ALLFINITE_CPU_CAPABILITY must not fall back in silence: the tests above would prove nothing."""
    with pytest.raises(AssertionError, match="expected ALLFINITE_CPU_CAPABILITY to be one of baseline"):
        run_pytest_with("avx1024", "test_layer_norm_isa.py")
