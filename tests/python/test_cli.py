"""`python -m allfinite`: impossible options, information, and a job that is interrupted, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import allfinite
from allfinite import _build_info
from allfinite.cli import info, main
from allfinite.train import layout
from allfinite.train.log import read_log
from allfinite.train.options import Options, plan_job

# Long enough for a process to import torch and take its first steps on a busy machine.
PATIENCE_S = 120.0


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs `train`, expects exit code 2, nothing on standard output, and returns the one line of standard error."""
    with pytest.raises(SystemExit) as stop:
        sys.exit(main(["train", *map(str, arguments)]))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", 0], "--steps: expected a number from 1 to 1000000, but got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--lr", "nan"], "--lr: expected a finite number above 0, but got nan"),
        (["--lr", "inf"], "--lr: expected a finite number above 0, but got inf"),
        (["--lr", -0.1], "--lr: expected a finite number above 0, but got -0.1"),
        (["--lr", 0], "--lr: expected a finite number above 0, but got 0.0"),
        (["--seed", -1], "--seed: expected a number from 0 to 2^63 - 1, but got -1"),
        (["--recipe", "magic"], "--recipe: expected one of stock, sdpa, allfinite, advised, but got magic"),
        (["--dtype", "fp8"], "--dtype: expected one of fp16, bf16, fp32, but got fp8"),
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:N, but got tpu"),
        (["--device", "cpu:3"], "--device: expected cpu, cuda or cuda:N, but got cpu:3"),
        (["--device", "meta"], "--device: expected cpu, cuda or cuda:N, but got meta"),
    ],
)
def test_impossible_option_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[object], sentence: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert refusal(capsys, *arguments, "--out", out) == f"allfinite train: {sentence}"
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch finds no CUDA device here" in refusal(capsys, "--device", "cuda")


def test_folder_in_use_is_refused_and_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A second run must not mix its logs with those of the first."""
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds files already; add --resume" in refusal(capsys, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_folder_that_is_a_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(capsys, "--out", tmp_path / "file")
    assert "expected a folder that can be written" in refusal(capsys, "--out", tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seed", 4], "--resume: expected --seed 0, as the run in FOLDER has it, but got 4"),
        (["--recipe", "stock"], "--resume: expected --recipe sdpa, as the run in FOLDER has it, but got stock"),
        (["--lr", 0.1], "--resume: expected --lr 0.03, as the run in FOLDER has it, but got 0.1"),
    ],
)
def test_run_with_other_options_is_not_resumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[object], sentence: str
) -> None:
    Options(recipes=("sdpa",)).save(tmp_path)
    text = refusal(capsys, "--resume", "--out", tmp_path, *arguments)
    assert text == f"allfinite train: {sentence.replace('FOLDER', str(tmp_path))}"


@pytest.mark.parametrize("content", [None, "", "[]", '{"recipes": ["stock"], "colour": 3}', '{"recipes": ["x"]}'])
def test_folder_without_a_run_is_not_resumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert "expected" in refusal(capsys, "--resume", "--out", tmp_path)


def test_missing_extra_names_the_command_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert refusal(capsys) == "allfinite train: scikit-learn is missing: type `pip install allfinite[train]`"


def test_unknown_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["dance"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_runs_without_a_name_get_a_fresh_folder_and_resume_takes_the_newest(tmp_path: Path) -> None:
    for expected in ("digits-fp16-seed0", "digits-fp16-seed0-2"):
        job = plan_job({}, None, resume=False, root=tmp_path)
        assert job.directory == tmp_path / expected
        job.directory.mkdir()
        job.options.save(job.directory)
    os.utime(tmp_path / "digits-fp16-seed0" / "run.json", (2e9, 2e9))
    assert plan_job({}, None, resume=True, root=tmp_path).directory == tmp_path / "digits-fp16-seed0"


def test_info_names_versions_build_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (allfinite.__version__, torch.__version__, _build_info.COMPILER, *_build_info.CPU_CAPABILITIES):
        assert part in text


def test_info_says_why_there_is_no_cuda_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build_info, "CUDA_BUILT", False)
    monkeypatch.setattr(_build_info, "CUDA_REASON", "built without nvcc")
    assert info.facts()["CUDA half"] == "left out: built without nvcc"
    monkeypatch.setattr(_build_info, "CUDA_BUILT", True)
    monkeypatch.setattr(_build_info, "CUDA_ARCHITECTURES", "80;90")
    assert info.facts()["CUDA half"] == "built for sm_80, sm_90"


def test_info_with_an_unknown_instruction_set_is_one_sentence() -> None:
    """Guards against a traceback where the user's own variable is at fault."""
    result = subprocess.run(
        [sys.executable, "-m", "allfinite", "info"],
        env={**os.environ, "ALLFINITE_CPU_CAPABILITY": "bogus"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("allfinite: expected ALLFINITE_CPU_CAPABILITY to be one of baseline")
    assert result.stderr.endswith("but got bogus\n")
    assert result.stderr.count("\n") == 1


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "allfinite", "train", *map(str, arguments), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(log: Path, steps: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not log.exists() or log.read_bytes().count(b"\n") <= steps:
        assert time.monotonic() < deadline, f"{log} has not reached step {steps}"
        time.sleep(0.02)


def wait_until_free(log: Path) -> None:
    """Waits until no process holds the log, that is, until the recipe's process is gone."""
    import fcntl

    deadline = time.monotonic() + PATIENCE_S
    with log.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline, "the recipe's process outlives its parent"
                time.sleep(0.02)


def test_job_survives_ctrl_c_and_kill_bit_for_bit(tmp_path: Path) -> None:
    """Ctrl-C, then SIGKILL of the parent, then the end: the log equals that of a run left alone, to the last digit."""
    options = ("--recipe", "stock", "--dtype", "fp32", "--steps", 150, "--lr", 0.003)
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    log = layout.log(broken, "stock")

    job = start(broken, *options)
    wait_for_steps(log, 15)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 130
    assert err == ""
    assert f"Go on with: python -m allfinite train --resume --out {broken}" in out
    stopped_at = read_log(log)[-1]["step"]
    assert 15 <= stopped_at < 150

    job = start(broken, "--resume")
    wait_for_steps(log, min(stopped_at + 30, 130))
    job.kill()
    job.communicate(timeout=PATIENCE_S)
    wait_until_free(log)
    assert log.read_bytes().endswith(b"}\n")
    assert read_log(log)[-1]["event"] == "step"

    for arguments in (["--resume", "--out", broken], [*options, "--out", whole]):
        assert main(["train", *map(str, arguments)]) == 0
    events = read_log(log)
    assert [event["step"] for event in events[1:-1]] == list(range(1, 151))
    assert events[:-1] == read_log(layout.log(whole, "stock"))[:-1]
    assert {path.name for path in broken.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("resume", [False, True])
def test_two_jobs_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: bool) -> None:
    """Begun at the same moment, one would train with the other's options; the second is refused, the first goes on."""
    import fcntl

    if resume:
        Options(recipes=("sdpa",), steps=3).save(tmp_path)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = {path.name for path in tmp_path.iterdir()}
        arguments = ["--resume"] if resume else ["--recipe", "sdpa", "--steps", "3"]
        sentence = refusal(capsys, *arguments, "--out", tmp_path)
    finally:
        os.close(handle)
    expected = f"expected a folder that no other run works in, but one works in {tmp_path}"
    assert sentence == f"allfinite train: --out: {expected}"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_failing_process_is_reported_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe whose process cannot run must not look like a finished one; here its checkpoint is none."""
    Options(recipes=("stock",), steps=3).save(tmp_path)
    layout.checkpoint(tmp_path, "stock").write_bytes(b"not a checkpoint")
    assert main(["train", "--resume", "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("allfinite train: the process of recipe stock failed: ")
    assert err.count("\n") == 1
    assert not layout.summary(tmp_path).exists()


def test_two_recipes_make_a_whole_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp16, as a user starts it: every promised file is there, and the terminal says the same."""
    folder = tmp_path / "run"
    assert main(["train", "--recipe", "sdpa", "--recipe", "stock", "--steps", "6", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    names = {path.name for path in folder.iterdir()}
    assert {"report.html", "summary.json", "run.json", "stock.jsonl", "sdpa.jsonl"} <= names
    assert not any(name.endswith((".stderr", ".part")) for name in names)
    assert len([name for name in names if name.endswith(".png")]) >= 3
    summary = json.loads((folder / "summary.json").read_text())
    assert [entry["recipe"] for entry in summary["recipes"]] == ["stock", "sdpa"]
    for entry in summary["recipes"]:
        assert f"{entry['recipe']}: {entry['verdict']}" in " ".join(out.split())
