"""F3: attention and its gradients against float64, no worse than 1.25 x fp32 maths rounded once."""

import math

import pytest
import torch

import allfinite
from support.attention_cases import Case, assert_accurate, random_case, run
from support.attention_reference import attention
from support.bounds import DTYPES, SIXTEEN_BIT

FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (20, 9)},
    "causal window": {"is_causal": True, "window": (40, -1)},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.5},
    "zero scale": {"scale": 0.0},
    "tiny scale": {"scale": 1e-8},
    "large scale": {"scale": 10.0},
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "one key head": {"heads": 3, "kv_heads": 1},
    "odd sizes": {"depth": 7, "value_depth": 13, "queries": 49, "keys": 257},
    "one row, one key": {"queries": 1, "keys": 1},
    "wide values": {"value_depth": 80},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(dtype, feature):
    """F3: each feature by itself, output, lse and all gradients, with a gradient for lse."""
    assert_accurate(random_case(dtype, **FEATURES[feature]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_features_together(dtype):
    """F3: the order scale, softcap, bias, mask: no two features undo one another."""
    bias = torch.randn(1, 4, 70, 150).to(torch.float32)
    bias[..., ::5] = -torch.inf
    case = random_case(dtype, heads=4, kv_heads=2, mask=bias, softcap=3.0, scale=-0.3, window=(50, 30))
    assert_accurate(case)


@pytest.mark.parametrize("length", [63, 65, 127, 129, 1000])
def test_lengths_around_tiles(length):
    """F3: lengths that are no multiple of anything (tile tails must not leak in)."""
    assert_accurate(random_case(torch.float16, batch=1, heads=1, queries=length, keys=length, depth=16, is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_query_rows(dtype):
    """F3: dK and dV over 3000 rows are summed in fp32, not in the dtype of the gradient, block by block."""
    assert_accurate(random_case(dtype, batch=1, heads=1, queries=3000, keys=16, depth=8))


def test_times_three():
    """1024 x 128, causal, fp16, inputs times 3: finite (NaN in a backward elsewhere)."""
    case = random_case(torch.float16, batch=1, heads=1, queries=1024, keys=1024, depth=128, is_causal=True)
    case.query, case.key, case.value, case.grad_lse = case.query * 3, case.key * 3, case.value * 3, None
    assert all(torch.isfinite(t).all() for t in assert_accurate(case).values())


@pytest.mark.parametrize("depth", [72, 80, 96, 128, 256])
def test_head_sizes(depth):
    """F3: head sizes at which other implementations run out of tiles."""
    assert_accurate(random_case(torch.bfloat16, batch=1, queries=33, keys=65, depth=depth))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("exponent", [-20, -16, -12, -8, 0, 8])
def test_small_incoming_gradients(dtype, exponent):
    """F3: P and dS of long rows and small gradients are not flushed to 16-bit subnormals, whatever the loss scale."""
    case = random_case(dtype, batch=1, heads=1, queries=64, keys=1500, depth=32, amplitude=2.0**exponent)
    case.grad_lse = None
    assert_accurate(case)


def test_small_gradients_bound_of_the_field():
    """dO = 2^-16 randn, 4096 keys in fp16: 4 % of the largest, where 16-bit dS gives 27 %."""
    case = random_case(torch.float16, 1, 1, queries=256, keys=4096, depth=64, amplitude=2.0**-16)
    case.grad_lse = None
    got = assert_accurate(case)
    exact = case.leaves(torch.float64)
    result = attention(*exact)
    for name, grad in zip(
        ("dq", "dk", "dv"), torch.autograd.grad(result.output, exact, case.grad.double()), strict=True
    ):
        assert (got[name].double() - grad).abs().max() <= 0.04 * grad.abs().max()


def test_many_small_weights_count():
    """F3: 65535 keys at -17.4 beside one at 0 contribute what they are worth (an fp16 P makes them 0)."""
    keys = 65536
    scores = torch.full((1, keys), -17.4)
    scores[0, 0] = 0
    value = torch.ones(keys, 1)
    value[0] = 0
    output = allfinite.scaled_dot_product_attention(
        torch.zeros(1, 1).half(), torch.zeros(keys, 1).half(), value.half(), scores
    )
    exact = 1 - 1 / (1 + 65535 * math.exp(-17.4))
    assert output.item() == pytest.approx(exact, rel=2**-10)  # one rounding to fp16, and a bias rounded to fp32


def test_uniform_weights_of_long_rows_are_unbiased():
    """F3: dV over 50 000 equal weights (each an fp16 subnormal) has no systematic error."""
    keys = 50000
    case = Case(
        torch.zeros(1, 1, 4, 8).half(), torch.zeros(1, 1, keys, 8).half(), torch.ones(1, 1, keys, 8).half(),
        torch.full((1, 1, 4, 8), 1000.0).half(),
    )  # fmt: skip
    dv = run(case)["dv"]
    assert torch.equal(dv, torch.full_like(dv, 4000 / keys))


def test_constant_values_over_many_keys():
    """F1: 16 384 x 8 is past fp16's range before normalisation; the mean is 8."""
    q, k = torch.randn(4, 8).half(), torch.randn(16384, 8).half()
    output = allfinite.scaled_dot_product_attention(q, k, torch.full((16384, 8), 8.0).half())
    assert torch.equal(output, torch.full_like(output, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaked_rows(dtype):
    """F3: where one key has nearly all weight, dP - D cancels: D from a rounded output would be wrong."""
    assert_accurate(random_case(dtype, scale=2.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_visible_key_gives_exactly_zero(dtype):
    """D is exactly dP where one key takes part: dQ and dK are 0, dV is dO."""
    case = random_case(dtype, batch=1, heads=1, queries=1, keys=1, depth=16)
    case = Case(case.query * 3, case.key * 3, case.value * 3, case.grad)
    got = run(case)
    assert torch.equal(got["output"], case.value)
    assert torch.equal(got["dv"], case.grad)
    assert not got["dq"].any()
    assert not got["dk"].any()
    causal = random_case(dtype, batch=1, heads=1, queries=5, keys=5, is_causal=True)
    causal.grad_lse = None
    assert not run(causal)["dq"][..., 0, :].any()


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_large_logits(size):
    """F3: logits of 1e5: maximum and log-sum are kept apart, so P is not rounded at the size of the lse."""
    case = random_case(torch.float32, batch=1, heads=1, queries=8, keys=64, depth=4)
    case.query[..., 0], case.key[..., 0] = size, 2.0  # a common part of all logits of a row
    assert_accurate(case)


@pytest.mark.parametrize("softcap", [1e-3, 50.0, 1e6, 1e30])
def test_softcap_of_any_size(softcap):
    """F3: softcap * tanh(s / softcap), from nearly a step to nearly the identity."""
    assert_accurate(random_case(torch.float32, batch=1, heads=1, queries=16, keys=40, depth=8, softcap=softcap))


@pytest.mark.parametrize(("softcap", "limit"), [(1e-300, {"scale": 0.0}), (1e300, {})])
def test_softcap_outside_fp32(softcap, limit):
    """F1: a softcap that fp32 does not hold is what it comes to: scores of 0, or no softcap."""
    case = random_case(torch.float32, batch=1, heads=1, queries=16, keys=40, depth=8)
    got = allfinite.scaled_dot_product_attention(case.query, case.key, case.value, softcap=softcap)
    expected = allfinite.scaled_dot_product_attention(case.query, case.key, case.value, **limit)
    torch.testing.assert_close(got, expected)
