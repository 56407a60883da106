"""F1, F2 and F7 of rms_norm: the whole input range, NaN and infinity, rows on the edge."""

import math

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_relative_l2, assert_same_bits, assert_within_one_ulp
from support.norm_reference import assert_rms_norm_accurate, rms_norm_reference, run_rms_norm

INF, NAN = float("inf"), float("nan")

# --- F1: finite in, finite out


@pytest.mark.parametrize("exponent", range(-149, 128, 12))
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-5, None])
def test_f1_fp32_rows_of_any_magnitude(exponent, eps):
    """F1: squares over- or underflow from |x| of 1e19 and 1e-23 on: torch gives zeros, NaN or infinity there."""
    x = torch.randn(4, 64, dtype=torch.float64).mul(2.0**exponent).clamp(-3.4e38, 3.4e38).float()
    weight, dy = torch.randn(64), torch.randn(4, 64)
    exact, actual = rms_norm_reference(x, (64,), weight, eps, dy), run_rms_norm(x, (64,), weight, eps, dy)
    # Below 2^-126 fp32 has fewer digits: half a subnormal ulp for the product of each of the 4 rows.
    assert_relative_l2(actual["y"], exact["y"].value, 2e-7, 2**-149 / 2e-7 + 0 * exact["y"].value)
    subnormal = 4 * 2**-149 / 2**-21
    assert_within_one_ulp(actual["dweight"], exact["dweight"].value, exact["dweight"].terms + subnormal, 2**-21)
    # Subnormal rows with eps 0 have gradients beyond fp32: those must be infinite, all others accurate.
    fits = exact["dx"].value.abs() <= torch.finfo(torch.float32).max
    assert_within_one_ulp(actual["dx"], exact["dx"].value, exact["dx"].terms, factor=2**-21)
    assert torch.equal(actual["dx"].isfinite(), fits)


@pytest.mark.parametrize("scale", [1e19, 1e30, 3e38 / 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_f1_huge_rows_have_unit_rms(dtype, scale):
    """F1: randn * 1e30 normalises to a root mean square of 1 (torch: zeros)."""
    y = allfinite.rms_norm(torch.randn(4, 64, dtype=torch.float64).mul(scale).to(dtype), (64,))
    assert (y.double().square().mean(1).sqrt() - 1).abs().max() < 2e-2


def test_f1_torch_fails_on_huge_rows():
    """What the test above guards against is real in torch on the CPU."""
    y = F.rms_norm(torch.randn(4, 64) * 1e30, (64,))
    assert not (y.isfinite().all() and (y.square().mean(1).sqrt() - 1).abs().max() < 2e-2)


def test_f1_largest_floats_of_both_signs():
    """F1: sums of the largest number overflow even unsquared."""
    big = torch.finfo(torch.float32).max
    for row in ([big, -big], [big, -big, big], [big, big, 0.0], [big, big, big, -big, 1.0], [big]):
        assert_rms_norm_accurate(torch.tensor([row]), (len(row),), dy=torch.ones(1, len(row)).cumsum(1))


@pytest.mark.parametrize("value", [65504.0, 60000.0, 7600.0, 940.0, 375.0, 300.0, 257.0])
def test_f1_fp16_squares(value):
    """F1: any |x| >= 256 overflows an fp16 square; torch's rms_norm once gave zeros for rows of 300."""
    x = torch.full((3, 16), value).half()
    assert_rms_norm_accurate(x, (16,), dy=torch.randn(3, 16).half())
    assert torch.equal(allfinite.rms_norm(x, (16,)), torch.ones_like(x))


def test_f1_output_beyond_the_range_is_infinite_and_only_there():
    """F1: an output beyond 65504 is infinity of the right sign, never a saturated number and never NaN."""
    x, weight = torch.tensor([[2.0, -2.0, 0.0, 0.0]]).half(), torch.tensor([65504.0, 65504.0, 65504.0, 1.0])
    assert allfinite.rms_norm(x, (4,), weight, 0.0).tolist() == [[INF, -INF, 0.0, 0.0]]


@pytest.mark.parametrize("x_scale", [1.0, 1e25, 1e-25])
@pytest.mark.parametrize(
    ("dy_scale", "weight_scale"), [(1e30, 1e30), (1e-30, 1e-30), (1e38, 1e-38), (1e30, 1.0), (1e-40, 1.0)]
)
def test_f1_huge_gradients_and_weights(x_scale, dy_scale, weight_scale):
    """F1: dy * weight over- or underflows in fp32 although dx does not (or does, and is then infinite)."""
    x, weight = torch.randn(6, 40) * x_scale, torch.randn(40) * weight_scale
    dy = torch.randn(6, 40) * dy_scale
    exact, actual = rms_norm_reference(x, (40,), weight, 0.0, dy), run_rms_norm(x, (40,), weight, 0.0, dy)
    for name in ("dx", "dweight"):
        # 6 rows of subnormal products: half a subnormal ulp for each.
        terms = exact[name].terms + 6 * 2**-149 / 2**-21
        assert_within_one_ulp(actual[name], exact[name].value, terms, factor=2**-21)


def test_f1_weights_of_every_size_in_one_row():
    """F1: scaling dy and weight by one power of two each would flush the small ones of a row."""
    weight = torch.logspace(-30, 30, 60)
    dy = torch.zeros(60, 60).fill_diagonal_(1.0).mul(torch.logspace(-8, 20, 60))
    x = torch.randn(60, 60)
    exact = rms_norm_reference(x, (60,), weight, 1e-5, dy)["dx"]
    assert_within_one_ulp(run_rms_norm(x, (60,), weight, 1e-5, dy)["dx"], exact.value, exact.terms, 2**-21)


def test_f1_gradient_sums_leave_the_range_and_come_back():
    """F1: partial column sums overflow fp32 (16-bit: fp16) although the total fits."""
    dy = torch.tensor([3e38, 3e38, -3e38, -3e38, 1e38]).unsqueeze(1).expand(5, 8).contiguous()
    dweight = run_rms_norm(torch.ones(5, 8), (8,), torch.ones(8), 0.0, dy)["dweight"]
    assert dweight.tolist() == pytest.approx([1e38] * 8)
    half = torch.full((8, 8), 30000.0).half()
    half[4:] *= -1
    assert run_rms_norm(torch.ones(8, 8).half(), (8,), torch.ones(8).half(), 0.0, half)["dweight"].tolist() == [0.0] * 8


def test_f1_zero_weight_is_not_divided_by():
    """F1: a weight of 0 gives output 0 and a finite gradient (xhat must not be recovered as y / weight)."""
    weight = torch.randn(32)
    weight[5] = 0
    assert_rms_norm_accurate(torch.randn(7, 32), (32,), weight, 1e-5, torch.randn(7, 32))
    assert_rms_norm_accurate(torch.randn(7, 32), (32,), torch.zeros(32), 1e-5, torch.randn(7, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f1_the_ends_of_each_dtype(dtype):
    """F1: rows of the largest, smallest normal and smallest subnormal number of each dtype, with and without eps."""
    info = torch.finfo(dtype)
    for value in (info.max, info.tiny, info.smallest_normal * info.eps):
        x = torch.tensor([value, -value, value, value, 0.0], dtype=torch.float64).to(dtype).repeat(2, 1)
        for eps in (0.0, 1e-5):
            y = allfinite.rms_norm(x, (5,), eps=eps)
            assert y.isfinite().all()
            if eps == 0:
                unit = torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
                exact = rms_norm_reference(unit, (5,), eps=0.0)["y"]
                assert_within_one_ulp(y[:1], exact.value, exact.terms)


# --- F2: nothing hidden, nothing spread


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("n", [9, 100])
def test_f2_bad_input_shows_in_its_row_alone(dtype, poison, n):
    """F2: the row of a NaN or infinity becomes NaN as a whole, forward and backward; the other rows keep their bits."""
    x, dy = torch.randn(5, n).to(dtype), torch.randn(5, n).to(dtype)
    clean = run_rms_norm(x, (n,), None, 1e-5, dy)
    for column in (0, n - 1):
        bad = x.clone()
        bad[2, column] = poison
        result = run_rms_norm(bad, (n,), None, 1e-5, dy)
        others = [0, 1, 3, 4]
        for name in ("y", "dx"):
            assert result[name][2].isnan().all()
            assert_same_bits(result[name][others], clean[name][others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_bad_gradient_shows_where_it_takes_part(dtype, poison):
    """F2: a bad dy reaches the dx of its row and the dweight of its column, and nothing else."""
    n = 40
    x, dy, weight = torch.randn(5, n).to(dtype), torch.randn(5, n).to(dtype), torch.randn(n).to(dtype)
    clean = run_rms_norm(x, (n,), weight, 1e-5, dy)
    bad = dy.clone()
    bad[3, 7] = poison
    result = run_rms_norm(x, (n,), weight, 1e-5, bad)
    assert not result["dx"][3].isfinite().any()
    assert_same_bits(result["dx"][[0, 1, 2, 4]], clean["dx"][[0, 1, 2, 4]])
    columns = [i for i in range(n) if i != 7]
    assert not result["dweight"][7].isfinite()
    assert_same_bits(result["dweight"][columns], clean["dweight"][columns])


def test_f2_bad_weight_shows_in_its_column():
    """F2: a NaN weight is in the output of its column, and only there."""
    weight = torch.ones(20)
    weight[11] = NAN
    y = allfinite.rms_norm(torch.randn(3, 20), (20,), weight)
    assert y[:, 11].isnan().all()
    assert y[:, [i for i in range(20) if i != 11]].isfinite().all()


@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_non_finite_gradient_of_a_zero_row_shows(poison):
    """F2: dx of a row of zeros with eps 0 is 0 by definition, but a NaN in its dy must not vanish with it."""
    dy = torch.randn(3, 20)
    dy[1, 4] = poison
    dx = run_rms_norm(torch.zeros(3, 20), (20,), torch.randn(20), 0.0, dy)["dx"]
    assert dx[1].isnan().all()
    assert torch.equal(dx[[0, 2]], torch.zeros(2, 20))


# --- F7: rows on the edge


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-6, None])
@pytest.mark.parametrize("n", [1, 2, 257])
def test_f7_rows_of_zeros(dtype, eps, n):
    """F7: y and dweight are exactly 0, never 0 * infinity; dx is 0 with eps 0 and rstd * g else."""
    weight, dy = torch.randn(n).to(dtype), torch.randn(3, n).to(dtype)
    result = run_rms_norm(torch.zeros(3, n, dtype=dtype), (n,), weight, eps, dy)
    assert torch.equal(result["y"], torch.zeros(3, n, dtype=dtype))
    assert torch.equal(result["dweight"], torch.zeros(n, dtype=dtype))
    if eps == 0:
        assert torch.equal(result["dx"], torch.zeros(3, n, dtype=dtype))
    else:
        exact = rms_norm_reference(torch.zeros(3, n, dtype=dtype), (n,), weight, eps, dy)["dx"]
        assert_within_one_ulp(result["dx"], exact.value, exact.terms)


@pytest.mark.parametrize("value", [3e38, 1e30, 1.0, 0.1, 1e-30, 1e-40])
def test_f7_constant_rows(value):
    """F7: a constant row of any magnitude is 1, and its dx for a constant dy is 0 up to rounding."""
    x = torch.full((2, 257), value)
    assert_rms_norm_accurate(x, (257,), None, 0.0, torch.ones(2, 257) if value > 1e-35 else None)
    # 1 ulp below or above 1: rstd * value is rounded twice.
    assert (allfinite.rms_norm(x, (257,), eps=0.0) - 1).abs().max() <= 2**-23


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f7_eps_is_not_rounded_to_sixteen_bits(dtype):
    """F7: fp16(2.9e-8) is 0 and fp16(5e-8) is 6e-8: eps stays fp32, whatever the input."""
    for eps in (2.9e-8, 5e-8, 1e-12):
        x = (torch.randn(4, 64) * 1e-4).to(dtype)
        assert_rms_norm_accurate(x, (64,), None, eps, torch.randn(4, 64).mul(1e-3).to(dtype))


@pytest.mark.parametrize("eps", [1e-80, 1e-300, 1e300])
def test_f7_eps_beyond_fp32(eps):
    """F7: 1 / sqrt(eps) beyond fp32 times 0 is 0, not NaN; an eps beyond fp32 makes xhat 0; others do not notice."""
    result = run_rms_norm(torch.zeros(2, 9), (9,), None, eps, torch.randn(2, 9))
    assert torch.equal(result["y"], torch.zeros(2, 9))
    assert not result["dx"].isnan().any()
    x, dy = torch.randn(2, 9), torch.randn(2, 9)
    if eps < 1:
        assert_rms_norm_accurate(x, (9,), None, eps, dy)
    else:
        assert torch.equal(run_rms_norm(x, (9,), None, eps, dy)["dx"], torch.zeros(2, 9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-36, 1e-70, 1e-80, 1e-150, 1e-300])
def test_f1_dx_of_a_row_of_zeros_keeps_eps(dtype, eps):
    """F1: dx = g / sqrt(eps), infinite where that is beyond the range, and never a saturated number."""
    dy = torch.tensor([[1.0, -0.5, 0.0, 2.0**-20]]).to(dtype)
    x = torch.zeros(1, 4, dtype=dtype)
    exact = dy.double() / math.sqrt(eps)
    assert_within_one_ulp(run_rms_norm(x, (4,), None, eps, dy)["dx"], exact, exact.abs())
    residual = x.clone().requires_grad_()
    outputs = allfinite.add_rms_norm(x, residual, (4,), eps=eps)
    (dresidual,) = torch.autograd.grad(outputs, residual, (dy, dy))
    assert_within_one_ulp(dresidual, exact + dy.double(), exact.abs() + dy.double().abs())


@pytest.mark.parametrize("exponent", [-1074, -1060, -1000, -600, 600, 900, 1019])
def test_f1_fp64_rows_of_any_magnitude(exponent):
    """F1: eps times the square of a row's power of two left double's range."""
    unit = torch.randint(-9, 10, (4, 33)).double()
    x = unit * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
    exact = rms_norm_reference(unit, (33,), eps=0.0)["y"]
    assert_relative_l2(allfinite.rms_norm(x, (33,), eps=0.0), exact.value, 2**-50, exact.terms)
    if exponent < 0:
        y = unit / math.sqrt(1e-5) * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
        assert (allfinite.rms_norm(x, (33,), eps=1e-5) - y).abs().max() <= 2**-50 * y.abs().max() + 2**-1073


def test_f1_fp64_column_sums_leave_the_range_and_come_back():
    """F1: the sum of the first rows of a column overflows double, the whole does not."""
    big = torch.finfo(torch.float64).max
    dy = torch.tensor([big, big, -big, -0.5 * big], dtype=torch.float64).unsqueeze(1).expand(4, 2).contiguous()
    x, weight = torch.ones(4, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    dweight = run_rms_norm(x, (2,), weight, 0.0, dy)["dweight"]
    assert torch.allclose(dweight, torch.full((2,), 0.5 * big, dtype=torch.float64), rtol=2**-50, atol=0)
