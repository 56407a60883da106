"""A sanitized process must report the faults of planted_faults.cpp, on tensors of torch: else its silence says nothing.

Part of ``make sanitize`` (scripts/run_sanitized.py sets the environment); ``make test`` does not collect it.
"""

import ctypes
import os
from pathlib import Path

import pytest
import torch

import allfinite._C

ISA = os.environ["ALLFINITE_CPU_CAPABILITY"]
LIBRARY = ctypes.CDLL(str(Path(allfinite.__file__).parent / "lib" / "liballfinite.so"))
COUNT = 67  # floats: whole vectors and a part, in every width
FAULTS = {
    "read_past_the_end": "heap-buffer-overflow",
    "write_past_the_end": "heap-buffer-overflow",
    "read_before_the_start": "heap-buffer-overflow",
    "signed_overflow": "signed integer overflow",
    "misaligned_read": "load of misaligned address",
    "shift_too_far": "shift exponent 33 is too large",
    "float_beyond_integer": "is outside the range of representable values",
}


def _call(fault: str, right: bool, log: Path) -> tuple[int, str]:
    """Calls the fault in a child. Returns the child's status (0: it ran to the end) and what the sanitizer wrote."""
    data = torch.ones(COUNT)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        function = LIBRARY[f"planted_{ISA}"]
        function.restype = ctypes.c_bool
        known = function(fault.encode(), ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(COUNT), ctypes.c_bool(right))
        os._exit(0 if known else 1)
    _, status = os.waitpid(child, 0)
    return status, log.read_text()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_reported(fault, tmp_path):
    """Guards the flags, the preloaded runtime, its sight of torch's allocations, and which library was loaded."""
    status, report = _call(fault, right=False, log=tmp_path / "log")
    assert FAULTS[fault] in report
    assert status != 0


@pytest.mark.parametrize("fault", FAULTS)
def test_twin_without_fault_passes(fault, tmp_path):
    """Guards the test above: it is the fault that is reported, not the call."""
    assert _call(fault, right=True, log=tmp_path / "log") == (0, "")


def test_the_variant_runs():
    """Guards against running another instruction set than the one that is reported."""
    assert allfinite._C.cpu_capability() == ISA
