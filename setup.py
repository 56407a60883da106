"""Drives CMake: CMakeLists.txt is the one truth about the build, this file only runs it for pip.

Environment: ALLFINITE_USE_CUDA=0 leaves the CUDA half out, ALLFINITE_CUDA_ARCHITECTURES="80;90" chooses its targets,
ALLFINITE_BUILD_DIR moves the build folder (default: build), CMAKE_ARGS adds anything else.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text()
    match = re.search(r"project\(AllFinite VERSION ([0-9.]+)", text)
    assert match, "CMakeLists.txt names no version"
    return match.group(1)


def tool(name: str) -> str:
    """``cmake`` or ``ninja``: the one beside this Python, the one of a build environment, or the one on the PATH."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not found:
        sys.exit(f"AllFinite: {name} is missing; type: pip install {name}")
    return found


class CMakeBuild(build_ext):
    """Builds liballfinite.so and _C with CMake and installs both, with headers and CMake files, into the package."""

    def run(self) -> None:
        if importlib.util.find_spec("torch") is None:
            sys.exit(
                "AllFinite: torch is not there. It is built against the torch that is installed: "
                "type pip install torch, then pip install --no-build-isolation ."
            )
        build = Path(os.environ.get("ALLFINITE_BUILD_DIR", ROOT / "build"))
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "python" / "allfinite" if in_place else Path(self.build_lib).resolve() / "allfinite"
        configure = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        cmake = tool("cmake")
        try:
            subprocess.run([cmake, "-S", str(ROOT), "-B", str(build), *configure], check=True)
            subprocess.run([cmake, "--build", str(build)], check=True)
            subprocess.run([cmake, "--install", str(build), "--prefix", str(package)], check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"AllFinite: the build stopped, see the message above ({error.cmd[0]} {error.cmd[1]})")

    def get_outputs(self) -> list[str]:
        return []


setup(version=version(), ext_modules=[Extension("allfinite._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
