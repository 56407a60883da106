"""F1, F2 and F7 of softmax: the whole input range, masks, NaN and infinity, rows on the edge."""

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, assert_same_bits
from support.softmax_reference import assert_softmax_accurate, run_softmax

INF, NAN = float("inf"), float("nan")


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=torch.float64).to(dtype)


# --- F1: finite in, finite out


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e3, 6e4, 1e5, 1e9, 1e30, 3e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f1_logits_of_any_magnitude(dtype, magnitude):
    """F1: the largest logit is subtracted before anything is multiplied; a product of it would be infinite."""
    magnitude = min(magnitude, torch.finfo(dtype).max / 8)
    x = torch.randn(4, 65, dtype=torch.float64).clamp(-8, 8).mul(magnitude).to(dtype)
    for scale in (1.0, -1.0, 1 / magnitude, 0.3 / magnitude):
        assert_softmax_accurate(x, 1, None, scale, torch.randn(4, 65).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f1_rows_at_the_end_of_the_range_are_uniform(dtype):
    """F1: a row of finfo.min, the constant that many models mask with, is a uniform row and not a masked one."""
    info = torch.finfo(dtype)
    for value in (info.min, info.max, info.tiny, 0.0):
        for mask in (None, torch.ones(8, dtype=torch.bool), torch.full((8,), value, dtype=dtype)):
            y = allfinite.softmax(torch.full((2, 8), value, dtype=dtype), 1, mask=mask)
            assert torch.equal(y, torch.full((2, 8), 0.125, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_f1_scaled_scores_beyond_the_range(dtype):
    """F1: scale * x beyond the dtype and beyond fp32, and a difference that is small only after the scale."""
    big = torch.finfo(dtype).max / 2
    for row, scale in (([big, -big, big / 2], 1e5), ([1e-40, 3e-40, 2e-40], 1e40), ([big, -big, 0.0], 1 / big)):
        assert_softmax_accurate(tensor([row], dtype), 1, None, scale, tensor([[1.0, 2.0, -1.0]], dtype))


def test_f1_scaled_scores_beyond_float64():
    """F1: the same in float64, which has no wider type to be checked against."""
    big = 1e308
    y = allfinite.softmax(tensor([[big, -big, big], [big, big, big]], torch.float64), 1, scale=1e30)
    assert torch.equal(y, tensor([[0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]], torch.float64))
    small = allfinite.softmax(tensor([[big, -big, 0.0]], torch.float64), 1, scale=1e-308)
    torch.testing.assert_close(small, torch.softmax(tensor([[1.0, -1.0, 0.0]], torch.float64), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f1_a_finite_bias_neither_masks_nor_overflows(dtype):
    """F1: finfo.min as a bias plus a negative score is -inf in the dtype; here it is a large negative number."""
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    x = torch.tensor([[-16.0, -3.0, -16.0, 0.0]]).to(dtype)
    y = allfinite.softmax(x, 1, mask=torch.full((4,), low, dtype=dtype))
    # At the end of the range a double has no digits left for the scores of fp32 and fp64 beneath the bias.
    assert y.isfinite().all()
    assert float(y.double().sum()) == pytest.approx(1, abs=1e-2)
    if dtype == torch.float16:
        assert_softmax_accurate(x, 1, torch.full((4,), low, dtype=dtype))
    both = allfinite.softmax(tensor([[high, low, high]], dtype), 1, mask=tensor([high, low, low], dtype))
    assert both.tolist() == [[1.0, 0.0, 0.0]]
    cancel = allfinite.softmax(tensor([[high, low, 0.0]], dtype), 1, mask=tensor([low, high, 0.0], dtype))
    assert torch.equal(cancel, torch.full((1, 3), 1 / 3, dtype=torch.float64).to(dtype))


def test_f1_float64_bias_beside_narrower_rows():
    """F1: a float64 bias beyond fp32's range is a number, not an infinity."""
    y = allfinite.softmax(torch.zeros(1, 3), 1, mask=torch.tensor([1e300, 1e300, -1e300], dtype=torch.float64))
    assert y.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("dy_scale", [1e-38, 1e-30, 1e30, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_f1_huge_and_small_gradients(dtype, dy_scale):
    """F1: sums of dy * y must neither overflow nor vanish where the gradient itself is in range."""
    x, dy = torch.randn(4, 3000).to(dtype), (torch.randn(4, 3000).clamp(-3, 3) * dy_scale).to(dtype)
    for scale in (1.0, 16.0):
        assert_softmax_accurate(x, 1, None, scale, dy)


def test_f1_gradients_beyond_the_range_are_infinite_and_only_there():
    """F1: an exact gradient beyond fp32 is infinite; one that is 0 stays 0, whatever the scale."""
    x, dy = torch.tensor([[0.0, 0.0]]), torch.tensor([[3e38, -3e38]])
    assert run_softmax(x, 1, None, 4.0, dy)["dx"].tolist() == [[INF, -INF]]
    single = run_softmax(torch.tensor([[2.0]]), 1, None, 1e300, torch.tensor([[3e38]]))
    assert single["y"].tolist() == [[1.0]]
    assert single["dx"].tolist() == [[0.0]]


# --- F2: nothing hidden, nothing spread


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("n", [9, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_f2_a_bad_score_makes_its_row_nan_alone(dtype, poison, n, bias):
    """F2: as torch: NaN and +inf make the whole row NaN, forward and backward; other rows keep their bits."""
    x, dy = torch.randn(5, n).to(dtype), torch.randn(5, n).to(dtype)
    mask = torch.randn(n).to(dtype) if bias else None
    clean = run_softmax(x, 1, mask, 0.5, dy)
    for column in (0, n // 2, n - 1):
        bad = x.clone()
        bad[2, column] = poison
        result = run_softmax(bad, 1, mask, 0.5, dy)
        for name in ("y", "dx"):
            assert result[name][2].isnan().all()
            assert_same_bits(result[name][[0, 1, 3, 4]], clean[name][[0, 1, 3, 4]])


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f2_what_is_masked_never_shows(dtype, kind, poison):
    """F2: not in x, and not in dy: the results have the bits of a row with any other values there."""
    n, hidden = 70, [0, 33, 69]
    x, dy = torch.randn(4, n).to(dtype), torch.randn(4, n).to(dtype)
    mask = torch.ones(n, dtype=torch.bool)
    mask[hidden] = False
    if kind == "bias":
        mask = torch.randn(n).masked_fill(~mask, -INF).to(dtype)
    bad_x, bad_dy, zero_dy = x.clone(), dy.clone(), dy.clone()
    bad_x[:, hidden] = poison
    bad_dy[:, hidden] = poison
    zero_dy[:, hidden] = 0
    clean, dirty = run_softmax(x, 1, mask, 0.5, zero_dy), run_softmax(bad_x, 1, mask, 0.5, bad_dy)
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name
        assert value.isfinite().all()
    assert (dirty["y"][:, hidden] == 0).all()
    assert (dirty["dx"][:, hidden] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f2_scores_of_minus_infinity_are_masked(dtype):
    """F2: masking by -inf in the input itself: weight 0, and a NaN gradient there reaches nothing."""
    x = torch.tensor([[0.0, -INF, 1.0], [-INF, 2.0, -INF]]).to(dtype)
    dy = torch.tensor([[1.0, NAN, 2.0], [INF, 3.0, NAN]]).to(dtype)
    result = run_softmax(x, 1, None, 1.0, dy)
    zeroed = run_softmax(x, 1, None, 1.0, dy.nan_to_num(0.0, 0.0))
    assert result["y"][x == -INF].eq(0).all()
    assert torch.equal(result["dx"], zeroed["dx"])
    assert result["dx"][1].tolist() == [0.0, 0.0, 0.0]
    # A negative scale turns the other infinity into the mask.
    assert allfinite.softmax(torch.tensor([[INF, 1.0, 1.0]]).to(dtype), 1, scale=-1.0).tolist() == [[0.0, 0.5, 0.5]]


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f2_a_bad_gradient_shows_where_it_takes_part(dtype, poison):
    """F2: in its own row alone, but not in what is masked there; also where its weight underflowed to 0."""
    x, dy = torch.randn(3, 20).to(dtype), torch.randn(3, 20).to(dtype)
    mask = torch.ones(20, dtype=torch.bool)
    mask[5] = False
    x[1, 7] = -6e4
    assert allfinite.softmax(x, 1)[1, 7] == 0
    clean = run_softmax(x, 1, mask, 1.0, dy)
    for column in (3, 7):
        bad = dy.clone()
        bad[1, column] = poison
        dx = run_softmax(x, 1, mask, 1.0, bad)["dx"]
        seen = [i for i in range(20) if i != 5]
        assert not dx[1, seen].isfinite().any()
        assert dx[1, 5] == 0
        assert_same_bits(dx[[0, 2]], clean["dx"][[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f2_masked_entries_of_a_nan_row_are_zero(dtype):
    """F2: masks select, so that what is masked is 0 beside a NaN too."""
    x = torch.tensor([[0.0, NAN, 1.0, INF]]).to(dtype)
    for mask in (tensor([0.0, 0.0, -INF, -INF], dtype), torch.tensor([True, True, False, False])):
        y = allfinite.softmax(x, 1, mask=mask)
        assert y[0, :2].isnan().all()
        assert y[0, 2:].tolist() == [0.0, 0.0]


def test_f2_a_nan_bias_shows_and_its_gradient_too():
    """F2: a NaN in a bias takes part in each row that it is added to."""
    bias = torch.tensor([0.0, NAN, 0.0])
    assert allfinite.softmax(torch.zeros(2, 3), 1, mask=bias).isnan().all()
    assert allfinite.softmax(torch.zeros(2, 3), 1, mask=torch.tensor([0.0, INF, 0.0])).isnan().all()
    result = run_softmax(torch.zeros(2, 3), 1, torch.zeros(3), 1.0, torch.tensor([[1.0, NAN, 1.0], [1.0, 2.0, 3.0]]))
    assert result["dmask"].isnan().all()
    assert result["dx"][1].isfinite().all()


# --- F7: rows on the edge


@pytest.mark.parametrize("n", [1, 7, 64, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f7_fully_masked_rows_are_zero(dtype, n):
    """F7: torch gives NaN for a row of -inf, and for one whose mask is -inf; here 0, with gradients of 0."""
    x, dy = torch.randn(3, n).to(dtype), torch.randn(3, n).to(dtype)
    dy[1] = NAN
    masked_by_x = x.clone()
    masked_by_x[1] = -INF
    row = torch.tensor([True, False, True]).unsqueeze(1)
    for values, mask in (
        (x, row),
        (x, row.expand(3, n).contiguous()),
        (x, torch.zeros(3, n).masked_fill(~row, -INF).to(dtype)),
        (masked_by_x, None),
    ):
        result = run_softmax(values, 1, mask, 0.5, dy)
        for name, value in result.items():
            assert torch.equal(value[1], torch.zeros_like(value[1])), name
            assert value.isfinite().all()
    assert F.softmax(masked_by_x, 1)[1].isnan().all()  # what this guards against is real


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f7_a_nan_alone_among_masked_shows(dtype):
    """F7 does not hide F2: a row of masked scores and one NaN is not a masked row."""
    for n, at in ((3, 1), (40, 39)):
        x = torch.full((1, n), -INF).to(dtype)
        x[0, at] = NAN
        y = allfinite.softmax(x, 1)
        assert y[0, at].isnan()
        assert y.nan_to_num(0).eq(0).all()


def test_f7_scale_zero():
    """F7: scale 0 makes a uniform row of finite scores; 0 * inf takes part, as NaN."""
    assert allfinite.softmax(torch.randn(2, 4), 1, scale=0.0).tolist() == [[0.25] * 4] * 2
    assert allfinite.softmax(torch.tensor([[1.0, -INF]]), 1, scale=0.0).isnan().all()
    assert allfinite.softmax(torch.tensor([[1.0, 2.0]]), 1, mask=torch.tensor([True, False]), scale=0.0).tolist() == [
        [1.0, 0.0]
    ]
    assert run_softmax(torch.randn(2, 4), 1, None, 0.0, torch.randn(2, 4))["dx"].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_f2_a_huge_finite_dy_on_masked_scores_changes_no_digit(dtype, dim):
    """F2: a masked dy 1e8 (fp16) or 1e53 times the visible ones must not choose the row's power of two."""
    x, mask = torch.ones(3, 40).to(dtype), torch.rand(3, 40) > 0.3
    mask[:, :2] = torch.tensor([True, False])
    dy = (torch.randn(3, 40) * (1e-4 if dtype == torch.float16 else 1e-31)).to(dtype)
    loud = dy.masked_fill(~mask, 6e4 if dtype == torch.float16 else 2.1e22)
    quiet = dy.masked_fill(~mask, 0)
    x, mask, loud, quiet = (t if dim == 1 else t.T.contiguous() for t in (x, mask, loud, quiet))
    for added in (mask, torch.zeros(x.shape).masked_fill(~mask, -INF).to(dtype)):
        seen, expected = (run_softmax(x, dim, added, 1.0, t) for t in (loud, quiet))
        assert torch.equal(seen["dx"], expected["dx"])
        assert expected["dx"].ne(0).any()
