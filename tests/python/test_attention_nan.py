"""F2: a NaN or infinity that takes part shows; one that does not never does, forward or backward."""

import pytest
import torch

import allfinite
from support.attention_cases import Case, random_case, run
from support.bounds import DTYPES, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention
BAD = (float("nan"), float("inf"), float("-inf"))
ROWS, KEYS, HIDDEN = 50, 140, 37  # keys from KEYS - HIDDEN on take part in no row


def masks(kind):
    """(mask, options) that leave the last HIDDEN keys out of every row."""
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool)
    seen[:, KEYS - HIDDEN :] = False
    if kind == "bool":
        return seen, {}
    if kind == "key padding":
        return seen[:1], {}
    if kind == "bias":
        return torch.randn(ROWS, KEYS).masked_fill(~seen, -torch.inf), {}
    if kind == "causal":
        return None, {"is_causal": True}
    return None, {"window": (-1, 10)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "key padding", "bias", "causal", "window"])
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_masked_keys_and_values_never_show(dtype, kind, bad):
    """F2: masked rows of K and V full of NaN or inf: every result has the bits of the clean run, theirs are 0."""
    mask, options = masks(kind)
    case = random_case(dtype, queries=ROWS, keys=KEYS, depth=9, mask=mask, **options)
    clean = run(case)
    for kwargs in ({}, {"softcap": 3.0}):
        case.options = {**options, **kwargs}
        clean = run(case)
        dirty = Case(**{**case.__dict__, "key": case.key.clone(), "value": case.value.clone()})
        dirty.key[..., KEYS - HIDDEN :, :] = bad
        dirty.value[..., KEYS - HIDDEN :, ::2] = bad
        got = run(dirty)
        for name in got:
            assert_same_bits(got[name], clean[name])
        assert not got["dk"][..., KEYS - HIDDEN :, :].any()
        assert not got["dv"][..., KEYS - HIDDEN :, :].any()


def test_two_keys_one_masked():
    """L=2, D=4: NaN in the masked second key and value leaves the result alone."""
    q = k = v = torch.arange(8.0).view(2, 4)
    mask = torch.tensor([True, False])
    k2, v2 = k.clone(), v.clone()
    k2[1], v2[1] = torch.nan, torch.nan
    assert_same_bits(sdpa(q, k2, v2, mask), sdpa(q, k, v, mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_what_takes_part_shows_and_only_there(dtype, bad, where):
    """F2: under a causal mask row i of K or V reaches the rows from i on; row i of Q only row i."""
    case = random_case(dtype, batch=1, heads=1, queries=60, keys=60, depth=5, is_causal=True)
    clean = run(case)
    getattr(case, where)[..., 20, 2] = bad
    got = run(case)
    reached = slice(20, 21) if where == "query" else slice(20, None)
    bad_rows = ~torch.isfinite(got["output"][0, 0]).all(-1)
    assert bad_rows[reached].all()
    assert not bad_rows[:20].any()
    assert_same_bits(got["output"][..., :20, :], clean["output"][..., :20, :])
    assert_same_bits(got["dq"][..., :20, :], clean["dq"][..., :20, :])
    assert not torch.isfinite(got["dq"][..., reached, :]).all(-1).any()
    if where == "query":
        assert_same_bits(got["output"][..., 21:, :], clean["output"][..., 21:, :])
        # keys behind row 20 are seen by later rows only
        assert_same_bits(got["dk"][..., 21:, :], clean["dk"][..., 21:, :])
        assert_same_bits(got["dv"][..., 21:, :], clean["dv"][..., 21:, :])
        assert not torch.isfinite(got["dk"][..., :21, :]).all(-1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_incoming_gradient_reaches_what_its_row_attends_to(dtype, bad):
    """F2: a NaN in one row of dO: that dQ row, and dK, dV of the keys it sees; nothing else, and never silence."""
    case = random_case(dtype, batch=1, heads=2, queries=60, keys=60, depth=5, is_causal=True)
    clean = run(case)
    case.grad[0, 1, 20, 3] = bad
    got = run(case)
    assert not torch.isfinite(got["dq"][0, 1, 20]).any()
    for name, rows in (("dq", [*range(20), *range(21, 60)]), ("dk", range(21, 60)), ("dv", range(21, 60))):
        assert_same_bits(got[name][0, 1, list(rows)], clean[name][0, 1, list(rows)])
        assert_same_bits(got[name][0, 0], clean[name][0, 0])
    assert not torch.isfinite(got["dk"][0, 1, :21]).any()
    assert not torch.isfinite(got["dv"][0, 1, :21, 3]).any()
    # The finite columns of that row are added last instead of in their turn: other roundings, same sum.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got["dv"][0, 1, :, :3], clean["dv"][0, 1, :, :3], rtol=8 * eps, atol=8 * eps)


def test_incoming_lse_gradient():
    """F2: a NaN in the gradient of lse reaches its row; on an empty row it reaches nothing."""
    mask = torch.ones(10, 20, dtype=torch.bool)
    mask[4] = False
    case = random_case(torch.float32, batch=1, heads=1, queries=10, keys=20, mask=mask)
    clean = run(case)
    case.grad_lse[0, 0, 4] = torch.nan
    for name, value in run(case).items():
        assert_same_bits(value, clean[name])
    case.grad_lse[0, 0, 5] = torch.nan
    got = run(case)
    assert torch.isnan(got["dq"][0, 0, 5]).all()
    assert torch.isfinite(got["dq"][0, 0, 6:]).all()
    assert torch.isnan(got["dk"]).all()
    assert torch.isfinite(got["dv"]).all()


def test_nan_rows_of_fully_masked_queries():
    """F2, F7: NaN in a query that no key takes part in: output 0, no trace in the gradients."""
    mask = torch.ones(10, 20, dtype=torch.bool)
    mask[4] = False
    case = random_case(torch.float32, batch=1, heads=1, queries=10, keys=20, mask=mask)
    clean = run(case)
    case.query[0, 0, 4], case.grad[0, 0, 4] = torch.nan, torch.inf
    for name, value in run(case).items():
        assert_same_bits(value, clean[name])


def test_buffer_beyond_the_valid_keys():
    """F2: 77 valid keys in a buffer of 256 that is NaN behind them, as a view and as a mask."""
    q = torch.randn(1, 1, 256, 16).half()
    k, v = torch.full((1, 1, 256, 16), torch.nan).half(), torch.full((1, 1, 256, 16), torch.nan).half()
    k[..., :77, :], v[..., :77, :] = torch.randn(77, 16).half(), torch.randn(77, 16).half()
    expected = sdpa(q, k[..., :77, :].clone(), v[..., :77, :].clone())
    assert_same_bits(sdpa(q, k[..., :77, :], v[..., :77, :]), expected)
    assert_same_bits(sdpa(q, k, v, torch.arange(256) < 77), expected)


def test_minus_infinity_in_a_key_is_no_mask():
    """F2: a score of -inf that comes from an infinite key shows; only a mask's -inf leaves a key out."""
    q, v = torch.ones(1, 4), torch.randn(3, 4)
    k = torch.zeros(3, 4)
    k[1, 0] = -torch.inf
    assert torch.isnan(sdpa(q, k, v)).all()


def test_weight_that_underflows_does_not_hide():
    """F2: a key whose weight rounds to 0 takes part all the same: its NaN shows."""
    q, k = torch.tensor([[1.0]]), torch.tensor([[0.0], [-200.0]])
    v = torch.tensor([[1.0], [torch.nan]])
    assert torch.isnan(sdpa(q, k, v, scale=1.0)).all()


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_grouped_heads_and_dropout(bad):
    """F2 with grouped heads and dropout: masked stays masked, for all heads of the group."""
    mask = torch.ones(30, 40, dtype=torch.bool)
    mask[:, 30:] = False
    case = random_case(torch.float16, heads=4, kv_heads=2, queries=30, keys=40, mask=mask, dropout_p=0.3)
    results = []
    for value in (0.0, bad):
        case.key[..., 30:, :], case.value[..., 30:, :] = value, value
        torch.manual_seed(7)
        results.append(run(case))
    for name, value in results[0].items():
        assert_same_bits(results[1][name], value)
