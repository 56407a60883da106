"""A folder that CMake takes for an installed torch."""

from pathlib import Path


def fake_torch(root: Path, version: str, cuda_major: str = "") -> Path:
    """A folder that looks like an installed torch to CMake: a version header and the names of its libraries."""
    header = root / "include/torch/csrc/api/include/torch/version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in numbers))
    (root / "lib").mkdir()
    if cuda_major:
        (root / "lib/libc10_cuda.so").write_bytes(b"\0libcudart.so." + cuda_major.encode() + b"\0")
    return root
