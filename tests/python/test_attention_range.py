"""F1: finite in, finite out over the whole range of each dtype; F4: gradients are linear in the incoming gradient."""

import pytest
import torch
from torch import Tensor

import allfinite
from support.attention_cases import Case, assert_accurate, random_case, relative_l2, run
from support.attention_reference import attention
from support.bounds import DTYPES, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 133120.0), (torch.float16, 65504.0), (torch.float16, 60000.0), (torch.float16, 30000.0)],
)
def test_one_key_of_any_size(dtype, size):
    """F1: exp2(fma(s, c, -max)) leaves +1343 at the maximum and gives NaN; the maximum is subtracted first here."""
    q = k = torch.full((1, 1, 1, 64), size, dtype=dtype)
    v = torch.randn(1, 1, 1, 64).to(dtype)
    got = run(Case(q, k, v, torch.ones_like(v)))
    assert torch.equal(got["output"], v)
    assert all(torch.isfinite(t).all() for t in got.values())


def test_logits_below_any_sentinel():
    """F1: all scores at -74 444: a finite "minus infinity" of -5e4 would mask them all."""
    q, k = torch.zeros(1, 128), torch.zeros(6, 128)
    q[0, 0], k[:, 0] = 448, -1880
    v = torch.randn(6, 8)
    torch.testing.assert_close(sdpa(q, k, v), v.mean(0, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_product_beyond_fp16(dtype):
    """F1: q k = 8.4e6 before the scale does not pass through 16 bits."""
    q = torch.full((1, 2, 5, 128), 256.0, dtype=dtype)
    v = torch.randn(1, 2, 5, 128).to(dtype)
    got = run(Case(q, q.clone(), v, torch.randn(1, 2, 5, 128).to(dtype)))
    assert all(torch.isfinite(t).all() for t in got.values())
    eps = torch.finfo(dtype).eps
    mean = v.double().mean(-2, keepdim=True).expand_as(v)
    torch.testing.assert_close(got["output"].double(), mean, rtol=eps, atol=eps)  # one rounding
    signs = torch.where(torch.rand(1, 2, 5, 128) > 0.5, 256.0, -256.0).to(dtype)
    assert_accurate(Case(signs, signs.roll(1, -2), v, torch.randn(1, 2, 5, 128).to(dtype)))


@pytest.mark.parametrize(("grad", "dq", "dv"), [(1000.0, 800.0, 500.0), (2000.0, 1600.0, 1000.0)])
def test_score_gradient_beyond_fp16(grad, dq, dv):
    """F1: dS = 3.2e5 (6.4e5) under a loss scale, where dQ = 800 (1600): 16-bit dS gives inf, and NaN in dK."""
    q = torch.zeros(1, 1, 1, 64).half()
    signs = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 64)
    got = run(Case(q, (signs * 0.01).half(), (signs * 10).half(), torch.full((1, 1, 1, 64), grad).half()))
    assert got["dq"].float().mean().item() == pytest.approx(dq, rel=1e-3)  # 0.01 in fp16 is off by 2e-4
    assert torch.equal(got["dk"], torch.zeros_like(got["dk"]))
    assert torch.equal(got["dv"], torch.full_like(got["dv"], dv))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [3, 1000])
def test_largest_values_do_not_round_to_infinity(dtype, keys):
    """F1: a mean of the largest value is the largest value, in every dtype."""
    largest = torch.finfo(dtype).max
    v = torch.full((keys, 8), largest, dtype=dtype)
    q, k = torch.randn(20, 8).to(dtype), torch.randn(keys, 8).to(dtype)
    for sign in (1, -1):
        output = sdpa(q, k, sign * v)
        assert torch.isfinite(output).all()
        torch.testing.assert_close(output, torch.full_like(output, sign * largest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_whole_range_of_fp32(dtype, size):
    """F1, F3: query and key at 1e30 and 1e-30 with the scale to match, values as large."""
    case = random_case(dtype, batch=1, queries=20, keys=140, depth=8, scale=size**-2 / 3)
    case.query, case.key = (case.query.float() * size).to(dtype), (case.key.float() * size).to(dtype)
    case.grad_lse = None
    # In float32 the products overflow, so the comparison is with float32 maths on the numbers divided by `size`.
    small = Case(case.query.double() / size, case.key.double() / size, case.value.double(), case.grad.double())
    small.options = {"scale": 1 / 3}
    got, exact = run(case), run(small)
    for name, unit in (("output", 1), ("dv", 1), ("dq", 1 / size), ("dk", 1 / size)):
        expected = exact[name] * unit
        tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-6  # one rounding; fp32: chains of 140 products
        torch.testing.assert_close(
            got[name].double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_overflowing_gradients_are_infinite_never_nan(dtype):
    """F1: dP = 1e60 is past fp32; dQ must be inf of the right sign (what a loss scaler looks for), dV finite."""
    q, k = torch.randn(4, 8).to(dtype), torch.randn(9, 8).to(dtype)
    v, grad = (torch.randn(9, 8) * 1e30).to(dtype), (torch.randn(4, 8) * 1e30).to(dtype)
    got = run(Case(q[None], k[None], v[None], grad[None]))
    wide = run(Case(q[None].double(), k[None].double(), v[None].double(), grad[None].double()))
    assert torch.isfinite(got["output"]).all()
    assert torch.isfinite(got["dv"]).all()
    for name in ("dq", "dk"):
        assert torch.equal(got[name], wide[name].to(dtype))
        assert torch.isinf(got[name]).all()


def test_gradient_beyond_fp16_is_infinite():
    """F1: a dV of 1e5 in fp16 is inf, not 65504 and not NaN."""
    q = torch.zeros(1, 2, 4).half()
    got = run(Case(q, q[:, :1], q[:, :1], torch.full((1, 2, 4), 6e4).half()))
    assert torch.isposinf(got["dv"]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bias_at_the_end_of_the_range_is_no_mask(dtype):
    """F1: finfo.min on all keys of a row is a constant: times log2(e) it would be -inf and the row empty or NaN."""
    lowest = torch.finfo(torch.float32).min
    q, k = torch.randn(3, 4).to(dtype), torch.randn(3, 4).to(dtype)
    v = torch.randn(3, 4).to(dtype)
    bias = torch.tensor([[lowest] * 3, [0.0, 0.0, lowest], [0.0, 0.0, 0.0]])
    output, lse = sdpa(q, k, v, bias, return_lse=True)
    torch.testing.assert_close(output[0], v.float().mean(0).to(dtype))
    torch.testing.assert_close(output[1:2], sdpa(q[1:2], k[:2], v[:2]))
    assert torch.isfinite(lse).all()


def test_bias_that_carries_scores_beyond_fp32():
    """F1: scores of -6e38 and -5e38 are neither masked nor equal: the larger has all weight."""
    q, k, v = torch.tensor([[1.0]]), torch.tensor([[-2.6e38], [-1.6e38]]), torch.tensor([[1.0], [2.0]])
    bias = torch.full((1, 2), torch.finfo(torch.float32).min)
    output, lse = sdpa(q, k, v, bias, scale=1.0, return_lse=True)
    assert output.item() == 2.0
    assert lse.item() == -torch.inf  # -5e38 rounded to fp32
    positive = sdpa(q, -k, v, -bias, scale=1.0)
    assert positive.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp64_bias_beyond_fp32(dtype):
    """F1: a bias of -1e300 beside -2e300 is compared as it is, whatever query's dtype; its gradient is fp64."""
    bias = torch.tensor([[-1e300, -2e300]], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([[3.0], [5.0]], dtype=dtype)
    zero = torch.zeros(2, 4, dtype=dtype)
    output = sdpa(zero[:1], zero, v, bias)
    assert output.item() == 3.0
    output.backward()
    assert bias.grad.dtype == torch.float64
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_unrepresentable_products_show():
    """F1: where the sum of |scale q k| passes fp32, the row is NaN, never a wrong finite number."""
    q = torch.tensor([[3e38, 3e38]])
    k = torch.tensor([[3e38, -3e38], [1.0, 1.0]])
    assert torch.isnan(sdpa(q, k, torch.ones(2, 2), scale=1e3)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-60, -37, 5, 60])
def test_loss_scale_invariance(dtype, exponent):
    """F4: dO -> 2^k dO scales every gradient by 2^k, bit for bit, for |dO| in [2^-60, 2^60]."""
    bias = torch.randn(1, 1, 70, 150)
    case = random_case(dtype, mask=bias, softcap=4.0)
    scaled = Case(case.query, case.key, case.value, case.grad * 2.0**exponent, bias, case.grad_lse * 2.0**exponent)
    scaled.options = case.options
    plain, other = run(case), run(scaled)
    for name in ("dq", "dk", "dv", "dmask"):
        assert_same_bits(plain[name] * 2.0**exponent, other[name])


def test_loss_scale_invariance_fp16():
    """F4 in fp16, wherever both results are normal and finite."""
    case = random_case(torch.float16)
    case.grad_lse = None
    plain = run(case)
    for exponent in (-8, 6):
        scaled = Case(case.query, case.key, case.value, (case.grad.float() * 2.0**exponent).half())
        # 16-bit dO that becomes subnormal is another dO: keep those that are exact
        assert exponent > 0 or (scaled.grad.abs() < 2**-14).float().mean() < 0.1
        scaled.grad = torch.where(case.grad.abs() >= 2**-5, scaled.grad, torch.zeros_like(scaled.grad))
        base = Case(case.query, case.key, case.value, torch.where(case.grad.abs() >= 2**-5, case.grad, 0).half())
        plain, other = run(base), run(scaled)
        for name in ("dq", "dk", "dv"):
            expected = plain[name].float() * 2.0**exponent
            normal = (expected.abs() >= 2**-14) & (expected.abs() <= 65504) & (plain[name].abs() >= 2**-14)
            assert normal.float().mean() > 0.5
            assert torch.equal(other[name].float()[normal], expected[normal])


def test_rows_of_very_different_gradients():
    """F4, F5: a row of dO at 1e-10 beside one at 1e30 keeps its dQ bits, and keys that only it sees their dK, dV."""
    case = random_case(torch.float32, batch=1, heads=1, queries=2, keys=4, depth=8)
    case.mask = torch.tensor([[True, True, False, False], [False, False, True, True]])
    case.grad[..., 1, :] *= 1e-10
    case.grad_lse = None
    alone = run(case)
    case.grad = case.grad.clone()
    case.grad[..., 0, :] *= 1e30
    both = run(case)
    assert_same_bits(both["dq"][..., 1, :], alone["dq"][..., 1, :])
    for name in ("dk", "dv"):
        torch.testing.assert_close(both[name][..., 2:, :], alone[name][..., 2:, :], rtol=1e-6, atol=0)


def test_offsets_beyond_31_bits():
    """Strides whose products pass 2^31 address the right elements (the storage is not touched elsewhere)."""
    step = 2**30 + 64
    mask = torch.empty(2 * step + 8, dtype=torch.bool).as_strided((3, 5), (step, 1))
    small = torch.rand(3, 5) > 0.4
    mask.copy_(small)
    q, k, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4)
    assert_same_bits(sdpa(q, k, v, mask), sdpa(q, k, v, small))


def test_more_keys_than_sixteen_bits():
    """Sk = 33 728 zeros: an int16 index gave NaN elsewhere."""
    z = torch.zeros(1, 1, 33728, 8).half()
    got = run(Case(z[:, :, :2], z, z, torch.ones(1, 1, 2, 8).half()))
    assert all(torch.isfinite(t).all() for t in got.values())
    assert not got["output"].any()


def test_f1_no_gradient_is_no_gradient_at_the_end_of_the_range() -> None:
    """One key: dS is exactly 0, and the powers of two that are taken back overflow; 0 * inf would be NaN."""
    big = torch.finfo(torch.float32).max
    q = torch.zeros(1, 1, requires_grad=True)
    output = allfinite.scaled_dot_product_attention(q, torch.full((1, 1), -big), torch.full((1, 1), big))
    (dq,) = torch.autograd.grad(output, q, torch.full((1, 1), big))
    assert dq.item() == 0


def test_f1_gradient_of_lse_beside_tiny_values() -> None:
    """V is packed times 2^89: in its unit the gradient of lse would leave fp32."""
    q, k = torch.ones(1, 2, requires_grad=True), torch.tensor([[0.0, 7.9e21]])
    outputs = allfinite.scaled_dot_product_attention(q, k, torch.full((1, 1), 1.6e-27), return_lse=True)
    (dq,) = torch.autograd.grad(outputs, q, [torch.ones(1, 1), torch.full((1,), 5.2e11)])
    torch.testing.assert_close(dq, torch.tensor([[0.0, 5.2e11 * 7.9e21 / 2**0.5]]), rtol=1e-6, atol=0)


def test_f4_a_huge_value_that_nobody_sees() -> None:
    """It packs V, and the small gradients beside it must not lose digits for that."""
    torch.manual_seed(0)
    q, k = torch.full((1, 1), 0.125), torch.ones(9, 1, requires_grad=True)
    v = torch.randn(9, 2)
    v[5, 1] = -3.4e38
    grad = torch.tensor([[-4.7452752838239576e-09, 1.6118454126967663e-08]])

    def dk(scale: float) -> Tensor:
        output = allfinite.scaled_dot_product_attention(q, k, v, window=(1, 4))
        return torch.autograd.grad(output, k, grad * scale)[0]

    assert torch.equal(dk(1) * 2.0**42, dk(2.0**42))


def test_f3_a_sum_of_weights_that_rounds_to_one() -> None:
    """One key has all weight but 3e-10: the others still make the gradient of the scores."""
    q = torch.tensor([[-0.001953125]], dtype=torch.float16, requires_grad=True)
    k = torch.tensor([[0.0], [0.0], [-11816.0], [0.0]], dtype=torch.float16)
    v = torch.tensor([[0.0], [0.0], [0.0], [1.0]], dtype=torch.float16)
    (dq,) = torch.autograd.grad(allfinite.scaled_dot_product_attention(q, k, v), q)
    wide = q.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.softmax(wide @ k.double().T, -1) @ v.double(), wide)
    assert dq.item() == exact.half().item()


@pytest.mark.parametrize("tiny", [9e-40, 1.6e-27])
def test_f1_gradient_of_lse_beside_tiny_values_in_every_result(tiny: float) -> None:
    """F1, F3: in the unit of V, 2^-130 and 2^-89, a gradient of lse of 1e30 is infinite; dV keeps the digits of dO."""
    q, k, v = torch.randn(3, 2), torch.randn(5, 2), torch.randn(5, 2) * tiny
    bias = torch.randn(3, 5)
    incoming = [torch.randn(3, 2), torch.tensor([1e30, 1.0, 0.0])]
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    got = torch.autograd.grad(sdpa(*leaves, return_lse=True), leaves, incoming)
    wide = [t.double().requires_grad_() for t in (q, k, v, bias)]
    exact = attention(*wide)
    expected = torch.autograd.grad([exact.output, exact.lse], wide, [t.double() for t in incoming])
    for actual, want in zip(got, expected, strict=True):
        assert relative_l2(actual, want) <= 2**-21  # sums of at most 5 terms in fp32
    for row in (1, 2) if tiny > 1e-30 else (1,):  # each in its own unit; the last is subnormal beside 9e-40
        assert relative_l2(got[0][row], expected[0][row]) <= 2**-20


@pytest.mark.parametrize("exponent", [-60, -7, 30, 60])
def test_f4_gradients_of_output_and_lse_together(exponent: int) -> None:
    """F4: whichever of dO and the gradient of lse sets a row's unit, powers of two of both come out as they went in."""
    leaves = [torch.randn(n, 2).mul(s).requires_grad_() for n, s in ((4, 1.0), (5, 1.0), (5, 1e-30))]
    results = sdpa(*leaves, return_lse=True)
    incoming = [torch.randn(4, 2), torch.tensor([1e-12, 1e-3, 1.0, 1e15])]
    plain = torch.autograd.grad(results, leaves, incoming, retain_graph=True)
    scaled = torch.autograd.grad(results, leaves, [t * 2.0**exponent for t in incoming])
    for a, b in zip(plain, scaled, strict=True):
        assert_same_bits(a.double() * 2.0**exponent, b.double())


def test_f1_rows_of_zeros_have_no_say_in_the_unit_of_a_sum_over_rows():
    """F1: dK is dS q of one row; the others have q = 0 and one of them a huge dO, beside which the sum vanished."""
    q, k, v = torch.zeros(3, 1), torch.ones(2, 1), torch.ones(2, 1)
    q[1] = 2.0**-108
    k.requires_grad_()
    output, lse = allfinite.scaled_dot_product_attention(q, k, v, return_lse=True)
    grad = torch.tensor([[-(2.0**121)], [128.0], [0.0]])
    (dk,) = torch.autograd.grad([output, lse], k, [grad, torch.full((3,), 2.0**80)])
    assert dk.tolist() == [[2.0**-29]] * 2  # 1/2 * grad_lse * q, and no rounding
