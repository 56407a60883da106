"""How the scale moves. Each test runs with AllFinite's op and with torch's, which serves devices without kernels."""

import math

import pytest
import torch

from allfinite.amp import GradScaler, ScalePolicy, _device_ops
from support.amp import INF, parameter, scaler, sgd, stock


@pytest.fixture(params=["own", "torch"], autouse=True)
def _ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(_device_ops, "_has_kernels", lambda tensor: False)


def iterate(made: torch.amp.GradScaler, *bad: bool) -> list[tuple[float, int]]:
    """One iteration each, with or without an infinity; (scale, tracker) after each."""
    seen = []
    for overflow in bad:
        made.step(sgd(parameter(1.0, INF if overflow else 0.0)))
        made.update()
        seen.append((made.get_scale(), made._get_growth_tracker()))
    return seen


def test_growth_and_back_off() -> None:
    made = scaler(4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)
    assert iterate(made, False, False, False, True) == [(4.0, 1), (8.0, 0), (8.0, 1), (2.0, 0)]


@pytest.mark.filterwarnings("ignore:allfinite.amp.GradScaler")
@pytest.mark.parametrize("growth", [2.0, 3.7])
@pytest.mark.parametrize("backoff", [0.5, 0.3])
def test_within_extreme_bounds_it_is_torchs_bit_for_bit(growth: float, backoff: float) -> None:
    """A hundred iterations with scattered overflows, also where the products round."""
    kwargs = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": 3}
    bad = (torch.rand(100) < 0.15).tolist()
    ours = scaler(1000.0, min_scale=2.0**-126, max_scale=2.0**126, **kwargs)
    assert iterate(ours, *bad) == iterate(stock(1000.0, **kwargs), *bad)


@pytest.mark.filterwarnings("ignore:allfinite.amp.GradScaler")
@pytest.mark.parametrize("skips", [144, 166])
def test_after_any_number_of_skips_the_parameters_stay_finite(skips: int) -> None:
    """N1, N1a: torch's scale ends at 0 or has an infinite inverse, and the next good batch writes NaN or -inf."""
    results = []
    for made in (scaler(65536.0), stock(65536.0)):
        iterate(made, *[True] * skips)
        param = parameter([1.0, 1.0])
        param.grad = torch.tensor([3.0, 4.0]) * made.get_scale()
        made.step(sgd(param))
        made.update()
        results.append(param)
    assert results[0].tolist() == [-2.0, -3.0]
    assert not results[1].isfinite().any()


def test_the_floor_limits_back_off_only() -> None:
    with pytest.warns(UserWarning, match="min_scale=3"):
        assert iterate(scaler(4.0, min_scale=3.0), True, True)[-1] == (3.0, 0)
    below = scaler(0.5, min_scale=1.0, growth_interval=1)
    with pytest.warns(UserWarning, match="min_scale=1"):
        assert iterate(below, True) == [(0.5, 0)], "a given value is neither lowered nor raised by the floor"
    assert iterate(below, False) == [(1.0, 0)]


def test_the_cap_limits_growth_only() -> None:
    assert iterate(scaler(4.0, max_scale=6.0, growth_interval=1), False, False) == [(6.0, 0), (6.0, 0)]
    above = scaler(16.0, max_scale=6.0, growth_interval=1)
    assert iterate(above, False, True, True) == [(16.0, 0), (8.0, 0), (4.0, 0)]


def test_the_default_cap_keeps_the_inverse_normal() -> None:
    """N1b: torch keeps 2^127, whose inverse is subnormal and may flush every gradient to 0."""
    made = scaler(2.0**23, growth_interval=1)
    assert iterate(made, *[False] * 3)[-1] == (2.0**24, 0)


def test_growth_does_not_overflow() -> None:
    made = scaler(1e38, growth_factor=16.0, growth_interval=1)
    iterate(made, False)
    assert math.isfinite(made.get_scale())
    wide = scaler(1e38, growth_factor=16.0, growth_interval=1, max_scale=2.0**126)
    iterate(wide, False)
    assert math.isfinite(wide.get_scale())


def test_a_shorter_interval_that_is_already_reached_grows_at_once() -> None:
    """N19: torch compares with == and never grows again."""
    ours, theirs = scaler(4.0, growth_interval=100), stock(4.0, growth_interval=100)
    for made in (ours, theirs):
        iterate(made, *[False] * 60)
        made.set_growth_interval(50)
        iterate(made, *[False] * 50)
    assert ours.get_scale() == 8.0
    assert theirs.get_scale() == 4.0


def test_calibration_takes_as_many_skips_as_octaves() -> None:
    """N40: a float16 gradient of 8.0 fits from scale 4096 on."""
    made, skips = scaler(65536.0), 0
    for _ in range(6):
        grad = (torch.tensor(8.0) * made.get_scale()).half().float()
        made.step(sgd(parameter(1.0, grad.item())))
        made.update()
        assert made.last_step is not None
        skips += made.last_step.status == "skipped"
    assert (skips, made.get_scale()) == (4, 4096.0)


def test_a_floor_below_one_trains_where_gradients_are_beyond_float16() -> None:
    """N39: a true gradient of 1e5 fits at scale 0.5."""
    made = scaler(1.0, min_scale=2.0**-10)
    params = []
    for _ in range(2):
        param = parameter(1.0, (torch.tensor(1e5) * made.get_scale()).half().float().item())
        made.step(sgd(param))
        made.update()
        params.append(param)
    assert params[0].item() == 1.0
    assert params[1].item() == 1.0 - 99968.0  # float16(5e4), doubled
    assert made.get_scale() == 0.5


def test_the_scale_tensor_is_updated_in_place() -> None:
    """Captured graphs and other libraries hold on to it."""
    made = scaler(growth_interval=1)
    before = made._get_scale_async()
    iterate(made, False)
    assert made._get_scale_async() is before
    assert before is not None
    assert before.item() == 8.0


def test_one_scale_for_gradients_that_were_scaled_alike() -> None:
    """Accumulation: two backwards of one iteration add up, whatever the scale."""
    for scale in (1.0, 65536.0):
        param = parameter(0.0)
        made = GradScaler("cpu", init_scale=scale)
        for _ in range(2):
            made.scale(param * 1.0).backward()
        made.step(sgd(param))
        assert param.item() == -2.0


def test_policy_is_what_the_update_uses() -> None:
    made = scaler(8.0, growth_interval=2, min_scale=3.0, max_scale=10.0)
    assert made.policy == ScalePolicy(2.0, 0.5, 2, 3.0, 10.0)
    state = (8.0, 0)
    for bad in (False, False, True, True, False):
        state = made.policy.next(*state, bad)
        assert iterate(made, bad) == [state]
