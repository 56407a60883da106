"""F3 of softmax: every result against float64 on the same rounded inputs."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_within_one_ulp
from support.softmax_reference import assert_softmax_accurate, run_softmax, softmax_reference

# (shape, dim): one column, odd, a vector less one, a block and more, a long row, other dimensions.
SHAPES = [
    ((3, 1), 1),
    ((5, 2), -1),
    ((2, 3, 7), -1),
    ((4, 63), 1),
    ((6, 257), 1),
    ((2, 1024), 1),
    ((100,), 0),
    ((2, 131072), 1),
    ((7, 100), 0),
    ((2, 5, 33, 4), 2),
]
SCALES = (1.0, 0.125, 0.3, -0.7, 0.0)


def random_mask(kind, shape, dtype):
    """A mask of which about a third hides: bool, of input's dtype, fp32 or fp64."""
    hidden = torch.rand(shape) < 0.3
    if kind == "bool":
        return ~hidden
    kinds = {"own": dtype, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    return torch.randn(shape, dtype=torch.float64).mul(3).masked_fill(hidden, -torch.inf).to(kinds[kind])


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_all_shapes(dtype, shape, dim):
    """F3: tails of vectors, rows longer than a block, rows of one element and other dimensions than the last."""
    x, dy = (torch.randn(shape, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
    for scale in SCALES:
        assert_softmax_accurate(x, dim, None, scale, dy)


@pytest.mark.parametrize("kind", ["bool", "own", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_masks_of_every_dtype(dtype, kind):
    """F3: bool masks and biases of every dtype, full and broadcast, with the gradient of the bias."""
    for shape, dim in (((6, 257), 1), ((7, 100), 0), ((2, 5, 33, 4), 2), ((3, 1), 1)):
        for full in (True, False):
            sizes = [s if full or i == dim else 1 for i, s in enumerate(shape)]
            mask = random_mask(kind, sizes, dtype)
            x, dy = (torch.randn(shape, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
            for scale in (1.0, 0.3, -2.0):
                assert_softmax_accurate(x, dim, mask, scale, dy)


@pytest.mark.parametrize("offset", [0.0, 1e3, 3e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_large_biases_cost_no_digits(dtype, offset):
    """F3: x + bias rounded in fp32 is off by 2^-9 at 3e4, and so is every weight."""
    x = torch.randn(4, 200, dtype=torch.float64).add(offset).to(dtype)
    bias = torch.randn(200, dtype=torch.float64).sub(offset).to(dtype)
    assert_softmax_accurate(x, 1, bias, 1.0, torch.randn(4, 200).to(dtype))


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3, 1 / 3, 7.7])
def test_f3_fp32_weights_far_below_the_largest(scale):
    """F3: half an ulp of an exponent of 87 is 2^-18: a second rounding of it would leave the bound of 2^-17."""
    x = torch.linspace(-90, 0, 20001).div(scale).unsqueeze(0)
    exact = softmax_reference(x, 1, None, scale)["y"].value
    got = allfinite.softmax(x, 1, scale=scale).double()
    kept = exact > 2**-126
    assert ((got - exact).abs()[kept] <= 2**-17 * exact[kept]).all()
    assert kept.sum() > 17000


@pytest.mark.parametrize("value", [0.0, 1.0, 1.1, -3.3])
@pytest.mark.parametrize("n", [4096, 128256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_rows_of_equal_values(dtype, value, n):
    """F3: sums of n equal weights: kept in fp16 they overflow at 65504, in bf16 they stop at 256."""
    y = allfinite.softmax(torch.full((1, n), value).to(dtype), 1)
    assert torch.equal(y, torch.full((1, n), 1 / n, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f3_gradients_come_from_weights_that_were_not_rounded(dtype):
    """F3: with y in 16 bits, dx of a row whose dy is nearly constant is off by far more than one ulp."""
    x, dy = torch.randn(16, 512).to(dtype), torch.randn(16, 512).mul(0.01).add(1).to(dtype)
    exact = softmax_reference(x, 1, None, 1.0, dy)["dx"]
    assert_within_one_ulp(run_softmax(x, 1, None, 1.0, dy)["dx"], exact.value, exact.terms)
    rounded = allfinite.softmax(x, 1).double()
    naive = (rounded * (dy.double() - (rounded * dy.double()).sum(1, keepdim=True))).to(dtype)
    with pytest.raises(AssertionError):
        assert_within_one_ulp(naive, exact.value, exact.terms)


def test_f3_one_rounding_of_the_output():
    """F3: 16-bit outputs are the rounded exact value but where that lies at the middle of two neighbours."""
    for dtype in SIXTEEN_BIT:
        x = torch.randn(64, 256).to(dtype)
        y = allfinite.softmax(x, 1)
        exact = softmax_reference(x, 1)["y"].value
        # fp32 arithmetic moves a value across a rounding boundary with a chance of about 2^-10 an element (fp16).
        assert (y != exact.to(dtype)).double().mean() < 4e-3


@pytest.mark.parametrize("shared", [1, 31, 33, 600])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f3_the_gradient_of_a_shared_bias_is_summed_in_double(dtype, shared):
    """F3: sums over broadcast rows in 16 bits stop growing; chunks of rows must count each row once."""
    x, bias = torch.randn(shared, 3, 40).to(dtype), torch.randn(3, 40).to(dtype)
    dy = torch.ones(40).cumsum(0).expand(shared, 3, 40).to(dtype)
    assert_softmax_accurate(x, -1, bias, 1.0, dy)
