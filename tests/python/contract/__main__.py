"""``python -m contract``: any number of cases in several processes; what ``make fuzz`` runs.

Writes a summary (Markdown) and returns 1 when a case fails. ``--ops`` and ``--seed`` repeat a part of a run.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from contract.base import OpContract
from contract.engine import BATCH, Tally
from contract.summary import summary
from contract.worker import BY_NAME, run_named


def _plan(contracts: list[OpContract], cases: int) -> Iterator[tuple[str, int, int]]:
    """(op, batch, cases), the ops in turn, so that a run that is stopped has seen all of them."""
    unit = cases / sum(contract.share for contract in contracts)
    left = {contract.name: max(1, round(contract.share * unit)) for contract in contracts}
    batch = 0
    while left:
        for op in list(left):
            count = min(BATCH, left[op])
            yield op, batch, count
            left[op] -= count
            if not left[op]:
                del left[op]
        batch += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m contract", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ops", default=",".join(BY_NAME), help="names, separated by commas")
    parser.add_argument("--summary", type=Path, default=Path("build/fuzz/summary.md"))
    options = parser.parse_args()
    contracts = [BY_NAME[name] for name in options.ops.split(",")]
    tallies = {contract.name: Tally(contract.name) for contract in contracts}
    start = last = time.monotonic()
    print(f"contract: {options.cases} cases, seed {options.seed}", flush=True)
    with ProcessPoolExecutor(
        options.processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        jobs = {
            pool.submit(run_named, op, options.seed, batch, n): op for op, batch, n in _plan(contracts, options.cases)
        }
        for job in as_completed(jobs):
            op = jobs[job]
            try:
                tally = job.result()
            except BrokenProcessPool:  # of all jobs that are left: one of those that ran has crashed
                tally = Tally(op, failures=[f"# {op}: a process ended in the middle of its cases"])
            tallies[op].merge(tally)
            for failure in tally.failures:
                print(failure, flush=True)
            if time.monotonic() - last > 30:
                last = time.monotonic()
                done = sum(t.cases for t in tallies.values())
                print(f"contract: {done} cases in {last - start:.0f} s", flush=True)
    text = summary(list(tallies.values()), options.seed, time.monotonic() - start)
    options.summary.parent.mkdir(parents=True, exist_ok=True)
    options.summary.write_text(text)
    failures = sum(len(t.failures) for t in tallies.values())
    print("\n".join(text.splitlines()[: 8 + len(tallies)]))
    print(f"contract: {failures} failures; details in {options.summary}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
