"""Loads the C++ library once, after checking that it was built for the torch that is running."""

from pathlib import Path

import torch


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def load() -> None:
    """Registers ``torch.ops.allfinite``.

    Raises:
        ImportError: the library is not built, or was built for another minor version of torch, whose C++ ABI differs.
    """
    try:
        from allfinite import _build_info
    except ImportError as error:
        raise ImportError(
            "allfinite is not built: run `make build` in a checkout, or `pip install --no-build-isolation .`"
        ) from error
    if _minor(_build_info.TORCH_VERSION) != _minor(torch.__version__):
        raise ImportError(
            f"allfinite was built for torch {_minor(_build_info.TORCH_VERSION)}, but torch {torch.__version__} is "
            "installed: rebuild it with `pip install --no-build-isolation --force-reinstall allfinite`"
        )
    torch.ops.load_library(str(Path(__file__).parent / "lib" / "liballfinite.so"))  # type: ignore[no-untyped-call]
