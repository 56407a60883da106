"""What a scaler accepts: constructor, setters, update(new_scale), and a disabled scaler."""

import inspect
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from allfinite.amp import GradScaler, ScalePolicy
from support.amp import INF, NAN, parameter, scaler, sgd


def test_signature_begins_as_torchs() -> None:
    """Guards positional calls and GradScalerKwargs of other libraries."""
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.items())
    ours = list(inspect.signature(GradScaler).parameters.items())
    assert [(name, p.default) for name, p in ours[: len(theirs)]] == [(name, p.default) for name, p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for _, p in ours[len(theirs) :])


def test_defaults() -> None:
    made = GradScaler("cpu")
    assert isinstance(made, torch.amp.GradScaler)
    assert (made.get_scale(), made.get_growth_factor(), made.get_backoff_factor()) == (65536.0, 2.0, 0.5)
    assert (made.get_growth_interval(), made.get_min_scale(), made.get_max_scale()) == (2000, 1.0, 2.0**24)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("init_scale", v) for v in (0.0, -1.0, NAN, INF, 1e39, 1e-50)),
        *(("growth_factor", v) for v in (1.0, 0.5, -2.0, NAN, INF)),
        *(("backoff_factor", v) for v in (0.0, 1.0, -0.5, NAN, 2.0)),
        *(("growth_interval", v) for v in (0, -3)),
        *((bound, v) for bound in ("min_scale", "max_scale") for v in (0.0, -1.0, NAN, INF, 2.0**127, 2.0**-127)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    """Torch accepts NaN, an interval of 0 and a negative back-off, and goes wrong later (N20)."""
    with pytest.raises(ValueError, match=name) as caught:
        GradScaler("cpu", **{name: value})
    assert isinstance(caught.value, AssertionError), "torch raises AssertionError for some of these"


@pytest.mark.parametrize(
    ("name", "value"), [("init_scale", True), ("growth_factor", "2"), ("growth_interval", 2.5), ("min_scale", None)]
)
def test_a_value_of_the_wrong_kind_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        GradScaler("cpu", **{name: value})


def test_a_floor_above_the_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="min_scale <= max_scale"):
        GradScaler("cpu", min_scale=8.0, max_scale=4.0)


def test_setters_validate_and_change_nothing_on_error() -> None:
    made = scaler()
    for setter, bad in [
        (made.set_growth_factor, 1.0),
        (made.set_backoff_factor, NAN),
        (made.set_growth_interval, 0),
        (made.set_min_scale, 0.0),
        (made.set_max_scale, 0.5),
    ]:
        before = made.policy
        with pytest.raises(ValueError, match="expected"):
            setter(bad)
        assert made.policy == before
    made.set_growth_factor(3)
    made.set_backoff_factor(0.25)
    made.set_growth_interval(7)
    made.set_min_scale(2.0)
    made.set_max_scale(8.0)
    assert made.policy == ScalePolicy(3.0, 0.25, 7, 2.0, 8.0)


@pytest.mark.parametrize(
    "value",
    [
        1024,
        1024.0,
        np.float32(1024),
        np.int64(1024),
        torch.tensor(1024.0),
        torch.tensor([1024]),
        torch.full((1, 1), 1024.0),
    ],
    ids=lambda value: f"{type(value).__name__}{getattr(value, 'shape', '')}",
)
def test_update_takes_any_number(value: Any) -> None:
    """Torch raises AttributeError for an int (N20) and RuntimeError for a tensor of shape (1,) (N48)."""
    made = scaler()
    made.update(value)
    assert made.get_scale() == 1024.0
    assert made._scale is not None
    assert made._scale.shape == ()


@pytest.mark.parametrize("value", [0.0, -4.0, NAN, INF, 1e39, torch.tensor(NAN), torch.tensor(0.0)])
def test_update_refuses_a_scale_that_corrupts(value: Any) -> None:
    """Torch accepts all of these (N20)."""
    made = scaler()
    with pytest.raises(ValueError, match="new_scale"):
        made.update(value)
    assert made.get_scale() == 4.0


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones((), requires_grad=True), torch.ones(0)])
def test_update_refuses_a_tensor_that_is_no_number(value: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="new_scale"):
        scaler().update(value)
    with pytest.raises(TypeError, match="new_scale"):
        scaler().update("8")


def test_update_with_a_scale_keeps_tracker_and_frees_optimizers() -> None:
    made, optimizer = scaler(growth_interval=3), sgd(parameter(1.0, 4.0))
    made.step(optimizer)
    made.update()
    made.step(optimizer)
    made.update(32.0)
    assert made._get_growth_tracker() == 1
    assert len(made._per_optimizer_states) == 0


def test_a_given_scale_beyond_the_bounds_is_kept() -> None:
    """min_scale limits back-off only, max_scale growth only; what a user gives is obeyed."""
    for given in (2.0**-10, 2.0**40):
        made = GradScaler("cpu", init_scale=given)
        made.scale(torch.ones(()))
        assert made.get_scale() == given
        made.update(given / 2)
        assert made.get_scale() == given / 2


def test_cuda_without_cuda_warns_and_disables() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        made = GradScaler()
    assert caught[0].filename == __file__, "the warning points at the caller"
    assert not made.is_enabled()


def test_disabled_passes_everything_through() -> None:
    made = GradScaler("cpu", enabled=False)
    loss, optimizer = torch.ones(()), sgd(parameter(3.0, 1.0))
    assert made.scale(loss) is loss
    assert made.scale("anything") == "anything"
    made.unscale_(optimizer)
    assert made.step(optimizer, lambda: torch.tensor(5.0)) == 5.0
    assert optimizer.param_groups[0]["params"][0].item() == 2.0
    made.update()
    made.update(-1.0)
    made.load_state_dict({})
    assert made.state_dict() == {}
    assert made.get_scale() == 1.0
    assert made._get_growth_tracker() == 0
    assert made.last_step is not None
    assert (made.last_step.status, made.last_step.scale) == ("stepped", 1.0)
    assert not pickle.loads(pickle.dumps(made)).is_enabled()


def test_disabled_getters_do_not_raise() -> None:
    """Torch's raise AttributeError."""
    made = GradScaler("cpu", growth_factor=3.0, enabled=False)
    assert (made.get_growth_factor(), made.get_backoff_factor(), made.get_growth_interval()) == (3.0, 0.5, 2000)
    assert made._get_scale_async() is None
    made.set_growth_interval(5)
    assert made.get_growth_interval() == 5


def test_disabled_does_not_validate() -> None:
    """Guards `GradScaler(init_scale=cfg.scale, enabled=cfg.scale > 0)`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler("cuda", init_scale=0.0, enabled=False)


class TestScalePolicy:
    def test_refuses_like_the_scaler(self) -> None:
        with pytest.raises(ValueError, match="growth_factor"):
            ScalePolicy(growth_factor=1.0)
        made = ScalePolicy()
        with pytest.raises(ValueError, match=r"min_scale in \[2\^-126, 2\^126\], but got 0"):
            made.min_scale = 0.0
        assert made == ScalePolicy()

    def test_next_is_the_scale_after_an_iteration(self) -> None:
        made = ScalePolicy(growth_interval=2, min_scale=3.0, max_scale=10.0)
        assert made.next(8.0, 0, False) == (8.0, 1)
        assert made.next(8.0, 1, False) == (10.0, 0)
        assert made.next(8.0, 1, True) == (4.0, 0)
        assert made.next(4.0, 1, True) == (3.0, 0)

    def test_pickle_repr_and_equality(self) -> None:
        made = ScalePolicy(3.0, 0.25, 7, 2.0, 8.0)
        assert pickle.loads(pickle.dumps(made)) == made
        assert made != ScalePolicy()
        expected = "ScalePolicy(growth_factor=3, backoff_factor=0.25, growth_interval=7, min_scale=2, max_scale=8)"
        assert repr(made) == expected
