"""Shared by all Python tests: the support package on the path and a fixed seed; in the header the contract's."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from support.contract_seed import SEED


def pytest_report_header() -> str:
    return f"contract harness: ALLFINITE_CONTRACT_SEED={SEED} repeats its cases"


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
