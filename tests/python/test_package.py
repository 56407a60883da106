"""What a source distribution holds, and what an installed package says of itself."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import allfinite

ROOT = Path(__file__).parents[2]


def tracked_files() -> set[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("needs a git checkout")
    return {name for name in listing.stdout.split("\n") if name and not name.startswith(".")}


def test_sdist_holds_every_tracked_file(tmp_path: Path) -> None:
    """Guards against a source distribution that cannot be built or tested because a file was left out."""
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert tracked_files() - packed == set()


def test_version_is_cmakes() -> None:
    """Guards against two versions: CMakeLists.txt is the one truth."""
    match = re.search(r"project\(AllFinite VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert match is not None
    assert allfinite.__version__ == match.group(1)


def test_cmake_prefix_path_holds_the_package_files() -> None:
    """Guards against an install whose find_package(AllFinite) finds nothing."""
    assert (Path(allfinite.utils.cmake_prefix_path) / "AllFinite" / "AllFiniteConfig.cmake").is_file()


def test_public_names_exist() -> None:
    """Guards against an __all__ that names what is not there."""
    for name in allfinite.__all__:
        assert hasattr(allfinite, name), name


def test_other_torch_is_refused_in_one_sentence() -> None:
    """Guards against loading a library of another C++ ABI, which crashes instead of raising."""
    script = "import torch; torch.__version__ = '2.3.0'; import allfinite"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"ImportError: allfinite was built for torch \d+\.\d+, but torch 2\.3\.0 is installed: .*", last
    )
