"""Dropout: exact probability, one mask for forward and backward whatever the tiles, drawn from torch's generator."""

import pytest
import torch

import allfinite
from support.attention_reference import attention
from support.bounds import DTYPES, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention


def kept_weights(p, batch, heads, queries, keys, seed, dtype=torch.float32):
    """What dropout leaves of each weight, 0 or 1 / (1 - p): uniform weights through an identity."""
    torch.manual_seed(seed)
    q = torch.zeros(batch, heads, queries, 1, dtype=dtype)
    k = torch.zeros(batch, heads, keys, 1, dtype=dtype)
    identity = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    return sdpa(q, k, identity, dropout_p=p) * keys


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_use_one_mask(dtype):
    """Output and gradients are those of the reference with the mask that the op drew; lse is before dropout."""
    p, shape = 0.3, (2, 2, 50, 140)
    kept = kept_weights(p, *shape, seed=5, dtype=torch.float64)
    kept = (kept > 0.5).double() / (1 - p)
    q, v_grad = torch.randn(2, 2, 50, 8).to(dtype), torch.randn(2, 2, 50, 8).to(dtype)
    k, v = torch.randn(2, 2, 140, 8).to(dtype), torch.randn(2, 2, 140, 8).to(dtype)
    bias = torch.randn(50, 140)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    torch.manual_seed(5)
    output, lse = sdpa(*leaves, dropout_p=p, return_lse=True)
    grads = torch.autograd.grad([output, lse], leaves, [v_grad, torch.ones_like(lse)])
    wide = [t.double().requires_grad_() for t in (q, k, v, bias)]
    exact = attention(*wide, kept=kept)
    expected = torch.autograd.grad([exact.output, exact.lse], wide, [v_grad.double(), torch.ones_like(exact.lse)])
    eps = torch.finfo(dtype).eps
    for got, want in zip((output, lse, *grads), (exact.output, exact.lse, *expected), strict=True):
        bound = max(eps, 2**-23 if dtype != torch.float64 else 2**-23 * (got.dtype == torch.float32))
        error = torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want)
        assert error <= 4 * bound  # one rounding of each element, and fp32 sums of 140 terms


@pytest.mark.parametrize("p", [0.001, 0.1, 0.2, 0.5, 0.999])
def test_probability_is_exact(p):
    """The share that is kept is 1 - p within 4.5 sigma of 4.2e6 draws (an 8-bit threshold is off by up to 0.3 %)."""
    n = 16 * 512 * 512
    torch.manual_seed(11)
    q = torch.zeros(1, 16, 512, 1)
    output = sdpa(q, q, torch.ones(1, 16, 512, 1), dropout_p=p)
    sigma = (p / (1 - p) / n) ** 0.5
    assert abs(output.double().mean().item() - 1) <= 4.5 * sigma


def test_rows_and_columns_are_independent():
    """No row, column, head or sample repeats another's mask, and neighbours do not correlate."""
    kept = (kept_weights(0.5, 2, 3, 64, 64, seed=1) > 0).float() - 0.5
    flat = kept.reshape(6 * 64, 64)
    products = (flat @ flat.T / 16).fill_diagonal_(0)  # correlation of rows; sigma = 1 / 8
    assert products.abs().max() < 0.8
    columns = kept.reshape(6 * 64, 64)
    correlation = (columns[:, :-1] * columns[:, 1:]).mean() * 4
    assert abs(correlation) < 4.5 / (6 * 64 * 63) ** 0.5


def test_probability_zero_and_one():
    """p = 0 draws nothing from the generator; p = 1 gives zeros, gradients too, and keeps lse."""
    q, k, v = (torch.randn(2, 7, 4, requires_grad=True) for _ in range(3))
    state = torch.get_rng_state()
    plain, lse = sdpa(q, k, v, return_lse=True)
    assert torch.equal(torch.get_rng_state(), state)
    none, same_lse = sdpa(q, k, v, dropout_p=1.0, return_lse=True)
    assert not none.any()
    assert plain.any()
    assert_same_bits(lse.detach(), same_lse.detach())
    assert all(not g.any() for g in torch.autograd.grad(none.sum(), (q, k, v)))


def test_generator():
    """The same seed gives the same mask, the next call another one; fork_rng and manual_seed govern it."""
    first, second = kept_weights(0.5, 1, 1, 20, 20, seed=3), kept_weights(0.5, 1, 1, 20, 20, seed=3)
    assert_same_bits(first, second)
    q = torch.zeros(20, 1)
    torch.manual_seed(3)
    a, b = (sdpa(q, q, torch.eye(20), dropout_p=0.5) for _ in range(2))
    assert not torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_keeps_to_its_randomness():
    """vmap refuses randomness unless told which; "same" is one mask for all samples, "different" one for each."""
    q, eye = torch.zeros(3, 20, 1), torch.eye(20)

    def run(randomness):
        return torch.func.vmap(lambda t: sdpa(t, t, eye, dropout_p=0.5), randomness=randomness)(q)

    with pytest.raises(RuntimeError, match="randomness"):
        run("error")
    same, different = run("same"), run("different")
    assert_same_bits(same[0], same[2])
    assert not torch.equal(different[0], different[1])


def test_mask_depends_on_the_position_alone():
    """F5: the mask of (batch, head, row, column) is the same in a longer, wider, or cut problem."""
    full = kept_weights(0.4, 2, 3, 100, 300, seed=9) > 0
    assert torch.equal(kept_weights(0.4, 1, 2, 61, 140, seed=9) > 0, full[:1, :2, :61, :140])


def test_replay_under_checkpoint():
    """torch.utils.checkpoint restores the generator, so the recomputed mask is the first one."""
    q, k, v = (torch.randn(2, 7, 4, requires_grad=True) for _ in range(3))
    results = []
    for function in (lambda *t: sdpa(*t, dropout_p=0.5), None):
        torch.manual_seed(2)
        if function is None:
            output = torch.utils.checkpoint.checkpoint(lambda *t: sdpa(*t, dropout_p=0.5), q, k, v, use_reentrant=False)
        else:
            output = function(q, k, v)
        results.append(torch.autograd.grad(output.sum(), (q, k, v)))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
