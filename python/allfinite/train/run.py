"""Runs a job: one process a recipe, two at a time, watched through their logs; then the summary and the report."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from . import layout, worker
from .options import RUN_FILE, Job, OptionError
from .progress import ProgressBoard
from .report import write_report
from .summary import read_run, write_summary
from .table import print_results

AT_A_TIME = 2
_POLL_S = 0.1
# A stopped process ends after the step it is in, or after the import of torch if it has only begun.
_STOP_PATIENCE_S = 40.0
# Half-precision products on a CPU are slow enough without threads that spin while they wait.
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

INTERRUPTED = 130


class RunError(RuntimeError):
    """A recipe's process failed; the text says which one and how."""


class Interrupted(BaseException):
    """Ctrl-C, or a request to terminate."""


def run_job(job: Job, console: Console) -> int:
    """Trains the recipes of a job and writes its folder.

    Args:
        job: the checked job.
        console: where the bars and the table go.

    Returns:
        The exit code: 0, or 130 if the run was interrupted; it can be resumed then.

    Raises:
        OptionError: the folder cannot be written, or another job works in it.
        RunError: a recipe's process failed.
    """
    with _claimed(job) as directory:
        _say(console, f"Run in {directory}: {', '.join(job.options.recipes)}; {AT_A_TIME} processes at a time.")
        try:
            with _signals_interrupt():
                with ProgressBoard(console, job.options) as board:
                    _run_processes(job, directory, board)
                _write_results(job, directory, console)
        except Interrupted:
            _say(
                console,
                f"Interrupted; the logs are whole. Go on with: python -m allfinite train --resume --out {directory}",
            )
            return INTERRUPTED
    return 0


def _write_results(job: Job, directory: Path, console: Console) -> None:
    summary = write_summary(directory, job.options)
    runs = read_run(directory, job.options)
    write_report(directory, runs, summary)
    print_results(console, summary, runs)
    _say(console, f"Report: {layout.report(directory)}")


def _say(console: Console, text: str) -> None:
    """Prints as it is: a folder's name is no markup, and is not broken into lines."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _claimed(job: Job) -> Iterator[Path]:
    """The job's folder, ready to be written, and out of bounds to any other job, also to one begun at the same moment.

    The lock is on the folder itself and ends with this process, however that ends.
    """
    directory = job.directory
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not job.resume:
                if (directory / RUN_FILE).exists():
                    raise OptionError(f"--out: expected a new or empty folder, but another run has used {directory}")
                job.options.save(directory)
        except BlockingIOError:
            raise OptionError(
                f"--out: expected a folder that no other run works in, but one works in {directory}"
            ) from None
        except OSError as error:
            raise OptionError(f"--out: expected a folder that can be written, but got {error}") from None
        yield directory


def _run_processes(job: Job, directory: Path, board: ProgressBoard) -> None:
    pending = list(job.options.recipes)
    active: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while pending or active:
            while pending and len(active) < AT_A_TIME:
                name = pending.pop(0)
                active[name] = _start(directory, name)
                board.begin(name)
            time.sleep(_POLL_S)
            board.update(directory)
            for name in [name for name, process in active.items() if process.poll() is not None]:
                _check(active.pop(name).returncode, directory, name)
        board.update(directory)
    finally:
        _stop(active)


def _start(directory: Path, name: str) -> subprocess.Popen[bytes]:
    """A recipe's process in a session of its own, so that Ctrl-C reaches this process alone."""
    with layout.errors(directory, name).open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(directory.resolve()), name],
            env={**os.environ, **_THREADS},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _check(code: int, directory: Path, name: str) -> None:
    errors = layout.errors(directory, name)
    text = errors.read_text(errors="replace").strip()
    if code == worker.FINISHED:
        if not text:
            errors.unlink()
        return
    last_line = text.splitlines()[-1] if text else f"it ended with code {code}"
    raise RunError(f"the process of recipe {name} failed: {last_line} (all of it is in {errors})")


def _stop(active: dict[str, subprocess.Popen[bytes]]) -> None:
    """Closes the pipe of each process, which asks it to end, and waits; kills what does not."""
    for process in active.values():
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + _STOP_PATIENCE_S
    for process in active.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, Interrupted):
            process.kill()
            process.wait()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into `Interrupted` inside."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in watched}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
