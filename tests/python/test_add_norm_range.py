"""F1, F2 and F7 of add_layer_norm and add_rms_norm: the whole input range, NaN and infinity, rows on the edge."""

import pytest
import torch

import allfinite
from support.add_norm import NAMES, AddNorm, random_case
from support.bounds import DTYPES, SIXTEEN_BIT, assert_relative_l2, assert_same_bits, assert_within_one_ulp

INF, NAN = float("inf"), float("nan")

# --- F1: finite in, finite out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-149, -120, -75, -60, -30, 30, 60, 63, 90, 124])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_f1_fp32_rows_of_any_magnitude(name, exponent, eps):
    """F1: sums whose squares leave fp32's range; dsum as large as the norm's dx, so that both count."""
    case = random_case(name, torch.float32, batch=(4,), eps=eps, dsum=None)
    case.x = torch.randn(4, 33, dtype=torch.float64).mul(2.0**exponent).float()
    case.residual = torch.randn(4, 33, dtype=torch.float64).mul(2.0**exponent).float()
    case.dsum = case.reference()["dx"].value.clamp(-1e38, 1e38).float()
    exact, actual = case.reference(), case.run()
    assert_same_bits(actual["sum"], case.x + case.residual)
    assert_relative_l2(actual["y"], exact["y"].value, 2e-7, 2**-149 / 2e-7 + 0 * exact["y"].value)
    for key in ("dx", "dresidual", "dweight"):
        # Below 2^-126 fp32 has fewer digits: half a subnormal ulp for the product of each of the 4 rows.
        terms = exact[key].terms + 4 * 2**-149 / 2**-21
        assert_within_one_ulp(actual[key], exact[key].value, terms, factor=2**-21)


@pytest.mark.parametrize("name", NAMES)
def test_f1_a_fp32_residual_carries_a_fp16_model_beyond_65504(name):
    """F1: a fp16 residual stream overflows where sums pass 65504; in fp32 sum, output and gradients stay finite."""
    case = random_case(name, torch.float16, residual_dtype=torch.float32)
    case.x, case.residual = case.x.sign() * 60000, case.residual.sign() * 2.8e5
    case.assert_accurate()
    assert all(t.isfinite().all() for t in case.run().values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_f1_a_sum_beyond_the_range_is_infinite_in_its_row_alone(name, dtype):
    """F1: the stored sum is then the right infinity, its row may be NaN, and the other rows are as they were."""
    case = random_case(name, dtype)
    clean = case.run()
    big = torch.finfo(dtype).max
    case.x, case.residual = case.x.clone(), case.residual.clone()
    case.x[1, 4] = case.residual[1, 4] = -big
    result = case.run()
    assert result["sum"][1, 4] == -INF
    assert not result["y"][1].isfinite().all()
    others = [0, 2, 3, 4]
    for key in ("y", "sum", "dx", "dresidual"):
        assert_same_bits(result[key][others], clean[key][others])


@pytest.mark.parametrize("name", NAMES)
def test_f1_opposite_terms_cancel_exactly(name):
    """F1: the sum of largest numbers of opposite signs is 0, not infinity minus infinity."""
    big = torch.finfo(torch.float32).max
    x = torch.tensor([[big, -big, 1.0, 2.0]])
    residual = torch.tensor([[-big, big, 1.0, 2.0]])
    AddNorm(name, x, residual, (4,), dy=torch.randn(1, 4), dsum=torch.randn(1, 4)).assert_accurate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dsum_scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("dy_scale", "weight_scale"), [(1e30, 1e30), (1e-30, 1e-30), (1e38, 1e-38), (1e30, 1.0)])
def test_f1_gradients_of_very_different_sizes(name, dsum_scale, dy_scale, weight_scale):
    """F1: dy * weight leaves fp32 and is rescaled: dsum must be added in its own scale, and not lost or overflowed."""
    case = random_case(name, torch.float32, eps=0.0)
    case.weight, case.dy, case.dsum = case.weight * weight_scale, case.dy * dy_scale, case.dsum * dsum_scale
    exact, actual = case.reference(), case.run()
    for key in ("dx", "dresidual"):
        terms = exact[key].terms + 2**-149 / 2**-21  # half a subnormal ulp
        assert_within_one_ulp(actual[key], exact[key].value, terms, factor=2**-21)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f1_a_gradient_beyond_sixteen_bits_is_infinite_only_in_that_dtype(name, dtype):
    """F1: with a fp32 residual the gradient of the residual keeps what is infinite in input's fp16."""
    case = random_case(name, dtype, residual_dtype=torch.float32)
    case.dsum = case.dsum.sign() * 1e5
    result = case.run()
    assert result["dresidual"].isfinite().all()
    assert torch.equal(result["dx"].isinf(), result["dresidual"].to(dtype).isinf())


# --- F2: nothing hidden, nothing spread


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("where", ["x", "residual"])
def test_f2_bad_input_shows_in_its_row_alone(name, dtype, poison, where):
    """F2: the row of a NaN or infinity becomes NaN as a whole, forward and backward; the other rows keep their bits."""
    case = random_case(name, dtype)
    clean = case.run()
    bad = getattr(case, where).clone()
    bad[2, 7] = poison
    setattr(case, where, bad)
    result = case.run()
    assert not result["sum"][2, 7].isfinite()
    others = [0, 1, 3, 4]
    for key in ("y", "dx", "dresidual"):
        assert result[key][2].isnan().all()
        assert_same_bits(result[key][others], clean[key][others])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f2_bad_gradient_of_the_sum_shows_in_its_element_alone(name, dtype):
    """F2: dsum is added element by element: a NaN in it reaches one element of dx, and no statistic or column sum."""
    case = random_case(name, dtype)
    clean = case.run()
    case.dsum = case.dsum.clone()
    case.dsum[3, 7] = NAN
    result = case.run()
    for key in ("dx", "dresidual"):
        assert result[key].isnan().nonzero().tolist() == [[3, 7]]
    for key in ("dweight", "dbias"):
        if key in clean:
            assert_same_bits(result[key], clean[key])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_bad_gradient_of_the_output_shows_where_it_takes_part(name, poison):
    """F2: a bad dy reaches the gradients of its row and its columns' sums, and nothing else."""
    case = random_case(name, torch.float16, residual_dtype=torch.float32)
    clean = case.run()
    case.dy = case.dy.clone()
    case.dy[3, 7] = poison
    result = case.run()
    for key in ("dx", "dresidual"):
        assert not result[key][3].isfinite().any()
        assert_same_bits(result[key][:3], clean[key][:3])
    assert not result["dweight"][7].isfinite()
    assert_same_bits(result["dweight"][:7], clean["dweight"][:7])


# --- F7: rows on the edge


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f7_sums_of_zeros_with_eps_zero(name, dtype):
    """F7: input = -residual and eps 0: output is the bias, the norm's gradient is 0, and dsum alone remains."""
    case = random_case(name, dtype, eps=0.0)
    case.residual = -case.x
    result = case.run()
    bias = torch.zeros(33, dtype=dtype) if case.bias is None else case.bias
    assert torch.equal(result["sum"], torch.zeros_like(case.x))
    assert torch.equal(result["y"], bias.expand(5, 33))
    assert torch.equal(result["dx"], case.dsum)
    assert torch.equal(result["dweight"], torch.zeros_like(bias))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f7_a_constant_sum_gives_exactly_the_bias(dtype):
    """F7: the variance of a constant sum is 0, with a fp32 residual too."""
    x, residual, bias = torch.full((2, 100), 3.5, dtype=dtype), torch.full((2, 100), 0.1), torch.randn(100)
    for eps in (0.0, 1e-5):
        y, _ = allfinite.add_layer_norm(x, residual, (100,), None, bias, eps)
        assert_same_bits(y, bias.to(dtype).expand(2, 100))
