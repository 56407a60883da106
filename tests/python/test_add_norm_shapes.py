"""Shapes, strides and aliasing of add_layer_norm and add_rms_norm."""

from dataclasses import replace

import pytest
import torch

import allfinite
from support.add_norm import NAMES, random_case
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits
from support.views import views


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(10,), (8, 10), (6, 8, 10)])
def test_any_strides_give_the_bits_of_contiguous_tensors(name, dtype, shape):
    """Strided input, residual, parameters and gradients: a kernel that reads past the strides would show."""
    batch = (6, 8, 10)[: 3 - len(shape)]
    wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
    case = random_case(name, dtype, residual_dtype=wide, batch=batch, shape=shape)
    want = case.run()
    strided_weight = case.weight.new_empty(*shape, 2)[..., 0].copy_(case.weight)
    names = list(views(case.x))
    for shift in range(len(names)):  # each of the four in another layout
        pick = {key: names[(shift + i) % len(names)] for i, key in enumerate(("x", "residual", "dy", "dsum"))}
        changes = {key: views(getattr(case, key))[layout] for key, layout in pick.items()}
        got = replace(case, weight=strided_weight, **changes).run()
        for key in want:
            assert_same_bits(got[key], want[key])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_tensors(name, dtype):
    """Stride 0: one row for all, and the gradients of y.sum() + residual_out.sum()."""
    case = random_case(name, dtype)
    ones = torch.ones((), dtype=dtype).expand(5, 33)
    replace(case, x=case.x[:1].expand(5, 33), dy=ones, dsum=ones).assert_accurate()
    replace(case, residual=case.residual[:1, :1].expand(5, 33)).assert_accurate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(0,), (3, 0), (0, 2)])
def test_empty_batch(name, dtype, batch):
    """No row: empty outputs and gradients, and zeros (not uninitialised memory) for weight and bias."""
    result = random_case(name, dtype, batch=batch).run()
    for key in ("y", "sum", "dx", "dresidual"):
        assert result[key].shape == (*batch, 33)
    for key in ("dweight", "dbias"):
        if key in result:
            assert torch.equal(result[key], torch.zeros(33, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
def test_empty_normalized_dimension(name):
    """Rows of no element: empty outputs, as torch gives."""
    result = random_case(name, torch.float32, batch=(3,), shape=(0,)).run()
    assert result["y"].shape == result["sum"].shape == result["dx"].shape == result["dresidual"].shape == (3, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 513])
def test_chunks_of_rows(name, rows):
    """The column sums are taken in chunks of rows: every row counts once at the edges of the chunks."""
    random_case(name, torch.float32, batch=(rows,), shape=(8,)).assert_accurate()


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_contiguous_and_separate(name):
    """Neither output aliases an argument or the other output."""
    case = random_case(name, torch.float32, batch=(4,), shape=(6,))
    x, residual = case.x.t().contiguous().t(), case.residual
    y, total = getattr(allfinite, name)(x, residual, case.shape)
    assert y.is_contiguous()
    assert total.is_contiguous()
    assert len({t.data_ptr() for t in (x, residual, y, total)}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tensor_as_input_and_residual(name):
    """add(x, x): the gradients of both uses add up; one tensor serves both without being added to itself."""
    case = random_case(name, torch.float32)
    case.residual = case.x
    want = case.run()
    leaf = case.x.clone().requires_grad_()
    leaves = {**case.leaves(), "dx": leaf, "dresidual": leaf}
    torch.autograd.backward(case.call(leaves), (case.dy, case.dsum))
    assert_same_bits(leaf.grad, want["dx"] + want["dresidual"])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_input_and_residual_do_not_share_memory(name):
    """In one dtype both gradients are one tensor inside; as .grad of two leaves, changing one must not change both."""
    case = random_case(name, torch.float32)
    leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}
    for arriving in ((case.dy, case.dsum), (torch.zeros_like(case.dy), case.dsum)):
        for leaf in leaves.values():
            leaf.grad = None
        torch.autograd.backward(case.call(leaves), arriving)
        before = leaves["dresidual"].grad.clone()
        leaves["dx"].grad.zero_()
        assert_same_bits(leaves["dresidual"].grad, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_inner_backward_never_returns_one_tensor_twice(name, residual_dtype):
    """The op's outputs may not alias: whoever asks it for both gradients gets two tensors of the right numbers."""
    case = random_case(name, torch.bfloat16, residual_dtype=residual_dtype)
    want = case.run()
    ops = torch.ops.allfinite
    _, total, stats = ops._add_norm_forward(case.x, case.residual, case.weight, case.bias, 1, case.eps, case.rms)
    for mask in ([True, True], [True, False], [False, True]):
        got = ops._add_norm_backward(
            case.dy, case.dsum, total, case.weight, case.bias, stats, 1, case.rms, [*mask, False, False]
        )
        assert got[2] is None
        for wanted, gradient, key in zip(mask, got, ("dx", "dresidual"), strict=False):
            if wanted:
                assert_same_bits(gradient, want[key])
            else:
                assert gradient is None
        assert not all(mask) or got[0].data_ptr() != got[1].data_ptr()
