"""`python -m allfinite bench`: every op beside torch's own."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

USAGE = 2


def add(subcommands: Subcommands) -> None:
    """Adds the subcommand to a parser."""
    from allfinite.bench.run import DTYPES, FAMILIES

    parser = subcommands.add_parser(
        "bench",
        help="time every op beside torch's own, in one process",
        description="Times ours and torch's own op in turns, in one process, and prints the medians, the rate, its "
        "share of what this machine can do, and the ratio torch / ours; at the end the goals, and whether each holds. "
        "Nothing else should run meanwhile.",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default)")
    parser.add_argument("--op", action="append", choices=FAMILIES, help="repeatable (default: all)")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable (default: all)")
    parser.add_argument(
        "--threads", action="append", type=int, metavar="N", help="repeatable (default: 1, and as many as torch takes)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="for each case (default: 0.5)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios into this PNG file (matplotlib)")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Runs the benchmark; exit code 2 and one sentence for options that cannot be followed."""
    from allfinite.bench import run as bench

    complaint = _complaint(parsed)
    if complaint:
        print(f"allfinite bench: {complaint}", file=sys.stderr)
        return USAGE
    options = bench.Options(
        families=parsed.op or list(bench.FAMILIES),
        dtypes=parsed.dtype or list(bench.DTYPES),
        threads=parsed.threads or sorted({1, torch.get_num_threads()}),
        seconds=parsed.seconds,
        csv=parsed.csv,
        picture=parsed.picture,
    )
    bench.run(options, lambda text: print(text, flush=True))
    return 0


def _complaint(parsed: argparse.Namespace) -> str:
    """What stands against these options, or ''; asked before the minutes that the run takes."""
    if parsed.device != "cpu":
        return f"expected --device cpu, the only one with kernels for every op, but got {parsed.device}"
    if any(threads < 1 for threads in parsed.threads or ()):
        return f"expected --threads of at least 1, but got {min(parsed.threads)}"
    if not parsed.seconds > 0:
        return f"expected --seconds above 0, but got {parsed.seconds}"
    for path in (parsed.csv, parsed.picture):
        if path is not None and not path.parent.is_dir():
            return f"expected {path} in a folder that exists, but there is none"
    if parsed.picture is not None and importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is missing, which --picture needs: type `pip install allfinite[train]`"
    return ""
