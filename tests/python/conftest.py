"""Shared by all Python tests: the support package on the path, and a fixed seed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
