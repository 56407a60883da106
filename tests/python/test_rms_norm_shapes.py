"""Shapes, strides and absent parameters of rms_norm."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, assert_same_bits
from support.norm_reference import assert_rms_norm_accurate, run_rms_norm
from support.views import views


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(10,), (8, 10), (6, 8, 10)])
def test_any_strides_give_the_bits_of_contiguous_tensors(dtype, shape):
    """Strided input, weight and dy: a kernel that reads past the strides would give other values."""
    x, dy, full = (torch.randn(6, 8, 10).to(dtype) for _ in range(3))
    weight = full[(0,) * (3 - len(shape))].clone()
    want = run_rms_norm(x, shape, weight, 1e-5, dy)
    strided_weight = weight.new_empty(*shape, 2)[..., 0].copy_(weight)
    for x_view, dy_view in zip(views(x).values(), reversed(views(dy).values()), strict=True):
        got = run_rms_norm(x_view, shape, strided_weight, 1e-5, dy_view)
        for key in want:
            assert_same_bits(got[key], want[key])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_tensors(dtype):
    """Stride 0: one row for all, one element for a row, and the dy of y.sum()."""
    row, ones = torch.randn(1, 12).to(dtype), torch.ones((), dtype=dtype)
    assert_rms_norm_accurate(row.expand(5, 12), (12,), ones.expand(12), 1e-5, torch.randn(5, 12).to(dtype))
    assert_rms_norm_accurate(torch.randn(5, 12).to(dtype), (12,), row[0], 1e-5, ones.expand(5, 12))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(0,), (3, 0), (0, 2)])
def test_empty_batch(dtype, batch):
    """No row: empty output and dx, and a gradient of zeros (not uninitialised memory) for the weight."""
    x, weight = torch.empty(*batch, 6, dtype=dtype), torch.ones(6, dtype=dtype)
    result = run_rms_norm(x, (6,), weight, 1e-5, torch.empty_like(x))
    assert result["y"].shape == result["dx"].shape == x.shape
    assert torch.equal(result["dweight"], torch.zeros(6, dtype=dtype))


def test_empty_normalized_dimension():
    """Rows of no element: an empty output, as torch gives."""
    x = torch.empty(3, 0, requires_grad=True)
    y = allfinite.rms_norm(x, (0,), torch.empty(0))
    assert y.shape == (3, 0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (3, 0)


def test_the_whole_tensor_is_one_row():
    """No batch dimension: one row; dweight then is one product each."""
    assert_rms_norm_accurate(torch.randn(4, 5), (4, 5), torch.randn(4, 5), 1e-5, torch.randn(4, 5))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 511, 512, 513])
def test_chunks_of_rows(rows):
    """The column sums are taken in chunks of rows: every row counts once at the edges of the chunks."""
    assert_rms_norm_accurate(torch.randn(rows, 8), (8,), torch.randn(8), 1e-5, torch.randn(rows, 8))


def test_output_is_contiguous_and_separate():
    """The output never aliases the input, and is contiguous whatever the input's strides."""
    x = torch.randn(4, 6).t()
    y = allfinite.rms_norm(x, (4,))
    assert y.is_contiguous()
    before = x.clone()
    y.zero_()
    assert torch.equal(x, before)


def test_torch_size_and_list_as_normalized_shape():
    """All that F.rms_norm takes as normalized_shape."""
    x = torch.randn(2, 3, 4)
    want = allfinite.rms_norm(x, (3, 4))
    for shape in ([3, 4], x.shape[1:], torch.Size([3, 4])):
        assert_same_bits(allfinite.rms_norm(x, shape), want)
