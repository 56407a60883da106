"""F3 of rms_norm: every result against float64 on the same rounded inputs."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits, assert_within_one_ulp
from support.norm_reference import assert_rms_norm_accurate, rms_norm_reference, run_rms_norm

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
# input dtype, weight dtype (None: absent)
MIXED = [(dtype, weight) for dtype in SIXTEEN_BIT for weight in (None, dtype, torch.float32)] + [
    (dtype, weight) for dtype in (torch.float32, torch.float64) for weight in (None, dtype)
]


def random_case(batch, shape, dtype, weight_dtype):
    x = torch.randn(*batch, *shape, dtype=torch.float64).mul(2).add(0.5).to(dtype)
    weight = None if weight_dtype is None else torch.randn(shape, dtype=torch.float64).to(weight_dtype)
    dy = torch.randn(*batch, *shape, dtype=torch.float64).to(dtype)
    return x, weight, dy


@pytest.mark.parametrize(("batch", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_all_shapes(dtype, batch, shape):
    """F3: tails of vectors, rows longer than a block and rows of one element round as well as any other."""
    x, weight, dy = random_case(batch, shape, dtype, dtype)
    assert_rms_norm_accurate(x, shape, weight, 1e-5, dy)


@pytest.mark.parametrize(("dtype", "weight_dtype"), MIXED, ids=str)
def test_f3_mixed_dtypes(dtype, weight_dtype):
    """F3: a fp32 weight beside 16-bit input is neither refused nor a reason for fp32 output (as in torch)."""
    x, weight, dy = random_case((37,), (50,), dtype, weight_dtype)
    assert_rms_norm_accurate(x, (50,), weight, 1e-5, dy)
    result = run_rms_norm(x, (50,), weight, 1e-5, dy)
    assert result["y"].dtype == result["dx"].dtype == dtype
    assert weight is None or result["dweight"].dtype == weight_dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_default_eps_is_that_of_the_arithmetic(dtype):
    """F3: eps=None is fp32's epsilon for 16 bits too (theirs would be 1e-3 and 8e-3), and fp64's for fp64."""
    x = torch.randn(3, 40, dtype=torch.float64).mul(2e-4).to(dtype)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert_rms_norm_accurate(x, (40,))
    assert_same_bits(allfinite.rms_norm(x, (40,)), allfinite.rms_norm(x, (40,), eps=eps))


@pytest.mark.parametrize("mean", [0, 1e3, 1e6])
def test_f3_fp32_does_not_depend_on_the_mean(mean):
    """F3: a large common offset makes all terms of a row's sums alike: they must not drift."""
    x, weight, dy = torch.randn(8, 4096).add(mean), torch.randn(4096), torch.randn(8, 4096)
    assert_rms_norm_accurate(x, (4096,), weight, 1e-5, dy)


@pytest.mark.parametrize("rows", [512, 4096, 32768])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f3_many_rows_do_not_stall_the_column_sums(dtype, rows):
    """F3: column sums kept in 16 bits stop at 256 (bf16) or 2048 (fp16), whatever the number of rows."""
    x, dy = torch.ones(rows, 64, dtype=dtype), torch.ones(rows, 64, dtype=dtype)
    assert run_rms_norm(x, (64,), torch.ones(64), 0.0, dy)["dweight"].tolist() == [rows] * 64
    assert_rms_norm_accurate(torch.randn(rows, 64).to(dtype), (64,), torch.ones(64, dtype=dtype), 1e-5, dy)


@pytest.mark.parametrize("constant", [1.4142135, 1.0000001, 1.7320508, 1.1, 0.3])
def test_f3_column_sums_do_not_round_the_same_way_forever(constant):
    """F3: with equal terms each addition errs in the same direction, so long fp32 sums drift linearly."""
    dy, x = torch.full((4096, 40), constant), torch.ones(4096, 40)
    assert_rms_norm_accurate(x, (40,), torch.full((40,), 1.3), 0.37, dy)


@pytest.mark.parametrize("value", [0.1, 1.1, 1.4142135, 0.7071068, 1.2345678, 3.3333333, 5.5555555, 1.0000001])
@pytest.mark.parametrize("n", [4096, 5001])
def test_f3_row_sums_do_not_round_the_same_way_forever(value, n):
    """F3: a constant row adds equal squares, whose roundings all point one way; so do the sums of backward."""
    x = torch.full((1, n), value)
    assert_rms_norm_accurate(x, (n,), torch.full((n,), 1.1), 1e-5, torch.full((1, n), value) + torch.randn(1, n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_eps_zero(dtype):
    """F3: eps = 0 is allowed and exact."""
    assert_rms_norm_accurate(torch.randn(2, 12).to(dtype), (12,), None, 0.0, torch.randn(2, 12).to(dtype))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_f3_statistics_of_sixteen_bit_rows_are_not_rounded(dtype, weight_dtype):
    """F3: rstd stored in 16 bits costs 2^-9 of every element, and overflows in fp16 for small rows."""
    base = torch.randn(16, 96)
    for x in ((base * 0.5 + 1000).to(dtype), (base * 2e-6).to(dtype)):
        weight = None if weight_dtype is None else torch.randn(96, dtype=weight_dtype)
        assert_rms_norm_accurate(x, (96,), weight, 1e-12, (torch.randn(16, 96) * 1e-3).to(dtype))


def test_f3_one_rounding_of_the_output():
    """F3: xhat rounded to 16 bits before the weight, as model code often does, would be two roundings; ours is one."""
    x, weight = torch.randn(64, 256).half(), torch.randn(256).half()
    exact = rms_norm_reference(x, (256,), weight)["y"].value
    actual = allfinite.rms_norm(x, (256,), weight)
    assert_within_one_ulp(actual, exact)
    # fp32 arithmetic moves a value across a rounding boundary with a chance of about 2^-12 an element.
    assert (actual != exact.half()).double().mean() < 2e-3
