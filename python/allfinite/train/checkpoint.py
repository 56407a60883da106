"""Checkpoints that are whole or absent."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from .log import replace_file


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` (tensors, numbers, strings, dicts, lists) and puts it in place at once by a rename."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    replace_file(path, buffer.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state of `path`, or None where no checkpoint was written yet."""
    if not path.exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(state, dict)
    return state
