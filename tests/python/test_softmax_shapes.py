"""Shapes, strides, dimensions and broadcast masks of softmax."""

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, assert_same_bits
from support.softmax_reference import assert_softmax_accurate, run_softmax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_strides_give_the_bits_of_contiguous_tensors(dtype, dim):
    """Strided input, mask and dy, over every dimension: a kernel that reads past the strides gives other values."""
    x, dy, bias = (torch.randn(6, 8, 10).to(dtype) for _ in range(3))
    want = run_softmax(x, dim, bias, 0.5, dy)
    wide, steps = torch.empty(6, 8, 13, dtype=dtype), torch.empty(6, 8, 20, dtype=dtype)
    wide[..., 2:12], steps[..., ::2] = x, bias
    for x_view in (wide[..., 2:12], x.transpose(0, 2).contiguous().transpose(0, 2), x.flip(0).flip(0)):
        got = run_softmax(x_view, dim, steps[..., ::2], 0.5, dy.permute(2, 0, 1).contiguous().permute(1, 2, 0))
        for name, value in want.items():
            assert_same_bits(got[name], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_masks_of_every_broadcast(dtype, dim):
    """Each dimension of a mask is 1 or full, or missing in front: values and the gradient of a bias."""
    shape = (2, 3, 4, 5)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for which in range(16):
        sizes = [s if which >> d & 1 else 1 for d, s in enumerate(shape)]
        while sizes and sizes[0] == 1 and which % 3 == 0:
            sizes = sizes[1:]
        assert_softmax_accurate(x, dim, torch.randn(sizes).to(dtype), 0.5, dy)
        assert_softmax_accurate(x, dim, torch.rand(sizes) < 0.6, 0.5, dy)


def test_expanded_masks_and_inputs():
    """Stride 0 in a mask of full size, in the input and in dy (that of y.sum())."""
    row = torch.randn(1, 12)
    assert_softmax_accurate(row.expand(5, 12), 1, torch.randn(5, 1).expand(5, 12), 1.0, torch.ones(()).expand(5, 12))
    hidden = torch.tensor([[True], [False]]).expand(2, 3)
    assert allfinite.softmax(torch.zeros(2, 3), 1, mask=hidden)[1].tolist() == [0.0, 0.0, 0.0]


def test_a_mask_with_more_steps_than_the_kernel_takes():
    """Broadcast and full dimensions in turn, 18 of them: more strides than the argument struct has room for."""
    shape = [2] * 18 + [3]
    x, dy = torch.randn(shape), torch.randn(shape)
    mask = torch.randn([s if d % 2 == 0 else 1 for d, s in enumerate(shape)])
    assert_softmax_accurate(x, -1, mask, 1.0, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_no_dimension(dtype):
    """As torch: one row of one element, over dimension 0 or -1."""
    for dim in (0, -1):
        result = run_softmax(
            torch.tensor(3.0).to(dtype), dim, torch.tensor(-2.0).to(dtype), 1.0, torch.ones((), dtype=dtype)
        )
        assert {name: (t.shape, t.item()) for name, t in result.items()} == {
            "y": ((), 1.0),
            "dx": ((), 0.0),
            "dmask": ((), 0.0),
        }
    assert allfinite.softmax(torch.tensor(3.0).to(dtype), 0, mask=torch.tensor(False)).item() == 0.0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_tensors(dtype, shape):
    """No row, or rows of no element: empty results, and a gradient of zeros for the mask."""
    for dim in range(len(shape)):
        x = torch.empty(shape, dtype=dtype)
        assert run_softmax(x, dim, None, 1.0, x)["dx"].shape == shape
        ones = torch.ones([1] * len(shape), dtype=dtype)
        assert run_softmax(x, dim, ones, 1.0, x)["dmask"].tolist() == torch.zeros([1] * len(shape)).tolist()


def test_output_is_contiguous_and_separate():
    """The output never aliases the input, and is contiguous whatever the input's strides and dim."""
    x = torch.randn(4, 6).t()
    before = x.clone()
    for dim in (0, 1):
        y = allfinite.softmax(x, dim)
        assert y.is_contiguous()
        y.zero_()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_agrees_with_torch(dim):
    """The same function as torch's where that is right: neither dims nor signs are mixed up."""
    x, mask = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    torch.testing.assert_close(allfinite.softmax(x, dim, mask=mask, scale=-0.3), F.softmax(x * -0.3 + mask, dim))
