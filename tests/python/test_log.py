"""The JSONL logs: whole lines, honest numbers, and the cut that a resumed run needs."""

import json
import math
from pathlib import Path

import pytest

from allfinite.train import log as log_module
from allfinite.train.log import LogBusyError, LogWriter, decode, encode, read_log


def write_steps(path: Path, count: int) -> None:
    with LogWriter(path) as log:
        log.write({"event": "start", "recipe": "stock"})
        for step in range(1, count + 1):
            log.write({"event": "step", "step": step, "loss": 1.0 / step})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, 65504.0])
def test_numbers_survive_the_log_as_strict_json(value: float) -> None:
    """A NaN written as a bare NaN token would make the log unreadable for other tools."""
    line = encode({"event": "step", "loss": value})
    json.loads(line, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    assert decode(line)["loss"] == pytest.approx(value, nan_ok=True, abs=0)


def test_torn_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(path, 3)
    with path.open("ab") as file:
        file.write(b'{"event": "step", "st')
    assert [event.get("step") for event in read_log(path)] == [None, 1, 2, 3]
    with LogWriter(path) as log:
        assert log.cut(3)
        log.write({"event": "step", "step": 4, "loss": 0.0})
    assert [event.get("step") for event in read_log(path)] == [None, 1, 2, 3, 4]


def test_steps_beyond_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    """They come again after a resume; kept, they would be in the log twice."""
    path = tmp_path / "log.jsonl"
    write_steps(path, 5)
    with LogWriter(path) as log:
        assert log.cut(2)
    assert [event.get("step") for event in read_log(path)] == [None, 1, 2]


def test_log_that_lacks_steps_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(path, 2)
    with LogWriter(path) as log:
        assert not log.cut(4)


def test_garbage_inside_a_log_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "start"}\nnot json\n{"event": "step", "step": 1}\n')
    with pytest.raises(ValueError, match="Expecting value"):
        read_log(path)


def test_two_writers_cannot_share_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that append to one log would mix two runs."""
    monkeypatch.setattr(log_module, "_LOCK_PATIENCE_S", 0.0)
    path = tmp_path / "log.jsonl"
    with LogWriter(path), pytest.raises(LogBusyError, match="another process"):
        LogWriter(path)
