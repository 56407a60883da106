"""F1, F2, F7 of cross_entropy: logits of any magnitude, NaN and infinity, ignored rows, edges of the reductions."""

import math

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits
from support.loss_reference import Options, assert_cross_entropy_accurate, run_cross_entropy

INF, NAN = math.inf, math.nan
WIDE = (torch.bfloat16, torch.float32, torch.float64)
NONE = Options(reduction="none")


def run(x, target, **options):
    """Loss of each row, and gradients for ones."""
    o = Options(reduction="none", **options)
    rows = x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()
    return run_cross_entropy(x, torch.as_tensor(target), o, torch.ones(rows))


# --- F1: finite in, finite out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 100.0, 1e4, 65504.0, 1e5, 1e30])
@pytest.mark.parametrize("probabilities", [False, True], ids=["index", "probabilities"])
def test_f1_logits_of_any_magnitude(dtype, scale, probabilities):
    """F1: from subnormal to the largest numbers; the loss is as large as the logits are, the gradient never NaN."""
    if dtype == torch.float16 and scale > 65504:
        return
    x = torch.randn(30, 41, dtype=torch.float64).clamp(-1, 1).mul(scale).to(dtype)
    target = torch.rand(30, 41).div(41).to(dtype) if probabilities else torch.randint(0, 41, (30,))
    for smoothing in (0.0, 0.1):
        for reduction in ("none", "mean"):
            o = Options(reduction=reduction, label_smoothing=smoothing)
            assert_cross_entropy_accurate(x, target, o, torch.ones(30 if reduction == "none" else ()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f1_the_largest_numbers_of_each_dtype(dtype):
    """F1: all equal: log C, uniform; both signs: no mass is lost where max - min leaves the range; only what is itself
    beyond fp32 is inf."""
    top = torch.finfo(dtype).max
    for value in (top, -top):
        result = run(torch.full((2, 7), value, dtype=dtype), [0, 6])
        torch.testing.assert_close(result["loss"].double(), torch.full((2,), math.log(7.0), dtype=torch.float64))
        assert (result["dx"][0, 1:].double() - 1 / 7).abs().max() < 1e-3
    both = torch.tensor([[top, -top, 0.0]], dtype=dtype)
    result = run(both, [0], label_smoothing=0.25)
    assert result["dx"].isfinite().all()
    exact = 0.25 / 3 * 3.0 * top  # 2 top from the one and top from the other
    if dtype == torch.float64:
        assert result["loss"].isfinite().all()
    else:
        torch.testing.assert_close(result["loss"].double().item(), exact, rtol=1e-6, atol=0.0)
    beyond = run(both, [1])["loss"].item()
    assert beyond == (2 * top if dtype == torch.float16 else INF)


def test_f1_a_mean_of_losses_beyond_fp32():
    """F1: two losses of 4e38, which is beyond fp32, over four rows have a mean of 2e38."""
    x = torch.tensor([[2e38, -2e38], [2e38, -2e38], [0.0, 1e6], [0.0, 1e6]])
    loss = allfinite.cross_entropy(x, torch.tensor([1, 1, 1, 1]))
    assert loss.item() == pytest.approx(2e38, rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_f1_a_loss_beyond_fp32_is_infinite(reduction):
    """F1: a sum of 6.8e38, which a conversion refused with an error; the gradients are in range all the same."""
    x = torch.tensor([[0.0, torch.finfo(torch.float32).max, 0.0]], requires_grad=True)
    loss = allfinite.cross_entropy(x, torch.ones(1, 3), reduction=reduction).sum()
    assert loss.item() == torch.inf
    assert torch.autograd.grad(loss, x)[0].tolist() == [[-1.0, 2.0, -1.0]]


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_f1_z_loss_of_huge_logits(dtype):
    """F1: lse^2 is beyond fp32, its gradient, 2e28 * p, is not: neither inf * 0 nor a saturated number."""
    x = torch.tensor([[1e30, 0.0, 1e30, -1e30]], dtype=torch.float64).to(dtype)
    result = run(x, [0], z_loss=1e-2)
    assert result["loss"].item() == (pytest.approx(1e58, rel=1e-2) if dtype == torch.float64 else INF)
    assert result["dx"][0].tolist() == pytest.approx([1e28, 0, 1e28, 0], rel=1e-2)


def test_f1_gradients_of_any_magnitude():
    """F1: an incoming gradient at the ends of fp32 gives right products, not inf * 0."""
    x, target = torch.tensor([[0.0, -60.0, -200.0, 1.0]]), torch.tensor([3])
    for grad in (1e-38, 1e-30, 1e30, 3e38):
        assert_cross_entropy_accurate(x, target, NONE, torch.full((1,), grad))


@pytest.mark.parametrize("weight", [1e-30, 1e30])
def test_f1_class_weights_of_any_magnitude(weight):
    """F1: the mean divides by the weights, so a common factor of them cancels, also beyond fp32's square root."""
    x, target = torch.randn(20, 9), torch.randint(0, 9, (20,))
    plain = run_cross_entropy(x, target, Options(), torch.ones(()))
    scaled = run_cross_entropy(x, target, Options(torch.full((9,), weight)), torch.ones(()))
    for name in ("loss", "dx"):
        torch.testing.assert_close(scaled[name], plain[name], rtol=1e-6, atol=1e-9)


def test_f1_the_maximum_comes_late():
    """F1: exp of a logit far above those before it must not overflow the sum."""
    for jump in (39.0, 41.0, 88.0, 89.0, 1e5, 1e30):
        x = torch.randn(4, 700)
        x[:, 650] = jump
        x[1, 3] = -jump
        assert_cross_entropy_accurate(x, torch.tensor([650, 3, 0, 699]), NONE, torch.ones(4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_over_a_vocabulary(dtype):
    """zeros(1, 128256): log n; a sum of exp in fp16 is infinite (and was, in torch's fp16 log_softmax)."""
    loss = allfinite.cross_entropy(torch.zeros(1, 128256, dtype=dtype), torch.tensor([17]))
    assert loss.item() == pytest.approx(11.761783, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_the_lowest_number_is_uniform(dtype):
    """finfo.min as a mask constant: scaled by log2 e it becomes -inf, and the row NaN, where it is uniform."""
    result = run(torch.full((1, 5), torch.finfo(dtype).min, dtype=dtype), [2])
    assert result["loss"].item() == pytest.approx(math.log(5), rel=1e-6)
    assert result["dx"][0].tolist() == pytest.approx([0.2, 0.2, -0.8, 0.2, 0.2], rel=4e-3)  # bf16's half ulp


def test_smoothing_over_a_vocabulary_in_fp16():
    """The sum of 128k log-probabilities is 1.5e6: infinite in fp16."""
    x = torch.randn(2, 128000).half()
    assert_cross_entropy_accurate(x, torch.tensor([1, 2]), Options(label_smoothing=0.1), torch.ones(()))


def test_images_in_fp16_do_not_lose_their_mean():
    """Millions of fp16 targets, (N, C, H, W): their number is beyond fp16."""
    x = torch.randn(4, 3, 200, 200).half()
    assert_cross_entropy_accurate(x, torch.randint(0, 3, (4, 200, 200)), Options(), torch.ones(()))


# --- F2: nothing hidden, nothing spread


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [5, 100, 1500])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_a_bad_logit_shows_in_its_row_alone(dtype, classes, poison):
    """F2: wherever in the row it is, the target included; the other rows keep their bits."""
    x, target = torch.randn(3, classes).to(dtype), torch.tensor([1, classes - 2, 0])
    clean = run(x, target)
    for column in {0, classes - 2, classes - 1, classes // 2}:
        bad = x.clone()
        bad[1, column] = poison
        result = run(bad, target)
        assert result["loss"][1].isnan()
        assert result["dx"][1].isnan().all()
        for name in ("loss", "dx"):
            assert_same_bits(result[name][[0, 2]], clean[name][[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [4, 70, 1500])
def test_f2_a_class_of_minus_infinity(dtype, classes):
    """F2: probability 0. Without mass it counts nothing; the target on it: loss inf and finite gradients."""
    x = torch.randn(3, classes).to(dtype)
    x[:, ::2] = -INF
    result = run(x, [1, 0, 3])
    assert result["loss"].isfinite().tolist() == [True, False, True]
    assert result["loss"][1] == INF
    assert result["dx"].isfinite().all()
    assert result["dx"][1, 0] == -1
    assert (result["dx"][0, ::2] == 0).all()
    kept = run(x[:, 1::2].contiguous(), [0, 0, 1])
    torch.testing.assert_close(result["loss"][[0, 2]], kept["loss"][[0, 2]])


def test_f2_zero_mass_times_minus_infinity_is_nothing():
    """F2: a probability of 0, a class weight of 0, smoothing of 0 and of 1: 0 * inf is 0; any mass at all is inf."""
    x = torch.tensor([[0.0, -INF, 1.0]])
    target = torch.tensor([[0.5, 0.0, 0.5]])
    result = run(x, target)
    assert result["loss"].item() == pytest.approx(0.81326169, rel=1e-6)
    assert result["dx"].isfinite().all()
    assert run(x, [0], weight=torch.tensor([1.0, 0.0, 1.0]), label_smoothing=0.1)["loss"].isfinite()
    assert run(x, [1], weight=torch.tensor([1.0, 0.0, 1.0]))["loss"] == 0
    result = run(x, [0], label_smoothing=0.1)
    assert result["loss"] == INF
    assert result["dx"].isfinite().all()
    assert run(x, target, label_smoothing=0.1)["loss"] == INF


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [3, 40, 2000])
def test_f2_a_row_of_minus_infinity_is_nan(dtype, classes):
    """F2: as torch: no probability is defined; with smoothing and class probabilities too."""
    x = torch.full((1, classes), -INF, dtype=dtype)
    for target in (torch.tensor([1]), torch.full((1, classes), 1 / classes, dtype=dtype)):
        for smoothing in (0.0, 0.1):
            result = run(x, target, label_smoothing=smoothing)
            assert result["loss"].isnan().all()
            assert result["dx"].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_f2_an_ignored_row_shows_nothing(dtype, poison):
    """F2: gradient exactly 0 and no trace in the loss; 0 * NaN in the backward of log_softmax is NaN (torch)."""
    x = torch.randn(4, 33).to(dtype)
    x[2] = poison
    for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"weight": torch.rand(33).to(dtype)}):
        o = Options(**options)
        result = run_cross_entropy(x, torch.tensor([1, 2, -100, 3]), o, torch.ones(()))
        alone = run_cross_entropy(x[[0, 1, 3]], torch.tensor([1, 2, 3]), o, torch.ones(()))
        assert_same_bits(result["loss"], alone["loss"])
        assert_same_bits(result["dx"][[0, 1, 3]], alone["dx"])
        assert torch.equal(result["dx"][2], torch.zeros(33, dtype=dtype))


def test_f2_torch_spreads_an_ignored_row():
    """What the row before guards against is real."""
    x = torch.full((1, 3), NAN, requires_grad=True)
    F.cross_entropy(x, torch.tensor([-100]), reduction="sum").backward()
    assert x.grad is not None
    assert x.grad.isnan().any()


@pytest.mark.parametrize("poison", [NAN, INF])
def test_f2_a_bad_incoming_gradient_shows_in_its_row(poison):
    """F2: rows have gradients of their own under reduction='none'."""
    x, target = torch.randn(3, 20), torch.tensor([1, 2, 3])
    grad = torch.tensor([1.0, poison, 1.0])
    clean, bad = (run_cross_entropy(x, target, NONE, g)["dx"] for g in (torch.ones(3), grad))
    assert not bad[1].isfinite().any()
    assert_same_bits(bad[[0, 2]], clean[[0, 2]])


def test_f2_bad_probabilities_and_weights_show():
    """F2: a NaN in the target or in a weight that takes part is in the loss."""
    x = torch.randn(2, 6)
    target = torch.rand(2, 6)
    target[1, 5] = NAN
    assert run(x, target)["loss"].isnan().tolist() == [False, True]
    weight = torch.ones(6)
    weight[3] = NAN
    assert run(x, [3, 2], weight=weight)["loss"].isnan().tolist() == [True, False]


# --- exceptions and edges, as torch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean_over_nothing_is_nan_with_gradients_of_zero(dtype):
    """All targets ignored: NaN as torch decided, but gradients 0, so that a step does no harm; sum: 0."""
    x, target = torch.randn(3, 5).to(dtype), torch.full((3,), -100)
    for reduction, loss in (("mean", NAN), ("sum", 0.0)):
        result = run_cross_entropy(x, target, Options(reduction=reduction), torch.ones(()))
        assert result["loss"].item() == pytest.approx(loss, nan_ok=True)
        assert torch.equal(result["dx"], torch.zeros_like(x))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_one_class(dtype):
    """C = 1: p is 1, loss and gradient exactly 0."""
    result = run(torch.tensor([[3.0], [-60000.0]]).to(dtype), [0, 0])
    assert result["loss"].tolist() == [0, 0]
    assert result["dx"].tolist() == [[0], [0]]


def test_empty_tensors_as_torch():
    """No rows, no classes, no positions: shapes, zeros and NaN of torch."""
    cases = [
        (torch.randn(0, 5), torch.zeros(0, dtype=torch.long)),
        (torch.randn(0, 5), torch.randn(0, 5)),
        (torch.randn(2, 3, 0), torch.zeros(2, 0, dtype=torch.long)),
        (torch.randn(3, 0), torch.full((3,), -100)),
        (torch.randn(3, 0), torch.randn(3, 0)),
    ]
    for x, target in cases:
        for reduction in ("none", "mean", "sum"):
            leaf = x.clone().requires_grad_()
            ours = allfinite.cross_entropy(leaf, target, reduction=reduction)
            torch.testing.assert_close(ours.detach(), F.cross_entropy(x, target, reduction=reduction), equal_nan=True)
            (dx,) = torch.autograd.grad(ours.sum(), leaf)
            assert dx.shape == x.shape
