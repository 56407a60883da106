"""F3 of layer_norm: every result against float64 on the same rounded inputs."""

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_relative_l2, assert_within_one_ulp, relative_l2
from support.norm_reference import assert_layer_norm_accurate, layer_norm_reference, run_layer_norm

# (batch shape, normalized shape): one column, odd, a vector less one, several dimensions, many rows, a long row.
SHAPES = [
    ((3,), (1,)),
    ((5,), (2,)),
    ((2, 3), (7,)),
    ((4,), (63,)),
    ((3,), (4, 5, 3)),
    ((6,), (257,)),
    ((2,), (1024,)),
    ((), (100,)),
    ((1000,), (33,)),
    ((2,), (131072,)),
]
# input dtype, weight dtype, bias dtype (None: absent)
MIXED = [
    (dtype, weight, bias)
    for dtype in SIXTEEN_BIT
    for weight in (None, dtype, torch.float32)
    for bias in (None, dtype, torch.float32)
] + [(dtype, w, b) for dtype in (torch.float32, torch.float64) for w in (None, dtype) for b in (None, dtype)]


def random_case(batch, shape, dtype, weight_dtype, bias_dtype):
    x = torch.randn(*batch, *shape, dtype=torch.float64).mul(2).add(0.5).to(dtype)
    weight = None if weight_dtype is None else torch.randn(shape, dtype=torch.float64).to(weight_dtype)
    bias = None if bias_dtype is None else torch.randn(shape, dtype=torch.float64).to(bias_dtype)
    dy = torch.randn(*batch, *shape, dtype=torch.float64).to(dtype)
    return x, weight, bias, dy


@pytest.mark.parametrize(("batch", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_all_shapes(dtype, batch, shape):
    """F3: tails of vectors, rows longer than a block and rows of one element round as well as any other."""
    x, weight, bias, dy = random_case(batch, shape, dtype, dtype, dtype)
    assert_layer_norm_accurate(x, shape, weight, bias, 1e-5, dy)


@pytest.mark.parametrize(("dtype", "weight_dtype", "bias_dtype"), MIXED, ids=str)
def test_f3_mixed_dtypes(dtype, weight_dtype, bias_dtype):
    """F3: fp32 weights beside 16-bit input are neither refused (as by torch on CUDA) nor rounded to 16 bits first."""
    x, weight, bias, dy = random_case((37,), (50,), dtype, weight_dtype, bias_dtype)
    assert_layer_norm_accurate(x, (50,), weight, bias, 1e-5, dy)
    gradients = run_layer_norm(x, (50,), weight, bias, 1e-5, dy)
    assert gradients["y"].dtype == gradients["dx"].dtype == dtype
    assert weight is None or gradients["dweight"].dtype == weight_dtype
    assert bias is None or gradients["dbias"].dtype == bias_dtype


@pytest.mark.parametrize("mean", [0, 1e2, 1e3, 1e4, 1e5, 1e6])
def test_f3_fp32_does_not_depend_on_the_mean(mean):
    """F3: E[x^2] - E[x]^2, and a mean kept in one float, lose digits as mean / std grows, in y, dx and dgamma."""
    x = torch.randn(8, 4096).add(mean)
    weight, bias, dy = torch.randn(4096), torch.randn(4096), torch.randn(8, 4096)
    exact = layer_norm_reference(x, (4096,), weight, bias, 1e-5, dy)
    actual = run_layer_norm(x, (4096,), weight, bias, 1e-5, dy)
    assert_relative_l2(actual["y"], exact["y"].value, 2e-7)
    assert_relative_l2(actual["dx"], exact["dx"].value, 2e-7, exact["dx"].terms)
    # Tighter than "1 ulp + 2^-21 of the terms", which rows of one sign alone would need.
    assert_relative_l2(actual["dweight"], exact["dweight"].value, 2e-7)


def test_f3_torch_loses_digits_at_a_large_mean():
    """What the row before guards against is real: torch's fp32 layer_norm is off by more than 1e-3 at mean 1e6."""
    x = torch.randn(8, 4096).add(1e6)
    exact = layer_norm_reference(x, (4096,))["y"].value
    assert relative_l2(F.layer_norm(x, (4096,)), exact) > 1e-3


@pytest.mark.parametrize("rows", [512, 4096, 32768])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f3_many_rows_do_not_stall_the_column_sums(dtype, rows):
    """F3: column sums kept in bf16 stop at 256 (torch on the CPU), whatever the number of rows."""
    x, dy = torch.randn(rows, 64).to(dtype), torch.ones(rows, 64, dtype=dtype)
    weight, bias = torch.ones(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    assert_layer_norm_accurate(x, (64,), weight, bias, 1e-5, dy)
    assert run_layer_norm(x, (64,), weight, bias, 1e-5, dy)["dbias"].tolist() == [rows] * 64


@pytest.mark.parametrize("constant", [1.4142135, 1.0000001, 1.7320508, 1.1, 0.3])
def test_f3_column_sums_do_not_round_the_same_way_forever(constant):
    """F3: with equal terms each addition errs in the same direction, so long fp32 sums drift linearly."""
    dy = torch.full((4096, 40), constant)
    x = torch.randn(4096, 1).sign().expand(4096, 40) * torch.tensor([1.0, -1.0]).repeat(20)
    weight, bias = torch.full((40,), 1.3), torch.zeros(40)
    assert_layer_norm_accurate(x, (40,), weight, bias, 0.37, dy)


@pytest.mark.parametrize("value", [0.1, 1.1, 1.4142135, 0.7071068, 1.2345678, 3.3333333, 5.5555555, 1.0000001])
@pytest.mark.parametrize("n", [4096, 5001])
def test_f3_row_sums_do_not_round_the_same_way_forever(value, n):
    """F3: a row of two values adds equal squares, whose roundings all point one way; so do the sums of backward."""
    x = torch.full((1, n), value)
    x[:, ::2] *= -1
    dy = torch.full((1, n), value) + x
    assert_layer_norm_accurate(x, (n,), torch.full((n,), 1.1), torch.full((n,), 0.3), 1e-5, dy)


def test_f3_half_row_of_small_values_matches_the_exact_result():
    """F3: torch's fp16 layer_norm of 0.1 * rand once differed from fp32 in 45 % of the elements."""
    x = (torch.rand(1, 5, 128) * 0.1).half()
    assert_layer_norm_accurate(x, (128,), dy=torch.randn(1, 5, 128).half())


def test_f3_large_common_offset():
    """F3: rows of mean 2000 (std 1) and of mean 100 (std 0.01) keep their variance."""
    for x in (torch.randn(5, 4) + 2000, torch.randn(4, 32768) * 0.01 + 100):
        n = x.shape[1]
        assert_relative_l2(
            allfinite.layer_norm(x, (n,), eps=1e-12), layer_norm_reference(x, (n,), eps=1e-12)["y"].value, 2e-7
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_eps_zero(dtype):
    """F3: eps = 0 is allowed and exact (torch's bf16 results differ between CPU and CUDA there)."""
    assert_layer_norm_accurate(torch.randn(2, 12).to(dtype), (12,), eps=0.0, dy=torch.randn(2, 12).to(dtype))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_f3_statistics_of_sixteen_bit_rows_are_not_rounded(dtype, weight_dtype):
    """F3: mean and rstd stored in 16 bits cost 2^-9 of the mean, and overflow where var < 2.3e-10 (fp16)."""
    base = torch.randn(16, 96)
    for x in ((base * 0.5 + 1000).to(dtype), (base * 2e-6).to(dtype)):
        weight = None if weight_dtype is None else torch.randn(96, dtype=weight_dtype)
        assert_layer_norm_accurate(x, (96,), weight, None, 1e-12, (torch.randn(16, 96) * 1e-3).to(dtype))


def test_f3_one_rounding_of_the_output():
    """F3: xhat rounded to 16 bits before the weight would be 3 roundings; ours is one."""
    x, weight, bias = torch.randn(64, 256).half(), torch.randn(256).half(), torch.randn(256).half()
    exact = layer_norm_reference(x, (256,), weight, bias)["y"].value
    actual = allfinite.layer_norm(x, (256,), weight, bias)
    assert_within_one_ulp(actual, exact)
    # fp32 arithmetic moves a value across a rounding boundary with a chance of about 2^-12 an element.
    assert (actual != exact.half()).double().mean() < 2e-3
