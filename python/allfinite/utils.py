"""Where the installed package keeps its C++ side."""

from pathlib import Path

cmake_prefix_path: str = str(Path(__file__).parent / "share" / "cmake")
"""For ``CMAKE_PREFIX_PATH`` in C++ builds against the installed package, as ``torch.utils.cmake_prefix_path``."""
