"""F4 and F5 of cross_entropy: the same bits at any loss scale, thread count, batch and stride."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, assert_same_bits
from support.loss_reference import Options, run_cross_entropy

VARIANTS = {
    "plain": Options(reduction="none"),
    "smoothed": Options(reduction="none", label_smoothing=0.1),
    "weighted": Options(torch.rand(300, generator=torch.Generator().manual_seed(5)), -100, "none", 0.2, 1e-3),
}


def case(dtype, rows=64, classes=300):
    x = (torch.randn(rows, classes) * 3).to(dtype)
    index = torch.randint(0, classes, (rows,))
    index[3] = -100
    return x, {"index": index, "probabilities": torch.rand(rows, classes).div(classes).to(dtype)}


def assert_linear(base, scaled, exponent):
    """Bit-equal after scaling back, wherever both results are normal and finite; enough of them are."""
    tiny = torch.finfo(base.dtype).tiny
    normal = (base.abs() > tiny) & (scaled.abs() > tiny) & scaled.isfinite()
    normal |= (base == 0) & (scaled == 0)
    back = torch.ldexp(scaled.double(), torch.tensor(-exponent))
    assert torch.equal(base.double()[normal], back[normal])
    assert normal.double().mean() > 0.6


@pytest.mark.parametrize("kind", ["index", "probabilities"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("exponent", [-60, -24, -1, 1, 16, 24, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_f4_gradients_are_linear_in_powers_of_two(dtype, exponent, variant, kind):
    """F4: the loss scale must not change a mantissa, of any element."""
    x, targets = case(dtype)
    grad = torch.rand(64) * 0.5 + 0.5
    base = run_cross_entropy(x, targets[kind], VARIANTS[variant], grad)
    scaled = run_cross_entropy(x, targets[kind], VARIANTS[variant], torch.ldexp(grad, torch.tensor(exponent)))
    for name in base.keys() - {"loss"}:
        assert_linear(base[name], scaled[name], exponent)


def test_f4_the_arithmetic_does_not_depend_on_the_loss_scale():
    """F4: 2e-4 * lse of 1e30 times a loss scale crosses 2^100, beyond which fp32 gave way to double."""
    x, o = torch.tensor([[0.0, 1.0638135e30]]), Options(label_smoothing=0.1, z_loss=1e-4)
    base = run_cross_entropy(x, torch.tensor([1]), o, torch.tensor(-0.7037352))["dx"]
    scaled = run_cross_entropy(x, torch.tensor([1]), o, torch.ldexp(torch.tensor(-0.7037352), torch.tensor(30)))["dx"]
    assert_linear(base, scaled, 30)


@pytest.mark.parametrize("exponent", [-4, 10, 16])
def test_f4_fp16_gradients_of_a_mean(exponent):
    """F4: fp16 gradients of a mean over many rows are mostly 0 without a loss scale; with one they are the same."""
    x, targets = case(torch.float16)
    o = Options()
    base = run_cross_entropy(x, targets["index"], o, torch.tensor(1024.0))["dx"]
    scaled = run_cross_entropy(x, targets["index"], o, torch.tensor(1024.0 * 2.0**exponent))["dx"]
    tiny = torch.finfo(torch.float16).tiny
    normal = (base.abs() > tiny) & (scaled.abs() > tiny) & scaled.isfinite()
    assert torch.equal(base.double()[normal], torch.ldexp(scaled.double(), torch.tensor(-exponent))[normal])
    assert normal.any()


@pytest.mark.parametrize("kind", ["index", "probabilities"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f5_threads_do_not_change_bits(dtype, variant, kind):
    """F5: row losses are added in order, not thread by thread."""
    x, targets = case(dtype, rows=1001)
    o = VARIANTS[variant]
    weight = o.weight if o.weight is None or dtype != torch.float64 else o.weight.double()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            options = Options(weight, -100, "mean", o.label_smoothing, o.z_loss)
            results.append(run_cross_entropy(x, targets[kind], options, torch.ones(())))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, value in results[0].items():
            assert_same_bits(value, other[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [3, 16, 129, 1000])
def test_f5_a_row_does_not_depend_on_its_batch(dtype, classes):
    """F5: a row alone, in a batch, and at a misaligned address has the same bits."""
    x, target = torch.randn(33, classes).to(dtype), torch.randint(0, classes, (33,))
    o = Options(reduction="none", label_smoothing=0.1)
    batch = run_cross_entropy(x, target, o, torch.ones(33))
    for row in (0, 17, 32):
        moved = torch.cat([x.new_zeros(1), x[row]])[1:]
        for alone in (run_cross_entropy(y, target[row], o, torch.ones(())) for y in (x[row], moved)):
            assert_same_bits(alone["loss"], batch["loss"][row])
            assert_same_bits(alone["dx"], batch["dx"][row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["index", "probabilities"])
def test_any_strides_give_the_bits_of_contiguous_tensors(dtype, kind):
    """Strided logits, targets, weights and gradients: a kernel that reads past the strides would give other values."""
    x = torch.randn(6, 9, 4, 5).to(dtype)
    target = torch.randint(0, 9, (6, 4, 5)) if kind == "index" else torch.rand(6, 9, 4, 5).to(dtype)
    weight, grad = torch.rand(9).to(dtype), torch.rand(6, 4, 5)
    want = run_cross_entropy(x, target, Options(weight, reduction="none"), grad)

    def spread(t):
        return t.new_empty(*t.shape, 2)[..., 0].copy_(t)

    def wide_rows(t):
        return t.new_empty(t.shape[0] + 2, *t.shape[1:])[1:-1].copy_(t)

    def channels_last(t):
        return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t

    def transposed(t):
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    o = Options(spread(weight), reduction="none")
    for view in (spread, wide_rows, channels_last, transposed):
        leaf, other = view(x).requires_grad_(), view(target)
        loss = allfinite.cross_entropy(leaf, other, o.weight, reduction="none")
        assert_same_bits(loss.detach(), want["loss"])
        (dx,) = torch.autograd.grad(loss, leaf, spread(grad.to(loss.dtype)))
        assert_same_bits(dx, want["dx"])


def test_rows_of_a_wider_matrix_and_expanded_rows():
    """Logits of shifted tokens, logits[:, :-1], and one row for all."""
    base, target = torch.randn(5, 30), torch.randint(0, 20, (5,))
    for x in (base[:, 4:24], base[:1, :20].expand(5, 20), base[:, :1].expand(5, 20)):
        for o in (Options(), Options(label_smoothing=0.1)):
            want = run_cross_entropy(x.contiguous(), target, o)
            assert_same_bits(allfinite.cross_entropy(x, target, label_smoothing=o.label_smoothing), want["loss"])


def test_gradients_do_not_depend_on_which_are_wanted():
    """The kernel leaves out what nobody asks for; the bits of the other gradient stay."""
    x, target = torch.randn(7, 40), torch.rand(7, 40)
    full = run_cross_entropy(x, target, Options(label_smoothing=0.1), torch.ones(()))
    for wanted in ("dx", "dtarget"):
        leaves = {"dx": x.clone(), "dtarget": target.clone()}
        leaves[wanted].requires_grad_()
        allfinite.cross_entropy(*leaves.values(), label_smoothing=0.1).backward()
        assert_same_bits(leaves[wanted].grad, full[wanted])
