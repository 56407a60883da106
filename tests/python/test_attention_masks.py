"""Masks, biases and windows: one meaning in every form, dtype and shape; F7: rows that nothing takes part in."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import allfinite
from support.attention_cases import Case, assert_accurate, random_case, run
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention
MASK_SHAPES = [
    (150,),
    (70, 150),
    (1, 150),
    (70, 1),
    (3, 70, 150),
    (2, 1, 1, 150),
    (1, 3, 70, 1),
    (2, 3, 70, 150),
    (1, 1),
]


def inputs(dtype=torch.float32, queries=70, keys=150, depth=16):
    return torch.randn(2, 3, queries, depth).to(dtype), *(torch.randn(2, 3, keys, depth).to(dtype) for _ in range(2))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_shapes(shape):
    """Every broadcast of a bool mask and of a bias, with the bias' gradient summed where it is broadcast."""
    bias = torch.randn(shape)
    assert_accurate(random_case(torch.float32, heads=3, depth=16, mask=bias))
    assert_accurate(random_case(torch.float32, heads=3, depth=16, mask=bias > -0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_bias_dtypes(dtype, bias_dtype):
    """A bias of any float dtype beside any query dtype, read as what it is; gradient in the bias' dtype."""
    case = random_case(dtype, queries=20, keys=40, mask=torch.randn(20, 40).to(bias_dtype))
    assert assert_accurate(case)["dmask"].dtype == bias_dtype


def test_broadcast_gradient_is_summed_wide():
    """F3: the gradient of a 16-bit bias that 4800 rows share is summed in double, not in 16 bits."""
    case = random_case(torch.bfloat16, batch=4, heads=6, queries=200, keys=16, depth=8)
    case.mask = torch.randn(16).to(torch.bfloat16)
    assert_accurate(case)


def test_only_the_bias_requires_a_gradient():
    """Only attn_mask requires a gradient, broadcast over batch and heads: a crash elsewhere."""
    q, k, v = inputs()
    bias = torch.zeros(1, 1, 70, 150, requires_grad=True)
    sdpa(q, k, v, bias).sum().backward()
    full = torch.zeros(2, 3, 70, 150, requires_grad=True)
    sdpa(q, k, v, full).sum().backward()
    torch.testing.assert_close(bias.grad, full.grad.sum((0, 1), keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bool_and_minus_infinity_are_one_mask(dtype):
    """F6: bool, -inf in any float dtype, is_causal and window say the same with the same bits."""
    q, k, v = inputs(dtype, 70, 70)
    lower = torch.ones(70, 70, dtype=torch.bool).tril()
    expected = sdpa(q, k, v, is_causal=True)
    assert_same_bits(sdpa(q, k, v, lower), expected)
    assert_same_bits(sdpa(q, k, v, window=(-1, 0)), expected)
    for mask_dtype in DTYPES[: 4 if dtype == torch.float64 else 3]:
        bias = torch.zeros(70, 70, dtype=mask_dtype).masked_fill(~lower, -torch.inf)
        assert_same_bits(sdpa(q, k, v, bias), expected)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (0, 5), (-1, 2), (2, -1), (-1, -1), (10**18, 10**18), (129, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (20, 300), (300, 20)])
def test_window(window, queries, keys):
    """-left <= j - i <= right from the top left diagonal, -1 unbounded, whatever the lengths (rows may be empty)."""
    assert_accurate(random_case(torch.float32, 1, 1, queries=queries, keys=keys, depth=4, window=window))
    assert_accurate(
        random_case(torch.float32, 1, 1, queries=queries, keys=keys, depth=4, window=window, is_causal=True)
    )


def test_causal_with_different_lengths_is_top_left():
    """is_causal as in torch where the lengths differ."""
    for queries, keys in ((5, 9), (9, 5)):
        q, k, v = inputs(torch.float32, queries, keys)
        torch.testing.assert_close(
            sdpa(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 9), (9, 5)])
def test_causal_bias_of_torch(queries, keys):
    """torch's CausalBias: upper left is is_causal; lower right is aligned with the last key; its empty rows are 0."""
    q, k, v = inputs(torch.float32, queries, keys)
    assert_same_bits(sdpa(q, k, v, causal_upper_left(queries, keys)), sdpa(q, k, v, is_causal=True))
    lower = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert_same_bits(sdpa(q, k, v, causal_lower_right(queries, keys)), sdpa(q, k, v, lower))
    near = lower & torch.ones_like(lower).triu(-2)
    assert_same_bits(sdpa(q, k, v, causal_lower_right(queries, keys), window=(2, -1)), sdpa(q, k, v, near))
    with pytest.raises(ValueError, match="expected a CausalBias or is_causal, but got both"):
        sdpa(q, k, v, causal_upper_left(queries, keys), is_causal=True)
    with pytest.raises(ValueError, match=r"expected a CausalBias of lengths \(\d, \d\), but got \(2, 2\)"):
        sdpa(q, k, v, causal_upper_left(2, 2))


# --- F7: nothing takes part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("as_bias", [False, True])
def test_fully_masked_rows(dtype, as_bias):
    """F7: output 0, lse -inf, gradients 0 even for a gradient of lse; the other rows as without them."""
    mask = torch.rand(70, 150) > 0.3
    mask[::4] = False
    given = torch.zeros(70, 150).masked_fill(~mask, -torch.inf) if as_bias else mask
    case = random_case(dtype, mask=given)
    got = assert_accurate(case)
    assert not got["output"][..., ::4, :].any()
    assert (got["lse"][..., ::4] == -torch.inf).all()
    assert not got["dq"][..., ::4, :].any()
    if as_bias:
        assert not got["dmask"][~mask].any()


def test_padding_row_of_the_last_query():
    """6 x 8 against 10 x 8, last row all False: row 0, gradients finite."""
    mask = torch.rand(6, 10) > 0.4
    mask[5] = False
    got = run(Case(torch.randn(1, 6, 8), torch.randn(1, 10, 8), torch.randn(1, 10, 8), torch.ones(1, 6, 8), mask))
    assert not got["output"][0, 5].any()
    assert all(torch.isfinite(got[n]).all() for n in ("output", "dq", "dk", "dv"))


def test_everything_masked():
    """F7: not one pair takes part."""
    got = run(random_case(torch.float16, mask=torch.zeros(1, 1, 1, 150, dtype=torch.bool)))
    assert all(not got[n].any() for n in ("output", "dq", "dk", "dv"))
    assert (got["lse"] == -torch.inf).all()


# --- cases of the field


def test_left_padding_with_finfo_min():
    """A first row of finfo.min is uniform, not NaN (NaN on CUDA elsewhere, fine on the CPU)."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([[lowest] * 3, [1.0] * 3, [1.0] * 3])
    q, k, v = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(sdpa(q, k, v, mask)[0], v.mean(0))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_two_finfo_min_are_a_mask(dtype):
    """finfo.min + finfo.min is -inf in the 16-bit mask itself: masked, like any -inf."""
    lowest = torch.finfo(dtype).min
    causal = torch.zeros(6, 6, dtype=dtype).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), lowest)
    padding = torch.zeros(6, dtype=dtype)
    padding[:2] = lowest
    bias = causal + padding
    assert torch.isneginf(bias).any()
    case = random_case(dtype, queries=6, keys=6, mask=bias)
    assert all(torch.isfinite(t).all() for t in assert_accurate(case).values())


def test_bias_that_16_bits_cannot_hold():
    """An fp32 bias of -1e9 beside fp16 tensors is accepted, and is finite: an all -1e9 row is uniform."""
    q, k, v = inputs(torch.float16)
    output = sdpa(q, k, v, torch.full((70, 150), -1e9))
    torch.testing.assert_close(output, v.float().mean(-2, keepdim=True).half().expand_as(output))


def test_fp32_causal_mask_with_fp16_tensors():
    """generate_square_subsequent_mask in fp32 beside fp16: read as fp32, not reinterpreted (97 % NaN elsewhere)."""
    q, k, v = inputs(torch.float16, 32, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(32)
    assert_same_bits(sdpa(q, k, v, mask), sdpa(q, k, v, is_causal=True))


def test_leading_masked_tiles():
    """A band far from the first key: whole tiles of -inf come first (-inf - -inf elsewhere)."""
    q = torch.ones(640, 4)
    mask = torch.full((640, 640), -torch.inf)
    mask = mask.triu(1) + mask.tril(-10)
    output = sdpa(q, q, q, mask)
    assert torch.equal(output, q)


def test_left_padded_batch():
    """B2 H32 S33 D128, first rows of sample 2 see nothing: 0."""
    q, k, v = (torch.randn(2, 32, 33, 128) for _ in range(3))
    mask = torch.ones(2, 1, 33, 33, dtype=torch.bool).tril()
    mask[1, :, :, :27] = False
    output = sdpa(q, k, v, mask)
    assert torch.isfinite(output).all()
    assert not output[1, :, :27].any()


@pytest.mark.parametrize("length", [704, 64, 192, 1088])
def test_scores_near_minus_120(length):
    """lse below -88.7 with a bool mask: padding that is masked by zeros only becomes exp(0 - lse) = inf elsewhere."""
    q, k = 0.1 * torch.randn(1, 1, length, 64), 0.1 * torch.randn(1, 1, length, 64)
    q[..., 0], k[..., 0] = 30, -32  # 30 * -32 / sqrt(64) = -120; a larger one of them would magnify what cancels in dq
    case = Case(q.half(), k.half(), torch.randn(1, 1, length, 64).half(), torch.randn(1, 1, length, 64).half())
    case.mask = torch.ones(length, length, dtype=torch.bool).tril()
    got = assert_accurate(case)
    assert all(torch.isfinite(t).all() for t in got.values())


def test_finite_bias_mixed_with_minus_infinity():
    """Biases in (-5, 5) among -inf: finite rows stay finite."""
    bias = torch.rand(70, 150) * 10 - 5
    bias[torch.rand(70, 150) > 0.5] = -torch.inf
    assert_accurate(random_case(torch.float32, mask=bias))


def test_positive_infinity_in_a_bias_shows():
    """F2: +inf in the mask is no number to add: its row is NaN, as in softmax, and no other."""
    q, k, v = inputs()
    bias = torch.zeros(70, 150)
    bias[3, 7] = torch.inf
    output = sdpa(q, k, v, bias)
    assert torch.isnan(output[..., 3, :]).all()
    assert torch.isfinite(output[..., :3, :]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_that_a_bool_mask_leaves_out(dtype):
    """F5, F2: a tile of keys that nobody sees is skipped; rows that see none of it keep their bits."""
    q, grad = torch.randn(1, 2, 200, 8).to(dtype), torch.randn(1, 2, 200, 8).to(dtype)
    k, v = torch.randn(1, 2, 400, 8).to(dtype), torch.randn(1, 2, 400, 8).to(dtype)
    k[:, :, 130:250] = v[:, :, 130:250] = torch.nan
    mask = torch.rand(200, 400) < 0.7
    mask[:, 128:256] = False
    mask[:96, 256:] = False
    whole = run(Case(q, k, v, grad, mask=mask))
    part = run(Case(q[:, :, :96], k[:, :, :128], v[:, :, :128], grad[:, :, :96], mask=mask[:96, :128]))
    assert all(torch.isfinite(t).all() for t in whole.values())
    for name in ("output", "lse", "dq"):
        assert_same_bits(whole[name][:, :, :96], part[name])
    assert not whole["dk"][:, :, 128:256].any()
    assert not whole["dv"][:, :, 128:256].any()
