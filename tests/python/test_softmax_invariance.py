"""F4 and F5 of softmax: independence of the loss scale, of the number of threads and of the other rows."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, assert_same_bits
from support.softmax_reference import run_softmax


def assert_linear(base, scaled, exponent):
    """Bit-equal after scaling back, wherever both results are normal and finite; enough of them are."""
    info = torch.finfo(base.dtype)
    normal = (base.abs() >= info.tiny) & (scaled.abs() >= info.tiny) & scaled.isfinite()
    normal |= (base == 0) & (scaled == 0)
    back = torch.ldexp(scaled.double(), torch.tensor(-exponent))
    assert torch.equal(base.double()[normal], back[normal])
    assert normal.double().mean() > 0.8


@pytest.mark.parametrize("exponent", [-50, -24, -1, 1, 16, 24, 58])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_f4_gradients_are_linear_in_powers_of_two(dtype, exponent):
    """F4: sums and factors of a row must not lose bits with the loss scale; of a bias too."""
    x, dy, bias = torch.randn(32, 300).mul(4).to(dtype), torch.randn(32, 300).to(dtype), torch.randn(300).to(dtype)
    for mask in (None, bias):
        for scale in (0.3, 1e6):
            base = run_softmax(x / scale, 1, mask, scale, dy)
            scaled = run_softmax(x / scale, 1, mask, scale, torch.ldexp(dy, torch.tensor(exponent)))
            for name in base.keys() - {"y"}:
                assert_linear(base[name], scaled[name], exponent)


@pytest.mark.parametrize("exponent", [-4, 4, 10])
def test_f4_fp16_gradients_are_linear_in_powers_of_two(exponent):
    """F4: the same in fp16, whose own range is the limit."""
    x, dy = torch.randn(32, 6).half(), torch.randn(32, 6).half()
    dy = torch.where(dy.abs() < 2**-3, dy.new_tensor(0.25), dy)
    base, scaled = (run_softmax(x, 1, None, 1.0, d) for d in (dy, torch.ldexp(dy, torch.tensor(exponent))))
    assert_linear(base["dx"], scaled["dx"], exponent)


def test_f4_the_last_factor_near_the_end_of_the_range():
    """F4: beyond 2^120 the last products are done in the wider type: the same bits as below it."""
    x, dy = torch.randn(8, 64), torch.rand(8, 64) + 0.5
    base = run_softmax(x, 1, None, 1.0, dy)["dx"]
    for exponent in (118, 119, 120, 121, 124):
        assert_linear(base, run_softmax(x, 1, None, 1.0, torch.ldexp(dy, torch.tensor(exponent)))["dx"], exponent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 100), (33, 65), (700, 257), (3000, 64)])
@pytest.mark.parametrize("shared", [True, False])
def test_f5_threads_do_not_change_bits(dtype, rows, n, shared):
    """F5: a broadcast bias is summed in fixed chunks, not one a thread."""
    x, dy = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
    bias = torch.randn(n if shared else (rows, n)).expand(n if shared else (rows, n)).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run_softmax(x, 1, bias, 0.5, dy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, value in results[0].items():
            assert_same_bits(value, other[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [5, 64, 1000])
@pytest.mark.parametrize("kind", ["none", "bool", "bias"])
def test_f5_a_row_does_not_depend_on_its_batch(dtype, n, kind):
    """F5: a row alone, in a batch, and at a misaligned address has the same bits."""
    x, dy = torch.randn(67, n).to(dtype), torch.randn(67, n).to(dtype)
    mask = {"none": None, "bool": torch.rand(n) < 0.7, "bias": torch.randn(n).to(dtype)}[kind]
    batch = run_softmax(x, 1, mask, 0.3, dy)
    for row in (0, 13, 66):
        moved = torch.cat([x.new_zeros(1), x[row]])[1:]  # one element off any alignment
        for alone in (run_softmax(x[row], 0, mask, 0.3, dy[row]), run_softmax(moved, 0, mask, 0.3, dy[row])):
            for name in ("y", "dx"):
                assert_same_bits(alone[name], batch[name][row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_do_not_depend_on_what_is_differentiated(dtype):
    """The kernel keeps weights for backward or not, in another place: the bits of the output are the same."""
    x = torch.randn(9, 77).to(dtype)
    with torch.no_grad():
        plain = allfinite.softmax(x, 1, scale=0.3)
    assert_same_bits(allfinite.softmax(x.requires_grad_(), 1, scale=0.3).detach(), plain)
