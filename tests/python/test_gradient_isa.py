"""Every instruction set's gradient kernels keep the contract, not only the one that this processor would choose."""

import pytest

from support.isa import other_capabilities, run_pytest_with


@pytest.mark.parametrize("capability", other_capabilities())
def test_contract_with_each_instruction_set(capability: str) -> None:
    """F1 to F5: loads, stores, tails and integer comparisons differ between the variants, the rules do not."""
    run_pytest_with(capability, "test_unscale_and_check.py", "test_grad_stats.py", "-k", "f1 or f2 or f3 or f4 or f5")
    run_pytest_with(capability, "test_clip_grad.py")
