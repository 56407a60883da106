"""update_scale_: the loss scale's arithmetic, its bounds, and what is refused."""

import math

import pytest
import torch
from torch import Tensor

import allfinite

WIDEST = {"min_scale": 2.0**-126, "max_scale": 2.0**126}


def state(scale: float, tracker: int = 0, found_inf: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found_inf)


def after(scale: float, tracker: int, found_inf: float, *rule: float, **bounds: float) -> tuple[float, int]:
    tensors = state(scale, tracker, found_inf)
    allfinite.update_scale_(*tensors, *rule, **bounds)
    return tensors[0].item(), int(tensors[1])


def test_grows_after_the_interval_and_backs_off_at_once() -> None:
    """The sequence of torch's own test of the raw op: growth 2, back-off 0.25, interval 2."""
    tensors = state(4.0)
    seen = []
    for found in (0.0, 0.0, 1.0):
        tensors[2].fill_(found)
        allfinite.update_scale_(*tensors, 2.0, 0.25, 2)
        seen.append((tensors[0].item(), int(tensors[1])))
    assert seen == [(4.0, 1), (8.0, 0), (2.0, 0)]


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.5, 0.3), (1.0000001, 0.9999999), (16.0, 0.1)])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_arithmetic_is_torch_bit_for_bit_at_the_widest_bounds(growth: float, backoff: float, found: float) -> None:
    """Guards against a product in float32, which rounds differently from float32(float64(scale) * factor)."""
    for scale in torch.logspace(-30, 30, 101, dtype=torch.float64).float().tolist():
        ours, theirs = state(scale, 6, found), state(scale, 6, found)
        allfinite.update_scale_(*ours, growth, backoff, 7, **WIDEST)
        torch._amp_update_scale_(*theirs, growth, backoff, 7)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_nan_in_found_inf_counts_as_found() -> None:
    assert after(8.0, 3, math.nan) == (4.0, 0)


@pytest.mark.parametrize("found", [2.0, 0.5, -1.0, math.inf])
def test_any_value_but_zero_counts_as_found(found: float) -> None:
    """A flag summed over two devices is 2, over ranks any number."""
    assert after(8.0, 3, found) == (4.0, 0)


@pytest.mark.parametrize(
    ("scale", "found", "bounds", "expected"),
    [
        (1.0, 1.0, {}, 1.0),  # at the floor
        (1.5, 1.0, {}, 1.0),  # stopped by the floor
        (0.25, 1.0, {}, 0.25),  # below the floor because a user said so: not raised, not lowered
        (0.25, 0.0, {}, 0.5),  # and grows: the floor limits back-off only
        (2.0**24, 0.0, {}, 2.0**24),  # at the cap
        (1.5 * 2.0**23, 0.0, {}, 2.0**24),  # stopped by the cap
        (2.0**30, 0.0, {}, 2.0**30),  # above the cap because a user said so
        (2.0**30, 1.0, {}, 2.0**29),  # and backs off: the cap limits growth only
        (1.0, 1.0, {"min_scale": 2.0**-10}, 0.5),
        (2.0**24, 0.0, {"max_scale": 2.0**25}, 2.0**25),
    ],
)
def test_a_bound_stops_a_scale_and_never_moves_one(
    scale: float, found: float, bounds: dict[str, float], expected: float
) -> None:
    assert after(scale, 0, found, 2.0, 0.5, 1, **bounds) == (expected, 0)


def test_scale_stays_normal_under_endless_back_off() -> None:
    """torch goes on to 0 (N1): grad * inf is then written into the parameters with found_inf = 0."""
    tensors, theirs = state(65536.0, 0, 1.0), state(65536.0, 0, 1.0)
    for _ in range(300):
        allfinite.update_scale_(*tensors, **WIDEST)
        torch._amp_update_scale_(*theirs, 2.0, 0.5, 2000)
    assert tensors[0].item() == 2.0**-126
    assert math.isfinite(tensors[0].reciprocal().item())
    assert theirs[0].item() == 0.0


def test_scale_stays_finite_under_endless_growth() -> None:
    """N1b: torch stops at 2^127, whose inverse is subnormal (0 where subnormals are flushed)."""
    tensors, theirs = state(65536.0), state(65536.0)
    for _ in range(300):
        allfinite.update_scale_(*tensors, 2.0, 0.5, 1, **WIDEST)
        torch._amp_update_scale_(*theirs, 2.0, 0.5, 1)
    assert tensors[0].item() == 2.0**126
    assert tensors[0].reciprocal().item() == torch.finfo(torch.float32).tiny
    assert 0 < theirs[0].reciprocal().item() < torch.finfo(torch.float32).tiny


def test_growth_that_would_overflow_is_left_out() -> None:
    assert after(1e38, 0, 0.0, 16.0, 0.5, 1, **WIDEST) == (torch.tensor(1e38).item(), 0)


def test_a_shorter_interval_takes_effect_at_once() -> None:
    """N19: torch compares with ==, so a tracker beyond the new interval never grows again."""
    assert after(8.0, 60, 0.0, 2.0, 0.5, 50) == (16.0, 0)
    theirs = state(8.0, 60)
    torch._amp_update_scale_(*theirs, 2.0, 0.5, 50)
    assert theirs[0].item() == 8.0


def test_an_interval_beyond_int32_is_never_reached() -> None:
    largest = 2**31 - 1
    assert after(8.0, largest, 0.0, 2.0, 0.5, 2**40) == (8.0, largest)


def test_a_nan_scale_is_not_hidden() -> None:
    """F2: a floor taken with max() would turn a NaN scale into a healthy one."""
    assert math.isnan(after(math.nan, 0, 1.0)[0])
    assert math.isnan(after(math.nan, 0, 0.0, 2.0, 0.5, 1)[0])


def test_one_element_of_any_shape() -> None:
    scale, tracker = torch.full((1,), 8.0), torch.zeros(1, 1, dtype=torch.int32)
    allfinite.update_scale_(scale, tracker, torch.ones(1))
    assert scale.tolist() == [4.0]


def test_writes_are_counted_for_autograd() -> None:
    """A graph that saved the scale must notice that it moved."""
    scale, tracker, found = state(8.0)
    loss = torch.ones((), requires_grad=True) * scale
    allfinite.update_scale_(scale, tracker, found)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_opcheck() -> None:
    op = torch.ops.allfinite.update_scale_.default
    torch.library.opcheck(op, (*state(8.0), 2.0, 0.5, 1, 1.0, 2.0**24))


def test_compiles_without_a_graph_break() -> None:
    def scale_loop(scale: Tensor, tracker: Tensor, found: Tensor) -> Tensor:
        allfinite.update_scale_(scale, tracker, found, growth_interval=2)
        return scale * 2

    tensors = state(8.0, 1)
    compiled = torch.compile(scale_loop, fullgraph=True, backend="aot_eager")
    assert compiled(*tensors).item() == 32.0
    assert (tensors[0].item(), int(tensors[1])) == (16.0, 0)


def test_exports() -> None:
    """torch.export keeps the writes, also after they are made functional."""

    class Update(torch.nn.Module):
        def forward(self, scale: Tensor, tracker: Tensor, found_inf: Tensor) -> tuple[Tensor, Tensor]:
            scale, tracker = scale.clone(), tracker.clone()
            torch.ops.allfinite.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 5, 1.0, 2.0**24)
            return scale, tracker

    state = torch.tensor(4.0), torch.tensor(3, dtype=torch.int32), torch.tensor(0.0)
    program = torch.export.export(Update(), state)
    for exported in (program, program.run_decompositions({})):
        scale, tracker = exported.module()(*state[:2], torch.tensor(1.0))
        assert (scale.item(), tracker.item()) == (2.0, 0)
