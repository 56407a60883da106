"""F3 of cross_entropy: loss and gradients against float64 on the same rounded inputs; every option against torch's."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT
from support.loss_reference import Options, assert_cross_entropy_accurate, run_cross_entropy

# One class, fewer classes than a vector, its multiples and neighbours, several dimensions, no batch, many classes.
SHAPES = [(4, 1), (3, 2), (5, 7), (6, 16), (5, 63), (7, 100), (9,), (2, 5, 3), (2, 4, 3, 2), (3, 1000), (2, 32000)]


def random_target(shape, probabilities=False, ignored=True):
    if probabilities:
        return torch.rand(shape, dtype=torch.float64).div(shape[0 if len(shape) == 1 else 1])
    classes, rows = (shape[0], ()) if len(shape) == 1 else (shape[1], shape[:1] + shape[2:])
    target = torch.randint(0, classes, rows)
    if ignored and len(shape) > 1:
        target.view(-1)[::4] = -100
        target.view(-1)[-1] = classes - 1
    return target


def loss_grad(shape, reduction):
    rows = () if len(shape) == 1 or reduction != "none" else shape[:1] + shape[2:]
    return torch.rand(rows) + 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["index", "probabilities"])
def test_every_option_means_what_torch_means(shape, probabilities):
    """weight, label_smoothing, reduction and their denominators: in float64, loss and gradients are torch's."""
    classes = shape[0 if len(shape) == 1 else 1]
    x, target = torch.randn(shape, dtype=torch.float64) * 3, random_target(shape, probabilities)
    if not probabilities and target.shape == x.shape:
        return
    weights = (None, torch.rand(classes, dtype=torch.float64))
    for weight, reduction, smoothing in itertools.product(weights, ("none", "mean", "sum"), (0.0, 0.3, 1.0)):
        results = []
        for op in (allfinite.cross_entropy, F.cross_entropy):
            leaves = [x.clone().requires_grad_(), target.clone().requires_grad_(probabilities)]
            loss = op(*leaves, weight, reduction=reduction, label_smoothing=smoothing)
            grad = loss_grad(shape, reduction).double()
            loss.backward(torch.linspace(0.5, 1, max(1, grad.numel()), dtype=torch.float64).view(grad.shape))
            results.append((loss.detach(), leaves[0].grad, leaves[1].grad))
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-13)  # two orders of summation in float64


@pytest.mark.parametrize("ignore_index", [0, 3, -1, 1000])
def test_ignore_index_inside_and_outside_the_classes(ignore_index):
    """Any number may mark what is ignored; as a class it then counts nothing."""
    x, target = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 5, (40,))
    target[7] = ignore_index
    ours = run_cross_entropy(x, target, Options(ignore_index=ignore_index), torch.ones(()))
    leaf = x.clone().requires_grad_()
    theirs = F.cross_entropy(leaf, target, ignore_index=ignore_index)
    theirs.backward()
    torch.testing.assert_close(ours["loss"], theirs.detach())
    torch.testing.assert_close(ours["dx"], leaf.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["index", "probabilities"])
def test_f3_all_shapes(dtype, shape, probabilities):
    """F3: tails of vectors, the target in any lane, one class and many."""
    x, target = torch.randn(shape, dtype=torch.float64).mul(4).to(dtype), random_target(shape, probabilities)
    if probabilities:
        target = target.to(dtype)
    elif target.shape == x.shape:
        return
    for reduction in ("none", "mean", "sum"):
        assert_cross_entropy_accurate(x, target, Options(reduction=reduction), loss_grad(shape, reduction))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["index", "probabilities"])
@pytest.mark.parametrize("weighted", [None, "same", "wide"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-4), (1.0, 0.0)])
def test_f3_options(dtype, probabilities, weighted, smoothing, z_loss):
    """F3 with weights of either dtype, smoothing and z_loss, in all combinations."""
    shape = (13, 37)
    x, target = torch.randn(shape).mul(3).to(dtype), random_target(shape, probabilities)
    weight = None
    if weighted:
        weight = torch.rand(37).to(dtype if weighted == "same" or dtype == torch.float64 else torch.float32)
    if probabilities:
        target = target.to(torch.float32 if weighted == "wide" else dtype)
    for reduction in ("none", "mean"):
        o = Options(weight, reduction=reduction, label_smoothing=smoothing, z_loss=z_loss)
        assert_cross_entropy_accurate(x, target, o, loss_grad(shape, reduction))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [0.5, 3, 10, 17, 25, 60, 85])
def test_f3_confident_rows_keep_their_digits(dtype, gap):
    """F3: where p is near 1, the loss is -log1p of the others and the target's gradient minus their sum; p - 1 in fp32
    is 0 from p = 1 - 2^-24 on."""
    x = torch.randn(20, 50).mul(0.3)
    target = torch.randint(0, 50, (20,))
    x[torch.arange(20), target] += gap
    x = x.to(dtype)
    assert_cross_entropy_accurate(x, target, Options(reduction="none"), torch.rand(20) + 0.5)
    if dtype == torch.float32:
        result = run_cross_entropy(x, target, Options(reduction="none"), torch.ones(20))
        assert (result["loss"] > 0).all()
        assert (result["dx"][torch.arange(20), target] < 0).all()


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_f3_a_smoothed_target_without_mass_of_its_own(smoothing):
    """F3: as the sum of the others, the target's gradient cancels where its p and its mass are both small."""
    x, target = torch.randn(7, 300), torch.randint(0, 300, (7,))
    weight = torch.rand(300)
    weight[target] = 0
    for weights in (None, weight):
        options = Options(weight=weights, label_smoothing=smoothing, reduction="none")
        dx = run_cross_entropy(x, target, options, torch.ones(7))["dx"].double()
        wide, w = x.double(), torch.ones(300).double() if weights is None else weights.double()
        q = (w * smoothing / 300).expand(7, 300).clone()
        q[torch.arange(7), target] += (1 - smoothing) * w[target]
        p, mass = wide.softmax(1), q.sum(1, keepdim=True)
        assert ((dx - (mass * p - q)).abs() <= 2**-19 * (mass * p + q) + 2**-24 * (mass * p - q).abs()).all()


@pytest.mark.parametrize("offset", [0.0, 2.0, 40.3])
def test_f3_the_mass_of_smoothing_on_a_confident_class_keeps_its_digits(offset):
    """F3: all mass on the largest logit, which is not the target: the loss is log1p of the others there, too."""
    x, target = torch.tensor([[-10.0, 0.0]]) + offset, torch.tensor([0])
    options = Options(weight=torch.tensor([0.0, 1.0]), label_smoothing=0.1, reduction="none")
    assert_cross_entropy_accurate(x, target, options, torch.ones(1))


def test_f3_far_logits_are_subtracted_exactly():
    """F3: x - max is rounded at up to 2^-18 where it is 64 and more; the gradient must not see it."""
    x = torch.cat([torch.rand(2000, 1) * 20 + 20, torch.randn(2000, 9) - 30], 1)
    assert_cross_entropy_accurate(x, torch.zeros(2000, dtype=torch.long), Options(reduction="none"), torch.ones(2000))


def test_f3_ascending_logits():
    """F3: a maximum that moves with every block, so that sums are rescaled again and again, must not lose digits."""
    for step in (1e-5, 1e-3, 0.01, 0.05):
        x = torch.arange(20000).mul(step)[None].contiguous()
        for target in (0, 19999):
            o = Options(reduction="none")
            assert_cross_entropy_accurate(x, torch.tensor([target]), o, torch.ones(1))


def test_f3_equal_logits_do_not_round_the_same_way_forever():
    """F3: a long fp32 sum of equal terms drifts; with zeros, 128256 of them, the loss is log n."""
    for value in (0.0, -0.3, 1.1):
        x = torch.full((1, 128256), value)
        x[0, 5] += 0.7
        assert_cross_entropy_accurate(x, torch.tensor([5]), Options(), torch.ones(()))


@pytest.mark.parametrize("classes", [65521, 128000, 262144])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_f3_many_classes(dtype, classes):
    """F3: sums of exp over the largest vocabularies leave fp16's range, and bf16's digits."""
    x = torch.randn(2, classes).to(dtype)
    assert_cross_entropy_accurate(x, torch.tensor([3, classes - 1]), Options(label_smoothing=0.1), torch.ones(()))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f3_loss_of_sixteen_bit_logits_is_fp32(dtype):
    """F3: as a 16-bit number the sum of 8192 losses of 10 would be infinite, and any loss have 3 digits."""
    result = run_cross_entropy(torch.zeros(8192, 22026).to(dtype), torch.zeros(8192).long(), Options(reduction="sum"))
    assert result["loss"].dtype == torch.float32
    assert result["loss"].item() == pytest.approx(8192 * 9.999979, rel=1e-6)


def test_f3_summed_losses_of_many_rows():
    """F3: the reduction is in double: 2 million small losses after a large one still count."""
    x = torch.zeros(2_000_001, 2)
    x[0, 1] = 3e7
    loss = allfinite.cross_entropy(x, torch.zeros(2_000_001, dtype=torch.long), reduction="sum")
    assert loss.item() == pytest.approx(3e7 + 2e6 * 0.6931471805599453, rel=1e-7)


def test_many_targets_in_fp16_have_gradients():
    """70 000 fp16 targets, mean: a count or a total weight kept in fp16 is infinite from 65520 on, and then every
    gradient 0."""
    x = torch.randn(70000, 4).half().requires_grad_()
    loss = allfinite.cross_entropy(x, torch.randint(0, 4, (70000,)))
    (loss * 65536.0).backward()
    assert loss.isfinite()
    assert x.grad is not None
    assert (x.grad != 0).float().mean() > 0.99


def test_the_loss_scale_reaches_the_gradient_before_it_is_rounded():
    """n = 131072 rows, p = 1e-3, scale 65536: 5.0e-4 in fp16; rounded before the scale it is 0."""
    x = torch.zeros(131072, 2).half()
    x[:, 0] = -6.9068  # p = 1e-3
    leaf = x.requires_grad_()
    (allfinite.cross_entropy(leaf, torch.ones(131072, dtype=torch.long)) * 65536.0).backward()
    assert leaf.grad is not None
    assert leaf.grad[:, 0].float().mean().item() == pytest.approx(5.0e-4, rel=1e-2)
