"""F1, F2 and F7 of layer_norm: the whole input range, NaN and infinity, rows on the edge."""

import math

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_relative_l2, assert_same_bits, assert_within_one_ulp
from support.norm_reference import assert_layer_norm_accurate, layer_norm_reference, run_layer_norm

INF, NAN = float("inf"), float("nan")

# --- F1: finite in, finite out


@pytest.mark.parametrize("exponent", range(-149, 128, 12))
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-5])
def test_f1_fp32_rows_of_any_magnitude(exponent, eps):
    """F1: squares over- or underflow from |x| of 1e19 and 1e-23 on: torch gives zeros, NaN or infinity there."""
    x = torch.randn(4, 64, dtype=torch.float64).mul(2.0**exponent).clamp(-3.4e38, 3.4e38).float()
    weight, bias, dy = torch.randn(64), torch.randn(64), torch.randn(4, 64)
    for beta in (bias, None):
        exact = layer_norm_reference(x, (64,), weight, beta, eps, dy)
        actual = run_layer_norm(x, (64,), weight, beta, eps, dy)
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
def test_f1_huge_rows_have_unit_variance(dtype, scale):
    """F1: randn * 1e30 normalises to std 1 (torch: zeros or NaN)."""
    y = allfinite.layer_norm(torch.randn(4, 64, dtype=torch.float64).mul(scale).to(dtype), (64,))
    assert (y.double().std(1, correction=0) - 1).abs().max() < 2e-2


def test_f1_torch_fails_on_huge_rows():
    """What the test above guards against is real in torch on the CPU."""
    y = F.layer_norm(torch.randn(4, 64) * 1e30, (64,))
    assert not (y.isfinite().all() and (y.std(1, correction=0) - 1).abs().max() < 2e-2)


def test_f1_largest_floats_of_both_signs():
    """F1: 3e38 - (-3e38) overflows before it is squared; sums of either sign overflow as well."""
    big = torch.finfo(torch.float32).max
    for row in ([big, -big], [big, -big, big], [big, big, 0.0], [big, big, big, -big, 1.0]):
        x = torch.tensor([row])
        assert_layer_norm_accurate(x, (len(row),), dy=torch.ones(1, len(row)).cumsum(1))


@pytest.mark.parametrize("value", [65504.0, 60000.0, 7600.0, 940.0, 375.0, 300.0, 257.0])
def test_f1_fp16_squares(value):
    """F1: any |x| >= 256 overflows an fp16 square; torch's rms_norm once gave zeros for rows of 300."""
    x = torch.full((3, 16), value).half()
    x[:, ::2] *= -1
    assert_layer_norm_accurate(x, (16,), dy=torch.randn(3, 16).half())
    assert torch.equal(allfinite.layer_norm(x, (16,)).abs(), torch.ones_like(x))


def test_f1_output_beyond_the_range_is_infinite_and_only_there():
    """F1: an output beyond 65504 is infinity of the right sign, never a saturated number and never NaN."""
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).half()
    weight = torch.tensor([65504.0, 65504.0, 65504.0, 1.0])
    bias = torch.tensor([60000.0, -60000.0, -60000.0, 0.0])
    y = allfinite.layer_norm(x, (4,), weight, bias, 0.0)
    assert y.tolist() == [[INF, -INF, 5504.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_f1_product_beyond_the_range_with_a_sum_within(dtype):
    """F1: xhat * weight may leave fp32 although xhat * weight + bias does not."""
    x = torch.tensor([[3.0, 0.0, 0.0, 0.0]]).to(dtype)
    weight, bias = torch.full((4,), 3e38).to(dtype), torch.tensor([-3e38, 0.0, 0.0, 0.0]).to(dtype)
    exact = layer_norm_reference(x, (4,), weight, bias, 0.0)["y"]
    assert_within_one_ulp(allfinite.layer_norm(x, (4,), weight, bias, 0.0), exact.value, exact.terms)
    assert exact.value.abs().max() < 3.3e38 < (exact.value - bias.double()).abs().max()


@pytest.mark.parametrize("x_scale", [1.0, 1e25, 1e-25])
@pytest.mark.parametrize(
    ("dy_scale", "weight_scale"), [(1e30, 1e30), (1e-30, 1e-30), (1e38, 1e-38), (1e30, 1.0), (1e-40, 1.0)]
)
def test_f1_huge_gradients_and_weights(x_scale, dy_scale, weight_scale):
    """F1: dy * weight over- or underflows in fp32 although dx does not (or does, and is then infinite)."""
    x, weight = torch.randn(6, 40) * x_scale, torch.randn(40) * weight_scale
    dy = torch.randn(6, 40) * dy_scale
    exact = layer_norm_reference(x, (40,), weight, None, 0.0, dy)
    actual = run_layer_norm(x, (40,), weight, None, 0.0, dy)
    for name in ("dx", "dweight"):
        # 6 rows of subnormal products: half a subnormal ulp for each.
        terms = exact[name].terms + 6 * 2**-149 / 2**-21
        assert_within_one_ulp(actual[name], exact[name].value, terms, factor=2**-21)


@pytest.mark.parametrize("n", [1, 3, 17, 33])
def test_f1_lanes_beyond_a_constant_row(n):
    """F1: mean * rstd of 1e39 is infinite in the lanes behind the row, which must not enter its sums as 0 * inf."""
    x, weight, dy = torch.full((2, n), 1e24), torch.randn(n), torch.randn(2, n)
    assert_layer_norm_accurate(x, (n,), weight, None, 1e-30, dy)


def test_f1_small_rows_with_small_weights():
    """F1: rstd of the rescued row times g underflows before the powers of two are taken back."""
    x, weight, dy = torch.randn(4, 33) * 1e-37, torch.randn(33) * 1e-19, torch.randn(4, 33) + 10
    exact = layer_norm_reference(x, (33,), weight, None, 1e-12, dy)["dx"]
    assert_within_one_ulp(run_layer_norm(x, (33,), weight, None, 1e-12, dy)["dx"], exact.value, exact.terms, 2**-21)
    assert exact.value.abs().max() > 1e-13


def test_f1_weights_of_every_size_in_one_row():
    """F1: scaling dy and weight by one power of two each would flush the small ones of a row."""
    weight = torch.logspace(-30, 30, 60)
    dy = torch.zeros(60, 60).fill_diagonal_(1.0).mul(torch.logspace(-8, 20, 60))
    x = torch.randn(60, 60)
    exact = layer_norm_reference(x, (60,), weight, None, 1e-5, dy)["dx"]
    assert_within_one_ulp(run_layer_norm(x, (60,), weight, None, 1e-5, dy)["dx"], exact.value, exact.terms, 2**-21)


def test_f1_gradient_sums_leave_the_range_and_come_back():
    """F1: partial column sums overflow fp32 (16-bit: fp16) although the total fits."""
    dy = torch.tensor([3e38, 3e38, -3e38, -3e38, 1e38]).unsqueeze(1).expand(5, 8).contiguous()
    x, bias = torch.randn(5, 8), torch.zeros(8)
    assert_layer_norm_accurate(x, (8,), None, bias, 1e-5, dy * 0.25)
    assert run_layer_norm(x, (8,), None, bias, 1e-5, dy)["dbias"].tolist() == pytest.approx([1e38] * 8)
    half = torch.full((8, 8), 30000.0).half()
    half[4:] *= -1
    result = run_layer_norm(torch.randn(8, 8).half(), (8,), None, torch.zeros(8).half(), 1e-5, half)
    assert result["dbias"].tolist() == [0.0] * 8


def test_f1_zero_weight_is_not_divided_by():
    """F1: a weight of 0 gives output bias and a finite gradient (xhat must not be recovered as (y - bias) / weight)."""
    weight = torch.randn(32)
    weight[5] = 0
    assert_layer_norm_accurate(torch.randn(7, 32), (32,), weight, torch.randn(32), 1e-5, torch.randn(7, 32))
    assert_layer_norm_accurate(torch.randn(7, 32), (32,), torch.zeros(32), torch.randn(32), 1e-5, torch.randn(7, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f1_the_ends_of_each_dtype(dtype):
    """F1: rows of the largest, smallest normal and smallest subnormal number of each dtype, with and without eps."""
    info = torch.finfo(dtype)
    for value in (info.max, info.tiny, info.smallest_normal * info.eps):
        x = torch.tensor([value, -value, value, value, 0.0], dtype=torch.float64).to(dtype).repeat(2, 1)
        for eps in (0.0, 1e-5):
            y = allfinite.layer_norm(x, (5,), eps=eps)
            assert y.isfinite().all()
            if eps == 0:
                unit = torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
                exact = layer_norm_reference(unit, (5,), eps=0.0)["y"]
                assert_within_one_ulp(y[:1], exact.value, exact.terms)


def times_power_of_two(t, exponent):
    """t * 2^exponent, whose factor may itself be beyond double."""
    for _ in range(3):
        t = t * 2.0 ** (exponent // 4)
    return t * 2.0 ** (exponent - 3 * (exponent // 4))


@pytest.mark.parametrize("exponent", [-1074, -1060, -1000, -900, -600, 600, 900, 1019])
@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-5, 0.5])
def test_f1_fp64_rows_of_any_magnitude(exponent, eps):
    """F1: eps times the square of a row's power of two left double's range: y was 0 beside an ordinary eps."""
    unit, dy = torch.randint(-9, 10, (4, 33)).double(), torch.randn(4, 33, dtype=torch.float64)
    result = run_layer_norm(times_power_of_two(unit, exponent), (33,), None, None, eps, dy)
    if eps == 0 or 2 * exponent - 120 > math.log2(eps):  # eps is lost beside the variance
        exact = layer_norm_reference(unit, (33,), eps=0.0, dy=dy)
        y, dx, terms = exact["y"].value, exact["dx"].value, exact["dx"].terms
        dx, terms = times_power_of_two(dx, -exponent), times_power_of_two(terms, -exponent)
    else:  # the other way round
        y = times_power_of_two((unit - unit.mean(1, keepdim=True)) / math.sqrt(eps), exponent)
        dx = (dy - dy.mean(1, keepdim=True)) / math.sqrt(eps)
        terms = dx.abs().max() + 0 * dx
    # Some eight roundings of 2^-53 each; below 2^-1022 there are fewer digits.
    assert (result["y"] - y).abs().max() <= 2**-49 * y.abs().max() + 2**-1073
    fits = terms.isfinite()
    assert (result["dx"] - dx)[fits].abs().le(2**-49 * terms[fits] + 2**-1073).all()


# --- F2: nothing hidden, nothing spread


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("n", [9, 100])
def test_f2_bad_input_shows_in_its_row_alone(dtype, poison, n):
    """F2: the row of a NaN or infinity becomes NaN as a whole, forward and backward; the other rows keep their bits."""
    x, dy = torch.randn(5, n).to(dtype), torch.randn(5, n).to(dtype)
    clean = run_layer_norm(x, (n,), None, None, 1e-5, dy)
    for column in (0, n - 1):
        bad = x.clone()
        bad[2, column] = poison
        result = run_layer_norm(bad, (n,), None, None, 1e-5, dy)
        others = [0, 1, 3, 4]
        for name in ("y", "dx"):
            assert result[name][2].isnan().all()
            assert_same_bits(result[name][others], clean[name][others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_bad_gradient_shows_where_it_takes_part(dtype, poison):
    """F2: a bad dy reaches the dx of its row and the dweight and dbias of its column, and nothing else."""
    n = 40
    x, dy = torch.randn(5, n).to(dtype), torch.randn(5, n).to(dtype)
    weight, bias = torch.randn(n).to(dtype), torch.zeros(n).to(dtype)
    clean = run_layer_norm(x, (n,), weight, bias, 1e-5, dy)
    bad = dy.clone()
    bad[3, 7] = poison
    result = run_layer_norm(x, (n,), weight, bias, 1e-5, bad)
    assert not result["dx"][3].isfinite().any()
    assert_same_bits(result["dx"][[0, 1, 2, 4]], clean["dx"][[0, 1, 2, 4]])
    columns = [i for i in range(n) if i != 7]
    for name in ("dweight", "dbias"):
        assert not result[name][7].isfinite()
        assert_same_bits(result[name][columns], clean[name][columns])


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_f2_bad_parameter_shows_in_its_column(name):
    """F2: a NaN weight or bias is in the output of its column, and only there."""
    parameters = {"weight": torch.ones(20), "bias": torch.zeros(20)}
    parameters[name][11] = NAN
    y = allfinite.layer_norm(torch.randn(3, 20), (20,), **parameters)
    assert y[:, 11].isnan().all()
    assert y[:, [i for i in range(20) if i != 11]].isfinite().all()


@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_non_finite_gradient_of_a_constant_row_shows(poison):
    """F2: dx of a row without variance is 0 by definition, but a NaN in its dy must not vanish with it."""
    dy = torch.randn(3, 20)
    dy[1, 4] = poison
    dx = run_layer_norm(torch.full((3, 20), 7.0), (20,), torch.randn(20), None, 0.0, dy)["dx"]
    assert dx[1].isnan().all()
    assert torch.equal(dx[[0, 2]], torch.zeros(2, 20))


# --- F7: rows on the edge


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5])
@pytest.mark.parametrize(("value", "n"), [(0.0, 10), (1234.0, 256), (0.1, 257), (-7.3, 1000), (14.0, 2), (1e6, 1)])
def test_f7_constant_rows_give_exactly_the_bias(dtype, eps, value, n):
    """F7: zeros with eps 1e-12 were NaN in fp16; a constant row gave up to 9e-3 instead of 0 in fp32."""
    x = torch.full((3, n), min(value, 60000.0)).to(dtype)
    weight, bias, dy = torch.randn(n).to(dtype), torch.randn(n).to(dtype), torch.randn(3, n).to(dtype)
    result = run_layer_norm(x, (n,), weight, bias, eps, dy)
    assert torch.equal(result["y"], bias.expand(3, n))
    assert torch.equal(result["dweight"], torch.zeros_like(weight))
    if eps == 0:
        assert torch.equal(result["dx"], torch.zeros_like(x))
    else:  # finite, but for fp16 with eps 1e-12, where dx is 1e6 times g
        exact = layer_norm_reference(x, (n,), weight, bias, eps, dy)["dx"]
        assert_within_one_ulp(result["dx"], exact.value, exact.terms)


@pytest.mark.parametrize("value", [1e30, 3e38, 1e-30, 1e-40])
def test_f7_constant_rows_of_any_magnitude(value):
    """F7: rescued rows too: the rounding of a mean must not be divided by a variance of 0."""
    for eps in (0.0, 1e-5):
        y = allfinite.layer_norm(torch.full((2, 257), value), (257,), eps=eps)
        assert torch.equal(y, torch.zeros(2, 257))


def test_f7_column_of_one():
    """F7: N = 1 is a constant row: torch on the CPU once gave y = 17.4 (want 3) and dw = 7.2 (want 0)."""
    result = run_layer_norm(
        torch.tensor([[1e6]]), (1,), torch.tensor([2.0]), torch.tensor([3.0]), 1e-5, torch.tensor([[4.0]])
    )
    assert {name: value.item() for name, value in result.items()} == {"y": 3.0, "dx": 0.0, "dweight": 0.0, "dbias": 4.0}


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f7_eps_is_not_rounded_to_sixteen_bits(dtype):
    """F7: fp16(2.9e-8) is 0 and fp16(5e-8) is 6e-8: eps stays fp32, whatever the input."""
    for eps in (2.9e-8, 5e-8, 1e-12):
        x = (torch.randn(4, 64) * 1e-4).to(dtype)
        assert_layer_norm_accurate(x, (64,), None, None, eps, torch.randn(4, 64).mul(1e-3).to(dtype))


def test_f7_constant_pair_rows():
    """F7: [[2, 2], [14, 14]] with eps 1e-6 gave 1e-4 in torch."""
    x = torch.tensor([[2.0, 2.0], [14.0, 14.0]])
    assert torch.equal(allfinite.layer_norm(x, (2,), eps=1e-6), torch.zeros(2, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-36, 1e-70, 1e-80, 1e-150, 1e-300])
@pytest.mark.parametrize("value", ["max", "lowest", "subnormal", -299008.0, 0.3, 0.0])
def test_f1_dx_of_a_constant_row_keeps_eps(dtype, eps, value):
    """F1: dx = (g - mean g) / sqrt(eps) whatever the row's number.

    The power of two of a rescued row lost eps (bf16 rows of the largest number gave dx = g), and 1 / sqrt(eps) beyond
    fp32 was a saturated number.
    """
    info = torch.finfo(dtype)
    numbers = {"max": info.max, "lowest": info.min, "subnormal": info.smallest_normal * info.eps}
    number = numbers.get(value, value)
    x = torch.full((3, 16), max(number, info.min), dtype=dtype)
    dy = torch.tensor([0, 0, 0, 0.5, 0, 0, 0, 0.5, 0, 0, 0, 0, 1, -0.25, 0.25, -0.25]).repeat(3, 1)
    dy = (dy * torch.tensor([[1.0], [2.0**-20], [0.0]])).to(dtype)
    bias = torch.randn(16).to(dtype)
    result = run_layer_norm(x, (16,), None, bias, eps, dy)
    assert torch.equal(result["y"], bias.expand(3, 16))
    exact = (dy.double() - dy.double().mean(1, keepdim=True)) / math.sqrt(eps)
    assert_within_one_ulp(result["dx"], exact, exact.abs().amax(1, keepdim=True) + 0 * exact)


def test_f7_tiny_eps_beside_other_rows():
    """F7: rows with a variance do not notice an eps beyond fp32."""
    for eps in (1e-80, 1e-300):
        assert_layer_norm_accurate(torch.randn(2, 9), (9,), None, torch.randn(9), eps, torch.randn(2, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_f1_a_large_rstd_beside_a_gradient_that_cancels_it(dtype):
    """F1: the norm's dx is beyond the range, its sum with the gradient of residual_out is not."""
    big = torch.finfo(dtype).max
    x = torch.full((1, 2), 3.0, dtype=dtype, requires_grad=True)
    residual = torch.zeros(1, 2, dtype=dtype)
    rstd = 2.0**100
    dy = torch.tensor([[big / rstd * 1.5, -big / rstd * 1.5]], dtype=dtype)
    dsum = torch.tensor([[-big, big]], dtype=dtype)
    outputs = allfinite.add_layer_norm(x, residual, (2,), eps=rstd**-2)
    (dx,) = torch.autograd.grad(outputs, x, (dy, dsum))
    assert torch.allclose(dx, torch.tensor([[0.5 * big, -0.5 * big]], dtype=dtype), rtol=2**-21, atol=0)


def test_f7_huge_eps():
    """F7: an eps beyond fp32 makes xhat 0, not NaN."""
    result = run_layer_norm(torch.randn(2, 8), (8,), None, torch.ones(8), 1e300, torch.randn(2, 8))
    assert torch.equal(result["y"], torch.ones(2, 8))
    assert torch.equal(result["dx"], torch.zeros(2, 8))
