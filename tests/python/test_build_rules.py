"""The build's refusals, each one sentence and before any compile: no test here compiles the library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.fake_torch import fake_torch

ROOT = Path(__file__).parents[2]
CMAKE = Path(sys.executable).with_name("cmake")

pytestmark = pytest.mark.skipif(
    not (ROOT / "CMakeLists.txt").exists() or not CMAKE.exists(), reason="needs a checkout and cmake beside this python"
)


def configure(build: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ALLFINITE_")}
    return subprocess.run(
        [CMAKE, "-S", ROOT, "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The error text of a configuration that must have failed, on one line."""
    assert result.returncode != 0, result.stdout
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
def test_fast_math_is_refused_for_cpp(tmp_path: Path, flag: str) -> None:
    """Guards against a build whose isfinite() is compiled to `true`."""
    error = refused(configure(tmp_path, f"-DCMAKE_CXX_FLAGS={flag}"))
    assert f"AllFinite: {flag} is refused" in error


def test_fast_math_in_the_environment_is_refused(tmp_path: Path) -> None:
    error = refused(configure(tmp_path, CXXFLAGS="-O2 -ffast-math"))
    assert "AllFinite: -ffast-math is refused" in error


@pytest.mark.parametrize("where", ["cmake", "environment"])
def test_fast_math_is_refused_for_cuda(tmp_path: Path, where: str) -> None:
    """Guards against kernels that flush subnormals and approximate division."""
    if where == "cmake":
        result = configure(tmp_path, "-DCMAKE_CUDA_FLAGS=--use_fast_math")
    else:
        result = configure(tmp_path, NVCC_APPEND_FLAGS="--use_fast_math")
    assert "use_fast_math is refused" in refused(result)


def test_missing_torch_is_one_sentence(tmp_path: Path) -> None:
    error = refused(configure(tmp_path / "build", f"-DTorchLibs_ROOT={tmp_path}"))
    assert "AllFinite needs torch 2.9 or newer: install it" in error


def test_old_torch_is_refused(tmp_path: Path) -> None:
    root = fake_torch(tmp_path / "torch", "2.8.1")
    error = refused(configure(tmp_path / "build", f"-DTorchLibs_ROOT={root}"))
    assert "2.8.1" in error
    assert "2.9" in error


def fake_nvcc(folder: Path, release: str) -> Path:
    folder.mkdir()
    nvcc = folder / "nvcc"
    nvcc.write_text(
        f"""#!/bin/sh
case "$1" in
  --dryrun) echo '#$ _HERE_={folder}' >&2; echo '#$ TOP={folder}' >&2 ;;
  *) echo 'Cuda compilation tools, release {release}, V{release}.1' ;;
esac
"""
    )
    nvcc.chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include/cuda_fp16.h").write_text("")
    (folder / "lib64").mkdir()
    (folder / "lib64/libcudart.so").write_text("")
    return folder


def test_nvcc_of_another_cuda_major_is_refused(tmp_path: Path) -> None:
    """Guards against kernels linked to another CUDA runtime than torch's, which fail only when they run."""
    folder = fake_nvcc(tmp_path / "cuda", "11.8")
    root = fake_torch(tmp_path / "torch", torch.__version__.split("+")[0], cuda_major="12")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    error = refused(configure(tmp_path / "build", f"-DTorchLibs_ROOT={root}", "-DALLFINITE_USE_CUDA=ON", PATH=path))
    assert "AllFinite: nvcc is of CUDA 11.8, but torch" in error
    assert "is built for CUDA 12" in error


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-DALLFINITE_USE_CUDA=OFF"], "built with ALLFINITE_USE_CUDA=OFF"),
        (["-DALLFINITE_USE_CUDA=ON", "-DALLFINITE_NVCC_ON_PATH=/nowhere/nvcc"], "built without nvcc"),
    ],
)
def test_cuda_half_is_left_out_with_its_reason(tmp_path: Path, arguments: list[str], reason: str) -> None:
    """Guards against a machine without nvcc that cannot build, and against a CPU-only build that does not say so."""
    root = fake_torch(tmp_path / "torch", torch.__version__.split("+")[0], cuda_major="13")
    result = configure(tmp_path / "build", f"-DTorchLibs_ROOT={root}", *arguments)
    assert result.returncode == 0, result.stderr
    assert f"the CUDA half is left out ({reason})" in result.stdout
    assert f'CUDA_REASON = "{reason}"' in (tmp_path / "build/_build_info.py").read_text()
