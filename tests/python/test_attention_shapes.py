"""Shapes that must just work: ranks, broadcasts, empty dimensions, grouped heads; the values are those of torch."""

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 1, 3)], ids=str)
def test_ranks(lead):
    """Two dimensions to six, output and lse in the shape of the input."""
    q, k, v = torch.randn(*lead, 5, 4), torch.randn(*lead, 7, 4), torch.randn(*lead, 7, 6)
    output, lse = sdpa(q, k, v, return_lse=True)
    assert output.shape == (*lead, 5, 6)
    assert lse.shape == (*lead, 5)
    assert output.is_contiguous()
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 3, 5, 4), (1, 3, 7, 4), (2, 1, 7, 4)),
        ((5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
        ((2, 3, 5, 4), (7, 4), (7, 4)),
        ((1, 1, 5, 4), (2, 3, 7, 4), (1, 3, 7, 4)),
        ((2, 1, 3, 5, 4), (1, 2, 1, 7, 4), (2, 2, 3, 7, 4)),
    ],
)
def test_leading_dimensions_broadcast(q, k, v):
    """As torch's matrix product broadcasts them."""
    q, k, v = torch.randn(q), torch.randn(k), torch.randn(v)
    expected = (q @ k.mT / 2).softmax(-1) @ v
    torch.testing.assert_close(sdpa(q, k, v), expected)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (1, 1, 5, 7), (2, 1, 1, 1, 7), (2, 2, 3, 5, 7)], ids=str)
def test_masks_of_five_dimensions(shape):
    """A mask over several batch dimensions, broadcast over some of them; bool and 16-bit bias."""
    q, k, v = torch.randn(2, 2, 3, 5, 4), torch.randn(2, 2, 3, 7, 4), torch.randn(2, 2, 3, 7, 4)
    bias = torch.randn(shape).bfloat16().requires_grad_()
    output = sdpa(q, k, v, bias)
    wide = bias.detach().double().requires_grad_()
    expected = (q.double() @ k.double().mT / 2 + wide).softmax(-1) @ v.double()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(output.sum(), bias)[0], torch.autograd.grad(expected.sum(), wide)[0]
    torch.testing.assert_close(grads[0], grads[1].bfloat16(), rtol=2**-8, atol=1e-6)  # one rounding of fp32 sums
    seen = bias.detach() > -1
    masked = (q @ k.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    torch.testing.assert_close(sdpa(q, k, v, seen), masked @ v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys"), [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]
)
def test_empty(dtype, batch, heads, queries, keys):
    """B = 0, H = 0, Sq = 0, Sk = 0: zeros, lse -inf, gradients of zeros, the bias' too."""
    q = torch.randn(batch, heads, queries, 4).to(dtype).requires_grad_()
    k, v = (torch.randn(batch, heads, keys, n).to(dtype).requires_grad_() for n in (4, 5))
    bias = torch.zeros(1, 1, queries, keys, requires_grad=True)
    output, lse = sdpa(q, k, v, bias, return_lse=True)
    assert output.shape == (batch, heads, queries, 5)
    assert not output.any()
    assert (lse == -torch.inf).all()
    grads = torch.autograd.grad([output, lse], (q, k, v, bias), [torch.ones_like(output), torch.ones_like(lse)])
    for grad, t in zip(grads, (q, k, v, bias), strict=True):
        assert grad.shape == t.shape
        assert not grad.any()


def test_sizes_of_zero_and_one():
    """D = 0: all scores are 0, the mean of the values; Dv = 0; one of everything."""
    v = torch.randn(2, 7, 3)
    output = sdpa(torch.empty(2, 5, 0), torch.empty(2, 7, 0), v)
    torch.testing.assert_close(output, v.mean(1, keepdim=True).expand(2, 5, 3))
    assert sdpa(torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.empty(2, 7, 0)).shape == (2, 5, 0)
    one = torch.tensor([[2.0]])
    assert torch.equal(sdpa(one, one, one), one)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 1), (6, 6)])
def test_grouped_heads(heads, kv_heads):
    """enable_gqa: query head h uses key head h // (heads / kv_heads), in three dimensions too."""
    q, k, v = torch.randn(2, heads, 5, 4), torch.randn(2, kv_heads, 7, 4), torch.randn(2, kv_heads, 7, 4)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True), expected)
    torch.testing.assert_close(sdpa(q[0], k[0], v[0], enable_gqa=True), expected[0])


def test_one_key_head_needs_no_grouping():
    """Key heads of 1 broadcast, with the bits of the expanded keys and with gradients summed in fp32."""
    q, k, v = torch.randn(2, 4, 5, 8).half(), torch.randn(2, 1, 7, 8).half(), torch.randn(2, 1, 7, 8).half()
    assert_same_bits(sdpa(q, k, v), sdpa(q, k.expand(2, 4, 7, 8), v.expand(2, 4, 7, 8)))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(sdpa(*leaves).sum(), leaves)
    exact = torch.autograd.grad(sdpa(*wide).sum(), wide)
    for grad, expected in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=2**-10, atol=1e-6)  # rounded once to fp16


def test_arguments_in_torch_order():
    """Every positional argument of F.scaled_dot_product_attention means the same here: one name can be swapped."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    arguments = (None, 0.0, True)
    for call in (
        lambda f: f(q, k, v, *arguments, scale=0.3, enable_gqa=True),
        lambda f: f(query=q, key=k, value=v, attn_mask=torch.randn(5, 5).tril(), scale=2, enable_gqa=True),
    ):
        torch.manual_seed(0)
        ours = call(sdpa)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, call(F.scaled_dot_product_attention))
