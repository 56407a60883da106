"""unscale_and_check_ where elements or entries share memory: every number is unscaled once."""

import pytest
import torch

from support import gradients
from support.bounds import assert_same_bits
from support.gradients import torch_unscale, unscale


def test_n49_a_tensor_that_two_parameters_share_is_unscaled_once() -> None:
    grad = torch.tensor([8.0, 2.0])
    assert unscale([grad, torch.ones(1), grad, grad.view(2, 1), grad.detach()], 0.5) == 0
    assert grad.tolist() == [4.0, 1.0]
    theirs = torch.tensor([8.0, 2.0])
    torch_unscale([theirs, theirs], 0.5)
    assert theirs.tolist() == [2.0, 0.5]  # torch: twice


def test_expanded_gradients_are_unscaled_once() -> None:
    """A bias of a sum has such a gradient; torch refuses it."""
    base = torch.tensor([8.0, 2.0])
    assert unscale([base.view(2, 1).expand(2, 3), torch.ones(1).expand(4)], 0.5) == 0
    assert base.tolist() == [4.0, 1.0]


def test_partly_shared_memory_is_unscaled_once() -> None:
    base = torch.arange(24.0)
    expected = base * 0.5
    assert unscale([base[:10], base[6:16], base[20:], base.view(4, 6)[:, ::2]], 0.5) == 0
    untouched = torch.tensor([17, 19])
    expected[untouched] *= 2
    assert_same_bits(base, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64], ids=str)
def test_any_views_of_one_memory_are_unscaled_once(dtype: torch.dtype) -> None:
    """Against the set of touched places: whatever sizes, strides, gaps, overlaps and repeats."""
    for _ in range(200):
        base = torch.ones(100, dtype=dtype)
        views = gradients.random_views(base, 4)
        places = torch.arange(100)
        touched = [places.as_strided(v.shape, v.stride(), v.storage_offset()).flatten() for v in views]
        expected = torch.ones_like(base)
        expected[torch.cat(touched)] = 0.5
        assert unscale(views, 0.5) == 0
        assert_same_bits(gradients.parts(base), gradients.parts(expected))


def test_overlapping_windows_are_unscaled_once() -> None:
    base = torch.arange(12.0)
    assert unscale([base.unfold(0, 4, 2)], 0.5) == 0
    assert_same_bits(base, torch.arange(12.0) * 0.5)


def test_interleaved_views_stay_apart() -> None:
    """Their address ranges overlap, their numbers do not."""
    base = torch.randn(6, 9)
    expected = base * 0.5
    assert unscale([base[:, :5], base[:, 5:]], 0.5) == 0
    assert_same_bits(base, expected)
    mixed = torch.randn(8)
    halves = mixed.view(torch.float16)[1::4]
    assert unscale([mixed[1::2], halves], 1.0) == 0


def test_a_complex_tensor_and_its_parts_are_one() -> None:
    base = torch.randn(5, dtype=torch.complex64)
    expected = base * 0.5
    assert unscale([base, torch.view_as_real(base)], 0.5) == 0
    assert torch.equal(base, expected)


def test_shared_memory_of_two_dtypes_is_refused_before_the_first_write() -> None:
    base, other = torch.ones(8), torch.ones(3)
    with pytest.raises(ValueError, match="expected entries that share memory to share whole numbers of one dtype"):
        unscale([other, base[:4].view(torch.float16), base], 0.5)
    assert (base == 1).all()
    assert (other == 1).all()


def test_lazy_conjugates_and_negatives() -> None:
    base = torch.randn(5, dtype=torch.complex64)
    expected = base * 0.5
    conjugate = base.conj()
    assert unscale([conjugate], 0.5) == 0
    assert conjugate.is_conj()
    assert torch.equal(base, expected)
    imaginary = base.conj().imag
    assert imaginary.is_neg()
    assert unscale([imaginary], 0.5) == 0
    assert torch.equal(base.imag, expected.imag * 0.5)


def test_a_lazy_copy_does_not_change_its_source() -> None:
    source = torch.ones(4)
    copy = torch._lazy_clone(source)
    assert unscale([copy], 0.5) == 0
    assert (source == 1).all()
    assert (copy == 0.5).all()
