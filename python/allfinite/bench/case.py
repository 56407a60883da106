"""What is timed, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]

FORWARD = "forward"
BOTH = "forward+backward"
BYTES = "GB/s"
FLOPS = "GFLOP/s"


@dataclass(frozen=True)
class Case:
    """Two calls with the same outcome.

    Attributes:
        op: name of the op.
        family: "norm", "rms_norm", "softmax", "cross_entropy", "attention", "masked attention", "large gradients",
            "small gradients" or "loss scale": what a goal speaks of.
        direction: ``FORWARD`` or ``BOTH``.
        dtype: of the large tensors.
        shape: of them, as text; with the options that matter.
        ours: a call of this library.
        torch: the same by torch's own ops.
        work: bytes or flops that the floor counts.
        unit: ``BYTES`` or ``FLOPS``.
    """

    op: str
    family: str
    direction: str
    dtype: torch.dtype
    shape: str
    ours: Call
    torch: Call
    work: float
    unit: str = BYTES


@dataclass(frozen=True)
class Cell:
    """A measured case.

    Attributes:
        ours_ms, torch_ms: medians, in milliseconds.
        ratio: torch_ms / ours_ms.
        work: bytes or flops.
        rate: of ours, in ``unit``.
        share: ``rate`` as part of what this machine was measured to do: a copy of as many bytes, or a product of fp32
            matrices.
    """

    op: str
    family: str
    direction: str
    dtype: str
    shape: str
    threads: int
    ours_ms: float
    torch_ms: float
    ratio: float
    work: float
    rate: float
    unit: str
    share: float
