"""F5: the bits of a row depend neither on its neighbours, nor on the tile it falls in, nor on the number of threads."""

import pytest
import torch

import allfinite
from support.attention_cases import Case, random_case, run
from support.bounds import DTYPES, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention


def take(case, batch=slice(None), heads=slice(None), rows=slice(None)):
    """The same problem with some of its batches, heads and query rows; a mask is cut along its rows only."""
    mask = case.mask
    if mask is not None and mask.size(-2) > 1:
        mask = mask[..., rows, :]
    return Case(
        case.query[batch, heads][..., rows, :], case.key[batch, heads], case.value[batch, heads],
        case.grad[batch, heads][..., rows, :], mask, case.grad_lse[batch, heads][..., rows], case.options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_query_rows_alone(dtype, masked):
    """F5: any block of query rows by itself gives output, lse, dQ and bias gradient of the whole, bit for bit."""
    mask = torch.randn(150, 300).masked_fill(torch.rand(150, 300) > 0.3, -torch.inf) if masked else None
    if masked:
        mask[:60, :256] = -torch.inf  # two leading tiles that only later rows see
    case = random_case(dtype, queries=150, keys=300, depth=20, mask=mask, softcap=5.0)
    whole = run(case)
    for rows in (slice(0, 1), slice(47, 49), slice(61, 130), slice(149, 150)):
        part = run(take(case, rows=rows))
        for name in ("output", "dq"):
            assert_same_bits(part[name], whole[name][..., rows, :])
        assert_same_bits(part["lse"], whole["lse"][..., rows])
        if masked:
            assert_same_bits(part["dmask"], whole["dmask"][rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_and_heads_alone(dtype):
    """F5: a batch and head by itself gives all of its gradients, dK and dV too."""
    case = random_case(dtype, batch=3, heads=4, queries=60, keys=140, is_causal=True)
    whole = run(case)
    part = run(take(case, batch=slice(1, 2), heads=slice(2, 3)))
    for name, value in part.items():
        assert_same_bits(value, whole[name][1:2, 2:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_number_of_threads(dtype):
    """F5: one, two and five threads: same bits, a broadcast bias' gradient included."""
    bias = torch.randn(1, 1, 1, 300)
    case = random_case(dtype, batch=2, heads=3, queries=200, keys=300, depth=32, mask=bias)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(run(case))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for name, value in other.items():
            assert_same_bits(value, results[0][name])


def test_later_keys_that_are_masked_change_nothing():
    """F5: keys behind the visible ones, masked, leave every bit alone (a masked tile is exactly nothing)."""
    case = random_case(torch.float32, queries=50, keys=500)
    short = Case(case.query, case.key[..., :200, :], case.value[..., :200, :], case.grad, None, case.grad_lse)
    case.mask = torch.arange(500) < 200
    long, expected = run(case), run(short)
    for name in ("output", "lse", "dq"):
        assert_same_bits(long[name], expected[name])
    for name in ("dk", "dv"):
        assert_same_bits(long[name][..., :200, :], expected[name])


def test_repeated_calls():
    """F5: the same call twice, also with memory that the allocator hands back dirty."""
    case = random_case(torch.float16, queries=100, keys=260, is_causal=True)
    first = run(case)
    junk = [torch.full((100000,), torch.nan) for _ in range(8)]
    del junk
    for name, value in run(case).items():
        assert_same_bits(value, first[name])
