"""Times an op of ours beside torch's own, in one process: warmed up, alternating, medians.

Alternating cancels what changes slowly on a machine (clocks, neighbours); fresh outputs cost page faults on both
sides alike. Each benchmark file describes its cases; this file runs, prints and writes them.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One line of the table: what runs, and how many bytes or flops its floor counts."""

    op: str
    direction: str  # "forward" or "forward+backward"
    dtype: torch.dtype
    shape: str
    ours: Call
    torch: Call
    work: float  # bytes, or flops
    unit: str  # "GB/s" or "GFLOP/s"


@dataclass(frozen=True)
class Result:
    op: str
    direction: str
    dtype: str
    shape: str
    threads: int
    ours_ms: float
    torch_ms: float
    ratio: float
    rate: float
    unit: str


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: Case, repeats: int) -> Result:
    for _ in range(3):
        case.ours()
        case.torch()
    ours, reference = [], []
    for _ in range(repeats):
        ours.append(_seconds(case.ours))
        reference.append(_seconds(case.torch))
    a, b = statistics.median(ours), statistics.median(reference)
    dtype = str(case.dtype).removeprefix("torch.")
    rate = case.work / a / 1e9
    threads = torch.get_num_threads()
    return Result(case.op, case.direction, dtype, case.shape, threads, a * 1e3, b * 1e3, b / a, rate, case.unit)


def run(cases: Callable[[], Iterable[Case]], argv: Sequence[str] | None = None) -> None:
    """Command line of a benchmark file: measures every case, prints a table, and writes CSV with --csv."""
    parser = argparse.ArgumentParser(description="ours and torch side by side; ratio = torch / ours")
    parser.add_argument("--threads", type=int, default=1, help="threads of both (1 is the one to compare with)")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each, alternating")
    parser.add_argument("--csv", help="also write the table to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    results = []
    print(f"{'op':28} {'direction':17} {'dtype':9} {'shape':24} {'ours ms':>9} {'torch ms':>9} {'ratio':>6} rate")
    for case in cases():
        r = measure(case, options.repeats)
        results.append(r)
        print(
            f"{r.op:28} {r.direction:17} {r.dtype:9} {r.shape:24} {r.ours_ms:9.3f} {r.torch_ms:9.3f} {r.ratio:6.2f} "
            f"{r.rate:.1f} {r.unit}",
            flush=True,
        )
    mean = statistics.geometric_mean([r.ratio for r in results])
    print(f"geometric mean of torch / ours: {mean:.2f}, smallest {min(r.ratio for r in results):.2f}")
    if options.csv:
        with open(options.csv, "w", newline="") as out:
            writer = csv.DictWriter(out, [f.name for f in fields(Result)])
            writer.writeheader()
            writer.writerows(asdict(r) for r in results)


def main(cases: Callable[[], Iterable[Case]]) -> None:
    sys.exit(run(cases))
