"""Alternating timings, and what the machine can do at best.

Alternation cancels what changes slowly on a machine (clocks, neighbours). glibc gives large blocks back to the kernel
at once, so that each large output would be paid for in page faults; ``keep_memory`` stops that for both sides.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time

import torch

from allfinite.bench.case import FLOPS, Call, Case, Cell

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SAMPLE_SECONDS = 200e-6  # a shorter call is repeated within one sample, so that the clock's own cost vanishes


def keep_memory() -> bool:
    """Lets the allocator keep freed blocks of any size; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    largest = 2**31 - 1
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, largest) and mallopt(_M_TRIM_THRESHOLD, largest))


def _seconds(call: Call, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def alternate(first: Call, second: Call, budget: float) -> tuple[float, float]:
    """Median seconds of two calls that take turns; about ``budget`` seconds for both, 5 to 100 samples of each."""
    for _ in range(2):
        first()
        second()
    once = max(_seconds(first, 1), 1e-7), max(_seconds(second, 1), 1e-7)
    times = [max(1, round(_SAMPLE_SECONDS / seconds)) for seconds in once]
    samples = min(100, max(5, int(budget / (once[0] * times[0] + once[1] * times[1]))))
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(samples):
        taken[0].append(_seconds(first, times[0]))
        taken[1].append(_seconds(second, times[1]))
    return statistics.median(taken[0]), statistics.median(taken[1])


@functools.cache
def copy_rate(bytes_moved: int, threads: int) -> float:
    """GB/s, read and written together, of a copy that moves so many bytes: in a cache or in memory, as the size has it.

    Args:
        bytes_moved: a power of two, so that sizes that are alike share one measurement.
        threads: torch's number of threads at the time of the call, by which the result is remembered.
    """
    source = torch.zeros(max(bytes_moved // 8, 1))
    target = torch.empty_like(source)
    seconds, _ = alternate(lambda: target.copy_(source), lambda: None, 0.2)
    return 8 * source.numel() / seconds / 1e9


@functools.cache
def product_rate(threads: int) -> float:
    """GFLOP/s of a product of two 1024 x 1024 fp32 matrices with the present number of threads."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds, _ = alternate(lambda: a @ b, lambda: None, 0.5)
    return 2 * 1024**3 / seconds / 1e9


def measure(case: Case, budget: float) -> Cell:
    """Times one case with torch's present number of threads, in about ``budget`` seconds."""
    threads = torch.get_num_threads()
    ours, reference = alternate(case.ours, case.torch, budget)
    rate = case.work / ours / 1e9
    best = product_rate(threads) if case.unit == FLOPS else copy_rate(1 << round(case.work - 1).bit_length(), threads)
    return Cell(
        case.op,
        case.family,
        case.direction,
        str(case.dtype).removeprefix("torch."),
        case.shape,
        threads,
        ours * 1e3,
        reference * 1e3,
        reference / ours,
        case.work,
        rate,
        case.unit,
        rate / best,
    )
