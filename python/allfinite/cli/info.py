"""`python -m allfinite info`: what this installation is and can do."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import torch

import allfinite
from allfinite import _C, _build_info

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subcommands: Subcommands) -> None:
    """Adds the subcommand to a parser."""
    parser = subcommands.add_parser(
        "info", help="print versions, what was built, and which kernels run here", description=__doc__
    )
    parser.set_defaults(run=run)


def run(_parsed: argparse.Namespace) -> int:
    """Prints one fact a line and returns 0; 2 where ALLFINITE_CPU_CAPABILITY names what is not there."""
    try:
        found = facts()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    for name, fact in found.items():
        print(f"{name:<16} {fact}")
    return 0


def facts() -> dict[str, str]:
    """Names and values, as printed."""
    return {
        "AllFinite": allfinite.__version__,
        "torch": f"{torch.__version__} (built for {_build_info.TORCH_VERSION})",
        "torch's CUDA": torch.version.cuda or "none",
        "CUDA half": _cuda_half(),
        "CUDA devices": _devices(),
        "CPU kernels": f"{_C.cpu_capability()} (built: {', '.join(_build_info.CPU_CAPABILITIES)})",
        "threads": str(torch.get_num_threads()),
        "compiler": _build_info.COMPILER,
    }


def _cuda_half() -> str:
    if _build_info.CUDA_BUILT:
        return f"built for {', '.join(f'sm_{arch}' for arch in _build_info.CUDA_ARCHITECTURES.split(';'))}"
    return f"left out: {_build_info.CUDA_REASON}"


def _devices() -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "none"
