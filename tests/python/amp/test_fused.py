"""Optimizers that skip by themselves: torch's fused ones, and any with ``_step_supports_amp_scaling``."""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allfinite.amp import GradScaler, StepResult
from allfinite.amp._step_result import Attempt
from support.amp import INF, NAN, batches, models, parameter, same_parameters, scaler, sgd, stock

OPTIMIZERS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
]


class Amp(torch.optim.SGD):
    """Takes the two attributes, as the contract says, and keeps what it saw."""

    def __init__(self, *params: torch.nn.Parameter, fail: bool = False) -> None:
        super().__init__(params, lr=1.0)
        self._step_supports_amp_scaling = True
        self.fail = fail
        self.seen: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        scale = self.grad_scale
        self.seen.append((None if scale is None else scale.item(), self.found_inf))
        if self.fail:
            raise ZeroDivisionError
        return "returned"


@pytest.mark.parametrize(("optimizer", "kwargs"), OPTIMIZERS)
@pytest.mark.parametrize("separate", [False, True])
def test_training_is_that_of_the_plain_optimizer(optimizer: Any, kwargs: dict[str, Any], separate: bool) -> None:
    """Guards unscaling twice (N35) or never, and a skip that is not one, over steps with an overflow among them."""
    plain, fused, step_plain, step_fused = models(optimizer, **kwargs)
    step_fused = optimizer(fused.parameters(), **({"lr": 0.5} | kwargs), fused=True)
    made = scaler(128.0)
    for i, (x, y) in enumerate(batches(5)):
        for model, step in ((plain, step_plain), (fused, step_fused)):
            step.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            (loss if model is plain else made.scale(loss)).backward()
        if i == 2:
            fused[0].weight.grad[1, 1] = INF
        else:
            step_plain.step()
        if separate:
            made.unscale_(step_fused)
        made.step(step_fused)
        assert made.last_step is not None
        assert made.last_step.status == ("skipped" if i == 2 else "stepped")
        made.update()
    assert made.get_scale() == 64.0
    same_parameters(plain, fused, rtol=1e-5, atol=1e-6)  # the fused kernels add in another order


@pytest.mark.parametrize(("optimizer", "kwargs"), OPTIMIZERS)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_skip_changes_nothing(optimizer: Any, kwargs: dict[str, Any], bad: float) -> None:
    param = parameter([1.0, 2.0], [4.0, 4.0])
    made, step = scaler(), optimizer([param], **({"lr": 0.5} | kwargs), fused=True)
    made.step(step)
    made.update()
    before, state = param.detach().clone(), copy.deepcopy(step.state_dict()["state"])
    param.grad = torch.tensor([4.0, bad])
    made.step(step)
    assert torch.equal(param, before)
    after = step.state_dict()["state"]
    for name, value in state.get(0, {}).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[0][name])), name


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_skipped_first_step_leaves_no_uninitialised_momentum(dampening: float) -> None:
    """N47: torch's fused SGD keeps memory that nothing has written, and multiplies it into the next step."""
    theirs = sgd(parameter([1.0, 2.0], [INF, 4.0]), momentum=0.9, dampening=dampening, fused=True)
    stock().step(theirs)
    assert any("momentum_buffer" in state for state in theirs.state.values())

    param = parameter([1.0, 2.0], [INF, 4.0])
    made = scaler()
    step = sgd(param, momentum=0.9, dampening=dampening, fused=True)
    made.step(step)
    assert "momentum_buffer" not in step.state[param]
    made.update()
    param.grad = torch.tensor([2.0, 4.0])
    made.step(step)
    assert param.tolist() == [0.0, 0.0]
    assert step.state[param]["momentum_buffer"].tolist() == [1.0, 2.0]


def test_last_step_names_the_culprit() -> None:
    param, other = parameter([1.0, 1.0], [-6.0, NAN]), parameter(1.0, 4.0)
    made = scaler(4.0)
    made.step(torch.optim.SGD([("a", other), ("b", param)], lr=1.0, fused=True))
    assert made.last_step == StepResult("skipped", "nan", 0, 1, "b", 1.5, 4.0, False)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scaler believe that reading a flag would wait for a device, so that it leaves the account for later."""
    monkeypatch.setattr(Attempt, "on_host", lambda self: False)
    monkeypatch.setattr(GradScaler, "_note_offender", lambda *args: None)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("bad", [False, True])
def test_the_account_of_a_step_may_be_read_after_update(bad: bool) -> None:
    """Guards the scale of now, or another optimizer's outcome, in the account of then."""
    param = parameter([1.0, 1.0], [-6.0, NAN if bad else 4.0])
    made, optimizer = scaler(4.0), torch.optim.SGD([("b", param)], lr=1.0, fused=True)
    made.step(optimizer)
    made.update(32.0)
    expected = StepResult("skipped", "nan", 0, 0, "b", 1.5, 4.0, False) if bad else StepResult("stepped", scale=4.0)
    assert made.last_step == expected


class HostReads(TorchDispatchMode):
    """Counts what would wait for a device: reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_ordinary_iteration_reads_no_more_than_torchs(fused: bool, separate: bool) -> None:
    """N41: a plain optimizer costs one wait, to know whether to call it; a fused one none."""
    counts = []
    for made in (scaler(), stock()):
        optimizer = torch.optim.AdamW([parameter([1.0], [4.0])], fused=fused, foreach=False)
        with HostReads() as reads:
            if separate:
                made.unscale_(optimizer)
            made.step(optimizer)
            made.update()
        counts.append(reads.count)
    assert counts[0] == counts[1]
    assert not fused or counts[0] == 0


@pytest.mark.usefixtures("late")
def test_an_account_that_is_read_too_late_names_nobody() -> None:
    param = parameter([1.0], [INF])
    made, optimizer = scaler(4.0), sgd(param, fused=True)
    made.step(optimizer)
    optimizer.zero_grad()
    assert made.last_step == StepResult("skipped", scale=4.0)


def test_the_attributes_and_what_is_returned() -> None:
    optimizer = Amp(parameter(1.0, 8.0))
    made = scaler(4.0)
    assert made.step(optimizer) == "returned"
    made.update()
    made.unscale_(optimizer)
    made.step(optimizer)
    assert [scale for scale, _ in optimizer.seen] == [4.0, None]
    assert [found.item() for _, found in optimizer.seen] == [0.0, 0.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_scale_that_the_user_set_is_multiplied() -> None:
    optimizer = Amp(parameter(1.0, 8.0))
    optimizer.grad_scale = torch.tensor(2.0)
    scaler(4.0).step(optimizer)
    assert optimizer.seen[0][0] == 8.0


def test_attributes_are_gone_after_an_exception() -> None:
    """Torch leaves them behind, and the next step multiplies by the old scale (N23)."""
    ours, theirs = Amp(parameter(1.0, 8.0), fail=True), Amp(parameter(1.0, 8.0), fail=True)
    for made, optimizer in ((scaler(), ours), (stock(), theirs)):
        with pytest.raises(ZeroDivisionError):
            made.step(optimizer)
    assert not hasattr(ours, "grad_scale")
    assert not hasattr(ours, "found_inf")
    assert hasattr(theirs, "grad_scale")


def test_found_inf_is_exactly_one() -> None:
    """Fused kernels compare with 1: a sum over two devices or ranks, 2.0, would step (N5)."""
    made, optimizer = scaler(), Amp(parameter(1.0, 8.0))
    made.unscale_(optimizer)
    flags = made._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    flags[torch.device("cpu")] = torch.tensor([2.0])
    made.step(optimizer)
    found = optimizer.seen[0][1]
    assert (found.item(), found.dtype, found.shape) == (1.0, torch.float32, ())


def test_without_gradients_the_optimizer_is_called() -> None:
    """As torch: it may keep its gradients elsewhere."""
    made, optimizer = scaler(growth_interval=1), Amp(parameter(1.0))
    assert made.step(optimizer) == "returned"
    assert made.last_step == StepResult("no_gradients")
    assert isinstance(optimizer.seen[0][1], torch.Tensor), "torch passes the int 0"
    made.update()
    assert made.get_scale() == 4.0


def test_a_scale_below_one_cannot_slip_an_infinity_into_the_kernel() -> None:
    param = parameter(1.0, 3e38)
    made = scaler(0.5, min_scale=0.25)
    made.step(sgd(param, fused=True))
    assert param.item() == 1.0
    assert made.last_step is not None
    assert made.last_step.reason == "after_unscale"


def test_memory_of_two_parameters_is_divided_once() -> None:
    """N49: the kernel writes the quotient back, and would divide that for the second parameter."""
    a, b = parameter([1.0]), parameter([1.0])
    a.grad = torch.tensor([8.0])
    b.grad = a.grad
    scaler(4.0).step(sgd(a, b, fused=True))
    assert (a.item(), b.item()) == (-1.0, -1.0)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    """The first kernel has divided its gradient in place."""
    param = parameter([1.0], [8.0])
    made = scaler()
    made.step(sgd(param, fused=True))
    with pytest.raises(RuntimeError, match="another optimizer"):
        made.step(sgd(param, fused=True))


def test_float16_gradients_are_allowed() -> None:
    """As torch: the kernel divides in float32."""
    param = parameter([1.0], [8.0], dtype=torch.float16)
    scaler(4.0).step(sgd(param, fused=True))
    assert param.item() == -1.0


def test_the_scaler_as_a_keyword() -> None:
    """The older contract: the optimizer takes grad_scaler=, and asks it."""

    class Asks(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            assert isinstance(grad_scaler, torch.amp.GradScaler)
            assert not hasattr(self, "found_inf")
            for _ in range(2):  # Apex: once a parameter group
                found = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
            return (found.item(), grad_scaler._get_scale_async().item())

    made, optimizer = scaler(), Asks([parameter(1.0, INF)], lr=1.0)
    with pytest.warns(FutureWarning, match="grad_scaler|keyword") as caught:
        assert made.step(optimizer) == (1.0, 4.0)
    assert caught[0].filename == __file__
    assert made.last_step is not None
    assert made.last_step.status == "skipped"
    made.update()
    assert made.get_scale() == 2.0
