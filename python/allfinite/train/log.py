"""JSONL logs: one object a line, whole lines only, read back without a torn end."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

Event = dict[str, Any]

# An old process of the same recipe that was told to stop may need this long for its last step.
_LOCK_PATIENCE_S = 20.0


class LogBusyError(RuntimeError):
    """Another process writes the log."""


def encode(event: Event) -> bytes:
    """One strict-JSON line; NaN and infinities, which JSON lacks, become the strings "nan", "inf" and "-inf"."""
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
    return (json.dumps(plain, allow_nan=False) + "\n").encode()


def decode(line: bytes) -> Event:
    """The event of one line.

    Raises:
        ValueError: the line is not one JSON object.
    """
    event = json.loads(line)
    if not isinstance(event, dict):
        raise ValueError(f"log: expected one JSON object a line, but got {line!r}")
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in event.items()}


def read_log(path: Path) -> list[Event]:
    """All whole events of a log, in order; a torn last line is left out, a missing file gives an empty list.

    Raises:
        ValueError: a line before the last is not a JSON object.
    """
    events, _ = _parse(path)
    return events


def _parse(path: Path) -> tuple[list[Event], list[int]]:
    """Events of the file and, for each, the offset of its end."""
    data = path.read_bytes() if path.exists() else b""
    events: list[Event] = []
    ends: list[int] = []
    end = 0
    lines = data.split(b"\n")
    for line in lines[:-1]:
        events.append(decode(line))
        end += len(line) + 1
        ends.append(end)
    return events, ends


class LogWriter:
    """Appends events, each in one write, so that a killed process leaves whole lines; holds the log for itself.

    Args:
        path: the file; made if missing.

    Raises:
        LogBusyError: another process holds the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._lock()

    def cut(self, keep_steps: int) -> bool:
        """Cuts off a torn last line, step events beyond `keep_steps` and all that follows: a resumed run repeats it.

        Args:
            keep_steps: number of the last step to keep; 0 empties the log.

        Returns:
            Whether the log held every step up to `keep_steps`.
        """
        kept = last_step = 0
        for event, end in zip(*_parse(self._path), strict=True):
            if keep_steps == 0 or event["event"] == "end" or event.get("step", 0) > keep_steps:
                break
            kept, last_step = end, event.get("step", 0)
        self._file.truncate(kept)
        return last_step == keep_steps

    def write(self, event: Event) -> None:
        """Adds one line, at once."""
        self._file.write(encode(event))

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._file.close()
                    raise LogBusyError(f"{self._path} is being written by another process") from None
                time.sleep(0.1)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file so that a reader, or a resumed run, sees the old or the new content and never a part."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
