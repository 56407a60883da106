"""F4 and F5 of rms_norm: independence of the loss scale, of the number of threads and of the other rows."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, assert_linear, assert_same_bits
from support.norm_reference import run_rms_norm


@pytest.mark.parametrize("exponent", [-50, -24, -1, 1, 16, 24, 55])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_f4_gradients_are_linear_in_powers_of_two(dtype, exponent):
    """F4: rescaling, and the range checks, must not change a mantissa: training cannot depend on the loss scale."""
    n = 300
    x, dy, weight = (torch.randn(64, n) * 3).to(dtype), torch.randn(64, n).to(dtype), torch.randn(n).to(dtype)
    # Gradients of 2^-10 to 4 keep |dy| * 2^exponent within [2^-60, 2^60], where the rule holds bit for bit.
    dy = torch.where(dy.abs() < 2**-10, dy.new_tensor(0.25), dy)
    base = run_rms_norm(x, (n,), weight, 1e-5, dy)
    scaled = run_rms_norm(x, (n,), weight, 1e-5, torch.ldexp(dy, torch.tensor(exponent)))
    for name in ("dx", "dweight"):
        assert_linear(base[name], scaled[name], exponent)


@pytest.mark.parametrize("exponent", [-8, 4, 12])
def test_f4_fp16_gradients_are_linear_in_powers_of_two(exponent):
    """F4: the same in fp16, whose own range is the limit."""
    n = 96
    x, dy, weight = torch.randn(80, n).half(), torch.randn(80, n).half(), torch.rand(n).add(0.5).half()
    dy = torch.where(dy.abs() < 2**-3, dy.new_tensor(0.25), dy)
    base = run_rms_norm(x, (n,), weight, 1e-5, dy)
    scaled = run_rms_norm(x, (n,), weight, 1e-5, torch.ldexp(dy, torch.tensor(exponent)))
    for name in ("dx", "dweight"):
        assert_linear(base[name], scaled[name], exponent)


def test_f4_crossing_into_the_rescued_range_changes_no_mantissa():
    """F4: dy * weight beyond 2^60 is scaled first: the same bits as just below it."""
    x, dy, weight = torch.randn(8, 128), torch.rand(8, 128) + 0.5, torch.rand(128) + 0.5
    base = run_rms_norm(x, (128,), weight, 1e-5, dy)
    for exponent in (58, 59, 60, 61, 62, 70, -58, -59, -61, -62, -70):
        scaled = run_rms_norm(x, (128,), weight, 1e-5, torch.ldexp(dy, torch.tensor(exponent)))
        assert_linear(base["dx"], scaled["dx"], exponent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 100), (33, 65), (700, 257), (5000, 64)])
def test_f5_threads_do_not_change_bits(dtype, rows, n):
    """F5: column sums are added in fixed chunks, not one a thread."""
    x, dy, weight = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype), torch.randn(n).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run_rms_norm(x, (n,), weight, 1e-5, dy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, value in results[0].items():
            assert_same_bits(value, other[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [5, 64, 1000])
def test_f5_a_row_does_not_depend_on_its_batch(dtype, n):
    """F5: a row alone, in a batch, and at a misaligned address has the same bits."""
    x, dy, weight = (torch.randn(*s).to(dtype) for s in ((67, n), (67, n), (n,)))
    batch = run_rms_norm(x, (n,), weight, 1e-5, dy)
    for row in (0, 13, 66):
        alone = run_rms_norm(x[row], (n,), weight, 1e-5, dy[row])
        moved = torch.cat([x.new_zeros(1), x[row]])[1:]  # one element off any alignment
        shifted = run_rms_norm(moved, (n,), weight, 1e-5, dy[row])
        for name in ("y", "dx"):
            assert_same_bits(alone[name], batch[name][row])
            assert_same_bits(shifted[name], batch[name][row])


@pytest.mark.parametrize("wanted", ["x", "weight", "x weight"])
def test_gradients_do_not_depend_on_which_are_wanted(wanted):
    """The kernel has a path with and one without column sums: the bits of dx are the same on both."""
    tensors = {"x": torch.randn(50, 70), "weight": torch.randn(70)}
    dy = torch.randn(50, 70)
    full = run_rms_norm(tensors["x"], (70,), tensors["weight"], 1e-5, dy)
    leaves = {name: t.clone().requires_grad_(name in wanted.split()) for name, t in tensors.items()}
    allfinite.rms_norm(leaves["x"], (70,), leaves["weight"], 1e-5).backward(dy)
    for name, leaf in leaves.items():
        if name in wanted.split():
            assert_same_bits(leaf.grad, full["d" + name])
        else:
            assert leaf.grad is None
