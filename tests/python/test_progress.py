"""What is printed while a job runs: nothing that matters may pass unseen where no bar can be drawn."""

import io
from pathlib import Path

from rich.console import Console

from allfinite.train import layout
from allfinite.train.progress import LogTail, ProgressBoard
from support.runs import write_run


def test_first_nan_limit_and_death_are_printed_once_each(tmp_path: Path) -> None:
    options = write_run(tmp_path)
    console = Console(file=io.StringIO(), width=120)
    with ProgressBoard(console, options) as board:
        board.begin("stock")
        board.update(tmp_path)
        board.update(tmp_path)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    for text in (
        "stock step 31: first loss that is not finite (largest logit inf)",
        "stock step 31: an attention logit passed 65504, fp16's largest number",
        "stock step 50: dead after 20 losses in a row that are not finite; 40.0 % of its steps lost",
        "allfinite step 33: an attention logit passed 65504, fp16's largest number",
    ):
        assert lines.count(text) == 1
    assert not any(line.startswith("advised") and "passed" in line for line in lines)


def test_tail_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    """A line that is read while it is written must come whole, and once."""
    path = layout.log(tmp_path, "stock")
    tail = LogTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"event": "step", "step": 1}\n{"event": "st')
    assert [event["step"] for event in tail.read()] == [1]
    with path.open("ab") as file:
        file.write(b'ep", "step": 2}\n')
    assert [event["step"] for event in tail.read()] == [2]
    assert tail.read() == []


def test_tail_survives_the_cut_of_a_resumed_log(tmp_path: Path) -> None:
    path = layout.log(tmp_path, "stock")
    lines = [b'{"event": "step", "step": %d}\n' % step for step in range(1, 5)]
    path.write_bytes(b"".join(lines[:3]))
    tail = LogTail(path)
    assert len(tail.read()) == 3
    path.write_bytes(lines[0])
    assert tail.read() == []
    path.write_bytes(b"".join(lines))
    assert [event["step"] for event in tail.read()] == [4]


def test_tail_passes_over_a_piece_of_a_line(tmp_path: Path) -> None:
    """After the cut, another build may write lines of another length; the display must not end the job."""
    path = layout.log(tmp_path, "stock")
    path.write_bytes(b'{"event": "step", "step": 1}\n')
    tail = LogTail(path)
    tail.read()
    path.write_bytes(b'{"event": "start", "torch": "a longer line"}\n{"event": "step", "step": 2}\n')
    assert [event["step"] for event in tail.read()] == [2]
