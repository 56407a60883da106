"""Whole training loops under the scaler equal those without, in every pattern of torch's own documentation."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from allfinite.amp import GradScaler
from support.amp import INF, batches, models, same_parameters

loss_of = torch.nn.functional.mse_loss
SKIPPED = 2  # the iteration whose gradients overflow

Step = Callable[[Any, Any, Tensor, Tensor, "GradScaler | None", bool], None]


def train(step: Step, enabled: bool, atol: float = 1e-7, optimizer: Any = torch.optim.SGD, **kwargs: Any) -> None:
    """Runs a loop plainly and scaled, and compares the parameters; the scale must be exact, too.

    ``step`` does one iteration up to the optimizer's step; its last argument says whether to spoil a gradient.
    """
    control, scaled, step_control, step_scaled = models(optimizer, **kwargs)
    made = GradScaler("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)
    data = batches()
    for i, (x, y) in enumerate(data):
        overflow = enabled and i == SKIPPED
        step_scaled.zero_grad()
        step(scaled, step_scaled, x, y, made, overflow)
        made.update()
        if not overflow:
            step_control.zero_grad()
            step(control, step_control, x, y, None, False)
    assert made.get_scale() == (128.0 * 2 ** (len(data) - 1) * 0.5 if enabled else 1.0)
    same_parameters(control, scaled, atol=atol)


def spoil(model: Any) -> None:
    model[2].weight.grad[3, 3] = INF


def finish(optimizer: Any, made: GradScaler | None) -> None:
    if made is None:
        optimizer.step()
    else:
        made.step(optimizer)


def plain(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
    loss = loss_of(model(x), y)
    (loss if made is None else made.scale(loss)).backward()
    if overflow:
        spoil(model)
    finish(optimizer, made)


def clipping(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
    """Clips scaled gradients, to a norm scaled alike."""
    loss = loss_of(model(x), y)
    (loss if made is None else made.scale(loss)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2 * (1.0 if made is None else made.get_scale()))
    if overflow:
        spoil(model)
    finish(optimizer, made)


def separate(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
    """Unscales, then clips; after an overflow the parameters stay, whatever the clipping made of the gradients."""
    loss = loss_of(model(x), y)
    (loss if made is None else made.scale(loss)).backward()
    if overflow:
        spoil(model)
    before = [p.detach().clone() for p in model.parameters()]
    if made is not None:
        made.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    finish(optimizer, made)
    if overflow:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def penalty(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
    """A penalty on the gradients' norm: scaled for autograd.grad, unscaled by hand, and the sum scaled again."""
    loss = loss_of(model(x), y)
    scaled = loss if made is None else made.scale(loss)
    grads = torch.autograd.grad(scaled, model.parameters(), create_graph=True)
    inverse = 1.0 if made is None else 1.0 / made.get_scale()
    loss = loss + torch.stack([(g * inverse).square().sum() for g in grads]).sum().sqrt()
    (loss if made is None else made.scale(loss)).backward()
    if overflow:
        spoil(model)
    finish(optimizer, made)


def accumulation(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
    """Two micro-batches a step, one scale for both."""
    for part in (slice(0, 4), slice(4, 8)):
        loss = loss_of(model(x[part]), y[part]) / 2
        (loss if made is None else made.scale(loss)).backward()
    if overflow:
        spoil(model)
    finish(optimizer, made)


def pickled(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
    """A scaler that is pickled in each iteration goes on like one that is not."""
    if made is not None:
        made.__dict__ = pickle.loads(pickle.dumps(made)).__dict__
    plain(model, optimizer, x, y, made, overflow)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("step", [plain, clipping, separate, penalty, accumulation, pickled])
def test_scaled_training_equals_plain_training(step: Step, enabled: bool) -> None:
    """The clipped norms round in another place."""
    train(step, enabled, atol=1e-5 if step in (clipping, separate) else 1e-7)


@pytest.mark.parametrize("kwargs", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers(optimizer: Any, kwargs: dict[str, bool]) -> None:
    """Adam divides by the root of tiny squares, which magnifies the last bit of a gradient."""
    train(plain, True, atol=1e-4, optimizer=optimizer, lr=0.01, **kwargs)


def test_under_autocast() -> None:
    """float16 activations and gradients, float32 parameters; float16 rounds to 2^-11."""

    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, made: GradScaler | None, overflow: bool) -> None:
        with torch.autocast("cpu", torch.float16, enabled=made is not None):
            loss = loss_of(model(x).float(), y)
        (loss if made is None else made.scale(loss)).backward()
        if overflow:
            spoil(model)
        finish(optimizer, made)

    train(step, True, atol=2e-3)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_two_models_two_optimizers_two_losses(enabled: bool) -> None:
    """The losses mix both models; one optimizer is unscaled on its own; the overflow is in the other one."""
    pairs = [models(), models()]
    made = GradScaler("cpu", init_scale=128.0, growth_interval=1, enabled=enabled)
    data = batches()
    for i, (x, y) in enumerate(data):
        overflow = enabled and i == SKIPPED
        for plainly in (True, False):
            (a, step_a), (b, step_b) = ((m[0], m[2]) if plainly else (m[1], m[3]) for m in pairs)
            step_a.zero_grad()
            step_b.zero_grad()
            out_a, out_b = a(x), b(x)
            losses = [loss_of(0.3 * out_a + 0.7 * out_b, y), loss_of(0.6 * out_a - 0.4 * out_b, y)]
            for loss in losses if plainly else made.scale(losses):
                loss.backward(retain_graph=True)
            if plainly:
                step_a.step()
                if not overflow:
                    step_b.step()
                continue
            if overflow:
                spoil(b)
            made.unscale_(step_a)
            made.step(step_a)
            made.step(step_b)
        made.update()
    assert made.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
    for m in pairs:
        same_parameters(m[0], m[1])


def test_a_fused_and_a_plain_optimizer_together() -> None:
    """The first skips in its kernel, the second on the host, and one overflow backs the scale off once."""
    (_, a, _, _), (_, b, _, step_b) = models(), models()
    step_a = torch.optim.SGD(a.parameters(), lr=0.5, fused=True)
    made = GradScaler("cpu", init_scale=128.0, growth_interval=1)
    (x, y), *_ = batches(1)
    made.scale(loss_of(a(x), y) + loss_of(b(x), y)).backward()
    spoil(a)
    before = [p.detach().clone() for p in (*a.parameters(), *b.parameters())]
    made.step(step_a)
    made.step(step_b)
    made.update()
    moved = [not torch.equal(p, q) for p, q in zip((*a.parameters(), *b.parameters()), before, strict=True)]
    assert moved == [False] * 4 + [True] * 4
    assert made.get_scale() == 64.0
