"""Saving, loading and pickling: torch's files and ours, before and after the tensors exist."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from allfinite.amp import GradScaler
from support.amp import INF, NAN, parameter, scaler, sgd

STATE = {"scale": 2.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}


def values(made: torch.amp.GradScaler) -> dict[str, Any]:
    state = made.state_dict()
    return {name: state[name] for name in STATE}


def test_the_dict_is_torchs_and_the_bounds() -> None:
    made = GradScaler("cpu", min_scale=0.5, max_scale=2.0**20)
    assert made.state_dict() == torch.amp.GradScaler("cpu").state_dict() | {"min_scale": 0.5, "max_scale": 2.0**20}
    assert [type(value) for value in made.state_dict().values()] == [float, float, float, int, int, float, float]


@pytest.mark.parametrize("initialised", [False, True])
def test_loads_torchs_and_ours(initialised: bool) -> None:
    """Guards a load that leaves the tracker or the tensors as they were."""
    for state in (STATE, STATE | {"min_scale": 0.125, "max_scale": 64.0}):
        made = scaler(growth_interval=100) if initialised else GradScaler("cpu")
        made.load_state_dict(state)
        assert values(made) == STATE
        assert made.scale(torch.ones(())).item() == 2.0
        assert values(made) == STATE
        assert made.get_min_scale() == state.get("min_scale", 1.0)
        assert made.get_max_scale() == state.get("max_scale", 2.0**24)


def test_torch_loads_ours() -> None:
    made = scaler(16.0, growth_factor=3.0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(made.state_dict())
    assert theirs.get_scale() == 16.0
    assert theirs.get_growth_factor() == 3.0


def test_loads_numbers_that_are_tensors() -> None:
    """Megatron saves the scale as a tensor."""
    made = scaler()
    made.load_state_dict(STATE | {"scale": torch.tensor([2.0])})
    assert made.get_scale() == 2.0


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("how", ["load", "pickle", "deepcopy"])
def test_a_restored_scaler_works_before_the_first_scale(call: str, how: str) -> None:
    """N31: torch's raises "_scale is None" where the first thing after a resume is a clip or a step."""
    made = GradScaler("cpu")
    made.load_state_dict(STATE)
    if how == "pickle":
        made = pickle.loads(pickle.dumps(made))
    if how == "deepcopy":
        made = copy.deepcopy(made)
    param = parameter([1.0], [8.0])
    getattr(made, call)(sgd(param))
    assert torch.as_tensor(param.grad).item() == 4.0
    assert made._get_growth_tracker() == 5
    made.update()
    assert made._get_growth_tracker() == 6


def test_a_restored_scaler_takes_a_new_scale_at_once() -> None:
    made = GradScaler("cpu")
    made.load_state_dict(STATE)
    made.update(32.0)
    assert (made.get_scale(), made._get_growth_tracker()) == (32.0, 5)


@pytest.mark.parametrize(
    "change",
    [
        *({"scale": v} for v in (NAN, INF, 0.0, -1.0)),
        {"growth_factor": 1.0},
        {"backoff_factor": 1.5},
        {"growth_interval": 0},
        {"_growth_tracker": -1},
        {"min_scale": 0.0},
        {"max_scale": 0.5},
    ],
    ids=str,
)
def test_a_bad_file_is_refused_and_nothing_is_half_loaded(change: dict[str, Any]) -> None:
    """N34: torch loads NaN."""
    made = scaler()
    before = made.state_dict()
    with pytest.raises(ValueError, match="expected"):
        made.load_state_dict(STATE | change)
    assert made.state_dict() == before


def test_an_empty_or_incomplete_dict_is_refused() -> None:
    made = scaler()
    before = made.state_dict()
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        made.load_state_dict({})
    for name in STATE:
        with pytest.raises(KeyError, match=name):
            made.load_state_dict({k: v for k, v in STATE.items() if k != name})
    assert made.state_dict() == before


@pytest.mark.parametrize("initialised", [False, True])
def test_pickle_round_trip(initialised: bool) -> None:
    made = GradScaler("cpu", 3.0, 4.0, 0.5, 2, min_scale=0.25, max_scale=100.0)
    if initialised:
        made.scale(torch.tensor([4.0]))
    copied: GradScaler = pickle.loads(pickle.dumps(made))
    assert copied.is_enabled()
    assert copied.state_dict() == made.state_dict()
    assert copied._scale is None, "the tensors are made on the device of the next loss"
    assert copied._init_growth_tracker == 0
    assert copied._per_optimizer_states["any"] == _refresh_per_optimizer_state()
    assert copied.scale(torch.tensor([4.0])).item() == 12.0


def test_pickle_between_step_and_update_is_refused() -> None:
    made, optimizer = scaler(min_scale=0.5), sgd(parameter(1.0, INF))
    made.step(optimizer)
    with pytest.raises(AssertionError, match="only be pickled at the beginning of an iteration, or at the end"):
        pickle.dumps(made)
    made.update()
    copied: GradScaler = pickle.loads(pickle.dumps(made))
    assert copied.last_step == made.last_step


def test_torch_save(tmp_path: Any) -> None:
    """A checkpoint is read back with weights_only, which is torch's default."""
    torch.save(scaler(8.0).state_dict(), tmp_path / "scaler.pt")
    made = GradScaler("cpu")
    made.load_state_dict(torch.load(tmp_path / "scaler.pt"))
    assert made.get_scale() == 8.0


def test_a_resumed_run_is_the_run_that_was_not_interrupted() -> None:
    """N43: scale and tracker round-trip, so that growth comes at the same iteration."""

    def iterate(made: GradScaler) -> tuple[float, int]:
        param = parameter(0.0)
        made.scale(param * 1.0).backward()
        made.step(sgd(param))
        made.update()
        return made.get_scale(), made._get_growth_tracker()

    straight, before, after = (GradScaler("cpu", 1024.0, growth_interval=3) for _ in range(3))
    expected = [iterate(straight) for _ in range(8)]
    seen = [iterate(before) for _ in range(4)]
    after.load_state_dict(before.state_dict())
    assert seen + [iterate(after) for _ in range(4)] == expected
