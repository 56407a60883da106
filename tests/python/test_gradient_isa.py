"""The gradient ops on every instruction set that is built and that this processor has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("capability", ["baseline", "avx2", "avx512"])
def test_gradient_ops_are_right_on(capability: str) -> None:
    """Guards each variant's loads, stores, tails and integer comparisons; the machine picks one and hides the rest."""
    path = os.pathsep.join([str(HERE), *sys.path])
    run = subprocess.run(
        [sys.executable, "-m", "support.gradient_isa_check"],
        env={**os.environ, "ALLFINITE_CPU_CAPABILITY": capability, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ALLFINITE_CPU_CAPABILITY" in run.stderr:
        pytest.skip(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stderr
