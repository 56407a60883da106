"""The machine and the versions that a measurement belongs to; also what `python -m allfinite info` prints."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import allfinite
from allfinite import _C, _build_info


def environment() -> dict[str, Any]:
    """Versions, processor and devices, as JSON values."""
    return {
        "allfinite": allfinite.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_built": _build_info.CUDA_BUILT,
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": cores(),
        "cpu_capability": _C.cpu_capability(),
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """Name of the processor as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
