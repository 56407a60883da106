"""One benchmark run: every case of the chosen ops with each number of threads, written down as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from allfinite.bench import attention, cross_entropy, gradients, norms, report, softmax
from allfinite.bench.case import Case, Cell
from allfinite.bench.goals import judge
from allfinite.bench.measure import copy_rate, keep_memory, measure, product_rate

Cases = Callable[[Sequence[torch.dtype]], Iterator[Case]]

FAMILIES: dict[str, Cases] = {
    "norms": norms.cases,
    "softmax": softmax.cases,
    "cross_entropy": cross_entropy.cases,
    "attention": attention.cases,
    "gradients": gradients.cases,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        families: keys of ``FAMILIES``.
        dtypes: keys of ``DTYPES``.
        threads: each number that all cases run with.
        seconds: for each case, both sides together.
        csv: file for the table, or None.
        picture: PNG file for the ratios, or None.
    """

    families: Sequence[str]
    dtypes: Sequence[str]
    threads: Sequence[int]
    seconds: float
    csv: Path | None = None
    picture: Path | None = None


def run(options: Options, show: Callable[[str], None]) -> list[Cell]:
    """Measures and shows everything, line by line; the caller's number of threads is put back."""
    kept = keep_memory()
    show(f"allocator: {'keeps' if kept else 'gives back'} freed blocks, on both sides")
    cells: list[Cell] = []
    before = torch.get_num_threads()
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            show(
                f"this machine, threads {threads}: copy {copy_rate(2**27, threads):.1f} GB/s in memory and "
                f"{copy_rate(2**19, threads):.1f} in cache, fp32 product {product_rate(threads):.0f} GFLOP/s"
            )
        show(report.HEADER)
        for family in options.families:
            for case in FAMILIES[family]([DTYPES[name] for name in options.dtypes]):
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    cells.append(measure(case, options.seconds))
                    show(report.line(cells[-1]))
    finally:
        torch.set_num_threads(before)
    for text in report.summary(cells, judge(cells)):
        show(text)
    if options.csv is not None:
        with contextlib.closing(options.csv.open("w", newline="")) as file:
            report.write_csv(cells, file)
    if options.picture is not None:
        report.draw(cells, options.picture)
    return cells
