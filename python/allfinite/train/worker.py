"""The process of one recipe: `python -m allfinite.train.worker FOLDER RECIPE`, started by `run.py`.

Its standard input is a pipe that only the parent holds open. When the pipe closes, because the parent asks for a stop
or is gone for whatever reason, the process ends after the step that it is in, with a checkpoint.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch

from . import layout
from .loop import run_recipe
from .options import load_options

FINISHED = 0
STOPPED = 75
# A step is far shorter; a process that hangs must not outlive its parent.
_GRACE_S = 30.0


def main(arguments: list[str]) -> int:
    """Runs one recipe of the run in a folder.

    Args:
        arguments: the folder and the name of the recipe.

    Returns:
        `FINISHED`, or `STOPPED` if the parent closed the pipe before the end.
    """
    directory, name = Path(arguments[0]), arguments[1]
    stop = _stop_with_parent()
    torch.set_num_threads(1)
    finished = run_recipe(
        load_options(directory), name, layout.log(directory, name), layout.checkpoint(directory, name), stop.is_set
    )
    return FINISHED if finished else STOPPED


def _stop_with_parent() -> threading.Event:
    stop = threading.Event()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        stop.set()
        threading.Event().wait(_GRACE_S)
        os._exit(STOPPED)

    threading.Thread(target=watch, daemon=True).start()
    return stop


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
