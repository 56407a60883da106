"""The CPU glue runs on torch's threads: at::parallel_for is a plain loop in a library compiled without OpenMP."""

from pathlib import Path

import pytest
import torch

import allfinite
from support.bounds import assert_same_bits


def test_the_library_starts_parallel_regions():
    """Speed: without the call of the OpenMP runtime every op would run on one thread, and no result would tell."""
    library = next(Path(allfinite.__file__).parent.glob("lib*/liballfinite.so"))
    if "openmp" not in torch.__config__.parallel_info().lower():
        pytest.skip("a torch with threads of its own")
    data = library.read_bytes()
    assert b"GOMP_parallel" in data or b"__kmpc_fork_call" in data


@pytest.mark.parametrize("threads", [2, 5])
def test_f5_norm_does_not_depend_on_the_number_of_threads(threads):
    """F5: chunks of rows are fixed by the shape, so dgamma and dbeta add up in one order."""
    x, dy, weight, bias = torch.randn(1003, 384), torch.randn(1003, 384), torch.randn(384), torch.randn(384)
    results, before = [], torch.get_num_threads()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            y = allfinite.layer_norm(leaves[0], (384,), *leaves[1:])
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
