"""``scale``: dtypes, structures, and where the scale lives."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from allfinite.amp import GradScaler
from support.amp import scaler, stock

Losses = namedtuple("Losses", ["first", "second"])


def test_nothing_is_allocated_before_the_first_loss() -> None:
    made = GradScaler("cpu", init_scale=8.0)
    assert made._scale is None
    assert made.get_scale() == 8.0
    assert made.scale(torch.tensor(2.0)).item() == 16.0
    assert made._scale is not None
    assert made._growth_tracker is not None
    assert (made._scale.dtype, made._scale.shape) == (torch.float32, ())
    assert (made._growth_tracker.dtype, made._growth_tracker.shape) == (torch.int32, ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_a_16_bit_loss_comes_back_as_float32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Torch scales a float16 loss of one or more dimensions to inf at the default scale."""
    loss = torch.full(shape, 2.0, dtype=dtype, requires_grad=True)
    scaled = scaler(65536.0).scale(loss)
    assert scaled.dtype is torch.float32
    torch.testing.assert_close(scaled, torch.full(shape, 131072.0), rtol=0, atol=0)
    scaled.sum().backward()
    assert loss.grad is not None
    assert loss.grad.dtype is dtype
    if dtype is torch.float16 and shape:
        assert stock(65536.0).scale(loss).isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_other_losses_keep_their_dtype(dtype: torch.dtype) -> None:
    assert scaler().scale(torch.ones(2, dtype=dtype)).dtype is dtype


def test_an_integer_loss_becomes_float32() -> None:
    assert scaler().scale(torch.tensor(3)).dtype is torch.float32


def test_lists_and_tuples_are_rebuilt() -> None:
    made = scaler()
    one = torch.ones(())
    out: Any = made.scale([one, (one, [one])])
    assert isinstance(out, list)
    assert isinstance(out[1], tuple)
    assert isinstance(out[1][1], list)
    assert out == [4.0, (4.0, [4.0])]


def test_named_tuples_are_kept() -> None:
    """Torch raises TypeError (N28)."""
    out = scaler().scale(Losses(torch.ones(()), [torch.ones(())]))
    assert isinstance(out, Losses)
    assert out == Losses(4.0, [4.0])


def test_other_iterables_stay_lazy() -> None:
    out = scaler().scale(torch.tensor(float(i)) for i in range(3))
    assert isinstance(out, map)
    assert list(out) == [0.0, 4.0, 8.0]


@pytest.mark.parametrize("value", [5, None, "loss", {"loss": torch.ones(())}], ids=str)
def test_what_is_no_loss_is_refused_at_once(value: Any) -> None:
    """Torch returns a lazy map over the keys of a dict and the letters of a string."""
    with pytest.raises(ValueError, match="Tensor or an iterable of Tensors"):
        scaler().scale(value)


def test_a_bad_entry_in_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="but got int"):
        scaler().scale([torch.ones(()), 5])
