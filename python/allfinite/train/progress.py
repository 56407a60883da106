"""A progress bar for each recipe, fed by the lines that its process adds to its log."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from . import layout
from .log import Event, decode
from .options import Options
from .recipe import DEATH_STREAK
from .table import number

# Where there is no terminal to draw bars in, a line is printed this many times a recipe.
_PLAIN_LINES = 6


class LogTail:
    """The events that a log gained since the last look.

    A resumed run first cuts the log and then writes the same bytes again, so the place reached stays right; where it
    does not (another build writes other bytes), a piece of a line is passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """New whole lines; empty if there are none, or no file yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                events.append(decode(line))
        return events


class ProgressBoard:
    """Bars while the job runs, and a line for what must not be missed: the first NaN, a death, the limit passed.

    Args:
        console: where to draw; without a terminal it prints plain lines now and then.
        options: options of the job.
    """

    def __init__(self, console: Console, options: Options) -> None:
        self._console = console
        self._options = options
        self._tails: dict[str, LogTail] = {}
        self._told: set[tuple[str, str]] = set()
        self._lost = dict.fromkeys(options.recipes, 0)
        self._last_step = dict.fromkeys(options.recipes, 0)
        self._progress = Progress(
            TextColumn("[bold]{task.description:<9}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(name, total=options.steps, start=False, state="waiting")
            for name in options.recipes
        }

    def __enter__(self) -> ProgressBoard:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        """The recipe's process was started."""
        self._progress.start_task(self._tasks[name])
        self._progress.update(self._tasks[name], state="starting")

    def update(self, directory: Path) -> None:
        """Reads what the logs gained."""
        for name in self._options.recipes:
            tail = self._tails.setdefault(name, LogTail(layout.log(directory, name)))
            for event in tail.read():
                self._show(name, event)

    def _show(self, name: str, event: Event) -> None:
        if event["event"] == "step":
            self._show_step(name, event)
        elif event["event"] == "end":
            state = "died" if event["died"] else f"accuracy {100 * event['accuracy']:.1f} %"
            if event["died"]:
                step, lost = self._last_step[name], self._lost[name]
                self._tell(
                    name,
                    "death",
                    f"step {step}: dead after {DEATH_STREAK} losses in a row that are not finite; "
                    f"{100 * lost / step:.1f} % of its steps lost",
                )
            self._progress.update(self._tasks[name], state=state)
            self._progress.stop_task(self._tasks[name])

    def _show_step(self, name: str, event: Event) -> None:
        step, loss, logit = event["step"], event["loss"], event["logit"]
        state = f"loss {number(loss)}  logit {number(logit)}  scale {number(event['scale'])}"
        self._progress.update(self._tasks[name], completed=step, state=state)
        self._last_step[name] = step
        self._lost[name] += event["skipped"]
        if not math.isfinite(loss):
            self._tell(name, "nonfinite", f"step {step}: first loss that is not finite (largest logit {number(logit)})")
        if self._options.dtype == "fp16" and logit > 65504:
            self._tell(name, "limit", f"step {step}: an attention logit passed 65504, fp16's largest number")
        if not self._console.is_terminal and step % max(1, self._options.steps // _PLAIN_LINES) == 0:
            self._tell(name, f"step {step}", f"step {step} of {self._options.steps}: {state}")

    def _tell(self, name: str, what: str, text: str) -> None:
        if (name, what) not in self._told:
            self._told.add((name, what))
            self._console.print(Text(f"{name:<9} {text}"))
