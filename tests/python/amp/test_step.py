"""``step`` and the order of calls: what is returned, what is refused, and what ``last_step`` tells."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import OptState

from allfinite.amp import GradScaler, StepResult
from support.amp import INF, NAN, parameter, scaler, sgd, stock


def last(made: GradScaler) -> StepResult:
    assert made.last_step is not None
    return made.last_step


class Plain:
    """The least that is an optimizer: what LR schedulers and Accelerate put in front of one looks like this."""

    def __init__(self, *params: torch.nn.Parameter, value: Any = "stepped") -> None:
        self.param_groups = [{"params": list(params)}]
        self.value = value
        self.calls: list[Any] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.value


class TestReturnsAndArguments:
    def test_returns_what_the_optimizer_returns(self) -> None:
        made, optimizer = scaler(), Plain(parameter(1.0, 4.0), value=17.5)
        assert made.step(optimizer) == 17.5

    def test_returns_none_and_does_not_call_on_a_skip(self) -> None:
        made, optimizer = scaler(), Plain(parameter(1.0, INF))
        assert made.step(optimizer) is None
        assert optimizer.calls == []

    def test_positional_and_keyword_arguments_are_passed_on(self) -> None:
        """Accelerate calls step(optimizer, None)."""
        made, optimizer = scaler(), Plain(parameter(1.0, 4.0))
        made.step(optimizer, None, 3, weight=2)
        assert optimizer.calls == [((None, 3), {"weight": 2})]

    def test_step_is_called_through_the_attribute(self) -> None:
        """Accelerate and LR schedulers replace optimizer.step to see whether it ran."""
        made, optimizer, seen = scaler(), sgd(parameter(1.0, 4.0)), []
        original = optimizer.step
        optimizer.step = lambda *a: seen.append(a) or original(*a)
        made.step(optimizer, None)
        assert seen == [(None,)]

    def test_a_closure_is_refused_however_it_is_passed(self) -> None:
        """Torch runs a positional one on the scaled loss (N22)."""
        made, optimizer = scaler(), sgd(parameter(1.0, 4.0))
        with pytest.raises(RuntimeError, match="Closure"):
            made.step(optimizer, closure=lambda: 0.0)
        with pytest.raises(RuntimeError, match="Closure"):
            made.step(optimizer, closure=None)
        with pytest.raises(RuntimeError, match="Closure"):
            made.step(optimizer, lambda: 0.0)
        made.step(optimizer)

    def test_an_exception_in_the_optimizer_comes_through(self) -> None:
        made, param = scaler(), parameter(1.0, 4.0)
        optimizer = Plain(param)
        optimizer.step = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            made.step(optimizer)
        assert made._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


class TestOrder:
    def test_calls_out_of_order(self) -> None:
        """torch's errors, word for word where programs match on them."""
        made, optimizer = scaler(), sgd(parameter(1.0, 4.0))
        made.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since"):
            made.unscale_(optimizer)
        made.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
            made.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
            made.step(optimizer)
        made.update()
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            made.update()

    def test_an_iteration_that_the_user_skips_ends_with_update(self) -> None:
        """N38: unscale_, a look at the gradients, no step; update makes the optimizer ready again."""
        made, optimizer = scaler(growth_interval=1), sgd(parameter(1.0, 4.0))
        made.unscale_(optimizer)
        made.update()
        assert made.get_scale() == 8.0
        made.unscale_(optimizer)

    def test_everything_before_the_first_scale(self) -> None:
        made, optimizer = GradScaler("cpu"), sgd(parameter(1.0, 4.0))
        for call in (lambda: made.unscale_(optimizer), lambda: made.step(optimizer), made.update):
            with pytest.raises(AssertionError, match="_scale is None"):
                call()

    def test_unscale_then_step_unscales_once(self) -> None:
        made, param = scaler(), parameter(1.0, 8.0)
        optimizer = sgd(param)
        made.unscale_(optimizer)
        assert torch.as_tensor(param.grad).item() == 2.0
        made.step(optimizer)
        assert param.item() == -1.0

    def test_gradients_that_went_bad_after_unscale_are_applied(self) -> None:
        """N37, the upstream contract: there is no second check, because it would cost one more pass and sync."""
        made, param = scaler(), parameter(1.0, 8.0)
        optimizer = sgd(param)
        made.unscale_(optimizer)
        param.grad = torch.tensor(INF)
        made.step(optimizer)
        assert param.item() == -INF

    def test_gradients_that_came_after_unscale_are_not_applied(self) -> None:
        """They are still scaled."""
        made, param = scaler(), parameter(1.0)
        optimizer = sgd(param)
        made.unscale_(optimizer)
        param.grad = torch.tensor(4.0)
        with pytest.raises(AssertionError, match="came after unscale_"):
            made.step(optimizer)
        assert param.item() == 1.0


class TestNoGradients:
    def test_is_no_error_and_does_nothing(self) -> None:
        """Torch raises AssertionError (N24)."""
        made, optimizer = scaler(growth_interval=1), Plain(parameter(1.0))
        assert made.step(optimizer) is None
        assert optimizer.calls == []
        assert last(made) == StepResult("no_gradients")
        made.update()
        assert (made.get_scale(), made._get_growth_tracker()) == (4.0, 0), "nothing was learnt about the scale"
        with pytest.raises(AssertionError):
            made.update()

    def test_beside_an_optimizer_with_gradients(self) -> None:
        made, idle, busy = scaler(growth_interval=1), sgd(parameter(1.0)), sgd(parameter(1.0, 4.0))
        made.step(idle)
        made.step(busy)
        made.update()
        assert made.get_scale() == 8.0


class TestSeveralOptimizers:
    def test_each_skips_on_its_own_and_the_scale_backs_off_once(self) -> None:
        """N3."""
        a, b = parameter(1.0, INF), parameter(1.0, 2.0)
        made = scaler(2.0, growth_interval=1)
        for optimizer in (sgd(a), sgd(b)):
            made.step(optimizer)
        made.update()
        assert (a.item(), b.item(), made.get_scale()) == (1.0, 0.0, 1.0)

    @pytest.mark.parametrize("first", ["unscale_", "step"])
    def test_a_parameter_of_two_is_refused_by_name(self, first: str) -> None:
        """Torch divides its gradient twice (N8)."""
        shared, own = parameter(1.0, 8.0), parameter(1.0, 8.0)
        one = sgd(shared)
        two = torch.optim.SGD([("own", own), ("shared", shared)], lr=1.0)
        made = scaler()
        getattr(made, first)(one)
        with pytest.raises(RuntimeError, match=r"parameter 'shared'.*another optimizer"):
            made.unscale_(two)
        assert torch.as_tensor(shared.grad).item() == 2.0
        assert torch.as_tensor(own.grad).item() == 8.0, "refused before anything was touched"

    def test_a_gradient_of_two_is_refused(self) -> None:
        """N49 over two optimizers."""
        a, b = parameter(1.0, 8.0), parameter(1.0)
        b.grad = a.grad
        made = scaler()
        made.unscale_(sgd(a))
        with pytest.raises(RuntimeError, match=r"parameter 0 \(group 0, shape \(\)\)"):
            made.unscale_(sgd(b))

    def test_a_parameter_with_a_new_gradient_is_not_refused(self) -> None:
        """Two losses and two optimizers over one model, one after the other, are legitimate."""
        shared = parameter(1.0, 8.0)
        made = scaler()
        one, two = sgd(shared), sgd(shared)
        made.step(one)
        one.zero_grad()
        made.scale(shared * 1.0).backward()
        made.step(two)
        assert shared.item() == -2.0

    def test_a_new_gradient_at_the_address_of_an_unscaled_one_is_not_refused(self) -> None:
        """Allocators reuse the address often, not always: this is that case, every time."""
        old, new = parameter(1.0, 8.0), parameter(1.0, 8.0)
        made = scaler()
        made.unscale_(sgd(old))
        made._unscaled[id(new.grad)] = made._unscaled[id(old.grad)]
        made.unscale_(sgd(new))
        assert torch.as_tensor(new.grad).item() == 2.0

    def test_a_freed_optimizer_leaves_nothing_to_the_next_at_its_address(self) -> None:
        """Torch refuses the new one: "step() has already been called"."""
        made = scaler()
        param = parameter(1.0, INF)
        old = Plain(param)
        made.step(old)
        new = Plain(parameter(1.0, 4.0))
        # Allocators reuse the address often, not always: this is that case, every time.
        made._records[id(new)] = made._records.pop(id(old))
        made._per_optimizer_states[id(new)] = made._per_optimizer_states.pop(id(old))
        gone = weakref.ref(old)
        del old
        gc.collect()
        assert gone() is None, "the scaler does not keep an optimizer alive"
        made.step(new)
        assert len(new.calls) == 1
        made.update()
        assert made.get_scale() == 2.0, "what the old one found still counts"

    def test_an_optimizer_without_weak_references(self) -> None:
        class Slotted:
            __slots__ = ("param_groups",)

            def step(self) -> str:
                return "stepped"

        made, optimizer = scaler(), Slotted()
        optimizer.param_groups = [{"params": [parameter(1.0, 4.0)]}]
        assert made.step(optimizer) == "stepped"


class TestLastStep:
    def test_none_before_the_first(self) -> None:
        assert scaler().last_step is None

    def test_stepped(self) -> None:
        made = scaler()
        made.step(sgd(parameter(1.0, 4.0)))
        made.update(64.0)
        assert last(made) == StepResult("stepped", scale=4.0), "the scale of the step, not that of now"
        assert str(last(made)) == "stepped"

    @pytest.mark.parametrize(("bad", "reason"), [(INF, "inf"), (-INF, "inf"), (NAN, "nan")])
    def test_skipped_says_why_and_who(self, bad: float, reason: str) -> None:
        """pytorch's users compare get_scale() before and after, and learn neither."""
        good, culprit, later = parameter([1.0], [4.0]), parameter([1.0] * 3, [-12.0, bad, 8.0]), parameter(1.0, NAN)
        groups = [
            {"params": [("embed", good)]},
            {"params": [("head.weight", culprit), ("head.bias", later)]},
        ]
        made = scaler(4.0, min_scale=0.5)
        made.step(torch.optim.SGD(groups, lr=1.0))
        assert last(made) == StepResult("skipped", reason, 1, 1, "head.weight", 3.0, 4.0, False)
        text = f"skipped: {reason} in the gradient of parameter 1 (head.weight) of group 1, at scale 4"
        assert str(last(made)) == text

    def test_parameters_without_gradients_are_counted(self) -> None:
        made = scaler()
        made.step(sgd(parameter(1.0), parameter(1.0, INF)))
        assert (last(made).param_index, last(made).param_name) == (1, None)

    def test_clipping_after_unscale_does_not_hide_the_culprit(self) -> None:
        """N30: clipping an infinite norm turns the gradients into NaN and 0."""
        param = parameter([1.0, 1.0], [INF, 4.0])
        made, optimizer = scaler(), sgd(param)
        made.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        made.step(optimizer)
        assert param.tolist() == [1.0, 1.0]
        assert (last(made).reason, last(made).amax) == ("inf", 1.0)

    def test_a_sparse_culprit(self) -> None:
        param = torch.nn.Parameter(torch.zeros(3))
        indices, values = torch.tensor([[2, 0]]), torch.tensor([NAN, 8.0])
        param.grad = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
        made = scaler(4.0)
        made.step(sgd(param))
        assert (last(made).reason, last(made).amax) == ("nan", 2.0)

    def test_a_skip_at_the_floor_warns_once_and_names_the_knob(self) -> None:
        """N39, N45: other scalers raise, or go on for hundreds of silent skips."""
        param, made = parameter(1.0, INF), scaler(2.0, min_scale=1.0)
        optimizer = sgd(param)
        made.step(optimizer)
        assert not last(made).at_floor
        made.update()
        with pytest.warns(UserWarning, match="inf in the gradient of parameter 0.*min_scale=1") as caught:
            made.step(optimizer)
        assert caught[0].filename == __file__
        assert last(made).at_floor
        made.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made.step(optimizer)

    def test_schedulers_can_follow_real_steps(self) -> None:
        """N36: five iterations, infinities in the first and the third."""
        param = parameter(1.0)
        made, optimizer = scaler(), sgd(param)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        for grad in (INF, 4.0, INF, 4.0, 4.0):
            param.grad = torch.tensor(grad)
            made.step(optimizer)
            made.update()
            if last(made).status == "stepped":
                scheduler.step()
        assert scheduler.last_epoch == 3


def test_the_private_names_that_libraries_touch() -> None:
    """Apex, Transformer Engine, Accelerate, Lightning and FSDP read or call each of these."""
    made, reference = scaler(), stock()
    optimizer = sgd(parameter(1.0, INF))
    for name in vars(reference):
        assert hasattr(made, name), name
    assert made._per_optimizer_states[id(optimizer)] == {"stage": OptState.READY, "found_inf_per_device": {}}
    assert made._check_inf_per_device(optimizer)[torch.device("cpu")].item() == 1.0
    assert made._found_inf_per_device(optimizer)[torch.device("cpu")].item() == 1.0
    assert made._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert made._get_scale_async() is made._scale
    assert made._check_scale_growth_tracker("step") == (made._scale, made._growth_tracker)
    fresh = GradScaler("cpu")
    fresh._lazy_init_scale_growth_tracker(torch.device(fresh._device))
    assert fresh._scale is not None
    assert fresh._scale.item() == 65536.0
    assert fresh._init_growth_tracker == 0


def test_a_subclass_may_decide_by_itself() -> None:
    """mmengine and others override _maybe_opt_step or _unscale_grads_."""

    class Never(GradScaler):
        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> None:
            return None

    made = Never("cpu", init_scale=4.0)
    made.scale(torch.ones(()))
    optimizer = Plain(parameter(1.0, 4.0))
    made.step(optimizer)
    assert optimizer.calls == []


def test_a_subclass_may_end_the_iteration_by_itself() -> None:
    """Sharded scalers reset torch's states in an update() of their own; ours beside them must not outlive those."""

    class Own(GradScaler):
        def update(self, new_scale: Any = None) -> None:
            self._per_optimizer_states.clear()

    made = Own("cpu", init_scale=4.0)
    made.scale(torch.ones(()))
    param = parameter(1.0, INF)
    optimizer = sgd(param)
    made.step(optimizer)
    made.update()
    optimizer.zero_grad(set_to_none=False)
    param.grad.add_(4.0)
    made.step(optimizer)
    assert param.item() == 0.0
