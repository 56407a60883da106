"""A C++ trainer with its own CMake project, built against the installed package and run in both 16-bit types."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import allfinite.utils
from support.fake_torch import fake_torch

SOURCE = Path(__file__).parents[1] / "consumer"
CMAKE = Path(sys.executable).with_name("cmake")
STEPS = 100

pytestmark = pytest.mark.skipif(not CMAKE.exists(), reason="needs cmake beside this python")


def configure(build: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    prefix = f"-DCMAKE_PREFIX_PATH={allfinite.utils.cmake_prefix_path}"
    command = [CMAKE, "-S", SOURCE, "-B", build, "-G", "Ninja", prefix, *arguments]
    path = f"{CMAKE.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)


class Trainer:
    """The program; each run gives the "key value" lines that it printed."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def run(self, dtype: str, *options: str | Path) -> dict[str, str]:
        done = subprocess.run(
            [self.program, dtype, str(STEPS), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    build = tmp_path_factory.mktemp("consumer")
    configured = configure(build)
    assert configured.returncode == 0, configured.stderr
    built = subprocess.run([CMAKE, "--build", build], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout
    return Trainer(build / "trainer")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_trains_to_the_stated_loss(trainer: Trainer, dtype: str) -> None:
    """Guards against a scaler, guard or op that lets a 16-bit run stall; guessing is a loss of ln 8 = 2.08."""
    result = trainer.run(dtype)
    assert float(result["loss"]) < 0.1
    assert float(result["scale"]) > 65536


def test_survives_an_injected_infinity(trainer: Trainer) -> None:
    """Guards against an infinity that reaches the parameters, or a skip that stops the training."""
    result = trainer.run("fp16", "--inject", "30")
    assert result["injected"].startswith("skipped: inf in the gradient of parameter group 1, index ")
    assert "(block.proj.bias)" in result["injected"]
    assert result["parameters"] == "kept"
    assert result["backoff"] == "0.5"
    assert float(result["loss"]) < 0.1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_saves_and_resumes_bit_for_bit(trainer: Trainer, tmp_path: Path, dtype: str) -> None:
    """Guards against state of model, optimizer or scaler that a checkpoint loses."""
    whole = trainer.run(dtype)
    half = trainer.run(dtype, "--save", tmp_path)
    rest = trainer.run(dtype, "--resume", tmp_path)
    assert half["hash"] != whole["hash"]
    for key in ("hash", "scale", "tracker", "loss"):
        assert rest[key] == whole[key]


def test_another_torch_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Guards against link errors, or crashes, where AllFinite was built for another torch."""
    other = fake_torch(tmp_path / "torch", "2.9.0")
    result = configure(tmp_path / "build", f"-DTorchLibs_ROOT={other}")
    assert result.returncode != 0
    built_for = ".".join(torch.__version__.split(".")[:2])
    sentence = (
        f"AllFinite was built for torch {built_for}, but {other} holds torch 2.9.0: rebuild AllFinite against it."
    )
    assert sentence in " ".join(result.stderr.split())
