"""Running tests with each instruction set that the CPU kernels are compiled for."""

import os
import subprocess
import sys
from pathlib import Path

import allfinite._C

_ALL = ("baseline", "avx2", "avx512")
TESTS = Path(__file__).parents[1]


def other_capabilities() -> tuple[str, ...]:
    """The instruction sets of this processor that the running process does not use."""
    if os.environ.get("ALLFINITE_CPU_CAPABILITY"):
        return ()  # already forced: the variants were chosen by whoever started this process
    current = allfinite._C.cpu_capability()
    return tuple(name for name in _ALL[: _ALL.index(current) + 1] if name != current)


def run_pytest_with(capability: str, *files: str, timeout: int = 300) -> None:
    """Runs test files of this directory in a process whose kernels use ``capability``; asserts that they pass.

    Args:
        capability: 'baseline', 'avx2' or 'avx512'.
        files: names relative to tests/python; pytest options may follow.
        timeout: seconds.
    """
    script = (
        "import sys, pytest, allfinite._C\n"
        f"assert allfinite._C.cpu_capability() == {capability!r}\n"
        "sys.exit(pytest.main(['-q', '-x', '--no-header', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    arguments = [str(TESTS / f) if f.endswith(".py") else f for f in files]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "ALLFINITE_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=TESTS,
    )
    assert result.returncode == 0, f"with {capability}:\n{result.stdout[-4000:]}\n{result.stderr[-2000:]}"
