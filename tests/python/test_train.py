"""The training loop: measurements that are true, and a run that resumes bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import allfinite
from allfinite.train import checkpoint, layout, recipe
from allfinite.train.log import read_log
from allfinite.train.loop import Trainer, run_recipe
from allfinite.train.model import EagerAttention, SdpaAttention, ViT
from allfinite.train.options import Options
from allfinite.train.probe import LogitProbe, largest_logit, underflow_share

FP16_MAX = 65504.0


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code on a model that takes milliseconds a step."""
    monkeypatch.setattr(recipe, "DIM", 32)
    monkeypatch.setattr(recipe, "HEADS", 2)
    monkeypatch.setattr(recipe, "BATCH", 8)
    monkeypatch.setattr("allfinite.train.loop.CHECKPOINT_EVERY", 4)
    monkeypatch.setattr("allfinite.train.loop.ACCURACY_EVERY", 5)


def stop_after(steps: int) -> Callable[[], bool]:
    """A `should_stop` that lets this many steps pass."""
    asked = iter(range(steps + 1))
    return lambda: next(asked) >= steps


def train(folder: Path, name: str, options: Options, stop: Callable[[], bool] = lambda: False) -> bool:
    return run_recipe(options, name, layout.log(folder, name), layout.checkpoint(folder, name), stop)


def test_learning_rate_warms_up_stays_flat_and_decays() -> None:
    rates = [recipe.learning_rate(step, 600, 3e-2) for step in range(1, 601)]
    assert rates[49] == pytest.approx(1.5e-2)
    assert set(rates[99:350]) == {3e-2}
    assert rates[475] == pytest.approx(1.5e-2)
    assert 0 < rates[-1] < 2e-4


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_learning_rate_of_a_tiny_run_stays_above_zero(steps: int) -> None:
    assert all(0 < recipe.learning_rate(step, steps, 1.0) <= 1.0 for step in range(1, steps + 1))


@pytest.mark.parametrize("attention", [EagerAttention, SdpaAttention])
def test_attention_equals_its_definition(attention: type[EagerAttention]) -> None:
    module = attention(32, 2).double()
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in module.qkv(x).chunk(3, dim=-1))
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / 4.0, dim=-1)
    expected = module.proj(torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).flatten(2))
    # Both are float64 sums of at most 32 terms of order one.
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def attention_with_logits_beyond_fp16(dim: int = 32) -> tuple[EagerAttention, torch.Tensor]:
    """Attention whose q, k and v fit fp16 with ease, while q . k is about 300 * 300 * 16."""
    module = EagerAttention(dim, 2)
    with torch.no_grad():
        module.qkv.weight.copy_(torch.cat([300.0 * torch.eye(dim), 300.0 * torch.eye(dim), torch.eye(dim)]))
        module.qkv.bias.zero_()
    return module, torch.ones(2, 4, dim) + 0.01 * torch.arange(4.0).view(1, 4, 1)


def test_eager_attention_is_nan_beyond_65504_and_the_probe_still_counts() -> None:
    """The measurement must not overflow where the model does."""
    module, x = attention_with_logits_beyond_fp16()
    probe = LogitProbe(module)
    with torch.autocast("cpu", torch.float16):
        out = module(x)
    assert out.isnan().all()
    # 300 and 309 are exact in fp16, and so are 16 of their products in fp32.
    assert probe.largest() == 16 * 309.0**2


def test_converted_attention_is_finite_there_and_the_probe_sees_the_same() -> None:
    module, x = attention_with_logits_beyond_fp16()
    model = torch.nn.Sequential(module)
    probe = LogitProbe(model)
    allfinite.convert(model)
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    assert out.isfinite().all()
    assert probe.largest() == 16 * 309.0**2


def test_probe_takes_the_largest_of_all_layers_since_its_reset() -> None:
    model = torch.nn.Sequential(EagerAttention(32, 2), EagerAttention(32, 2))
    probe = LogitProbe(model)
    x = torch.randn(2, 4, 32)
    seen = [largest_logit(model[0].qkv(x), 2), largest_logit(model[1].qkv(model[0](x)), 2)]
    model(10 * x)
    probe.reset()
    model(x)
    assert probe.largest() == max(seen)


def test_probe_shows_a_nan_logit() -> None:
    """A maximum that drops NaN would report a dead model as calm."""
    qkv = torch.zeros(1, 2, 12)
    qkv[0, 1, 0] = math.nan
    assert largest_logit(qkv, 2).isnan()


def test_probe_refuses_to_report_nothing() -> None:
    with pytest.raises(ValueError, match="but got none"):
        LogitProbe(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="but got none"):
        LogitProbe(EagerAttention(32, 2)).largest()


def test_underflow_counts_zeros_and_subnormals_of_the_dtype() -> None:
    parameter = torch.zeros(6, requires_grad=True)
    parameter.grad = torch.tensor([0.0, 2.0**-15, -(2.0**-20), 2.0**-14, 1.0, math.inf])
    assert underflow_share([parameter, torch.zeros(9)], torch.float16) == 0.5
    assert underflow_share([parameter], torch.bfloat16) == 1 / 6
    assert math.isnan(underflow_share([], torch.float16))


def test_recipes_differ_only_in_attention_scaler_and_learning_rate() -> None:
    """A run that started from other weights or read other batches would prove nothing."""
    trainers = [Trainer(Options(seed=3), name) for name in recipe.RECIPES]
    first = trainers[0]
    for other in trainers[1:]:
        assert other.model.state_dict().keys() == first.model.state_dict().keys()
        for name, value in first.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), name
        assert torch.equal(other.order.next(), Trainer(Options(seed=3), "stock").order.next())
    assert [trainer.peak_lr for trainer in trainers] == pytest.approx([0.03, 0.03, 0.03, 0.003])
    ours = [isinstance(trainer.scaler, allfinite.amp.GradScaler) for trainer in trainers]
    assert ours == [False, False, True, True]


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_stopped_run_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Model, optimizer, scaler and order of the data must all go on: the logs are equal to the last digit."""
    options = Options(steps=11)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert train(whole, name, options)
    assert not train(parts, name, options, stop_after(3))
    assert not train(parts, name, options, stop_after(4))
    assert train(parts, name, options)
    assert read_log(layout.log(parts, name))[:-1] == read_log(layout.log(whole, name))[:-1]
    states = [checkpoint.load_checkpoint(layout.checkpoint(folder, name)) for folder in (whole, parts)]
    assert states[0] is not None
    assert states[1] is not None
    for state in states:
        state.pop("seconds")
    assert_same(states[0], states[1])


def assert_same(a: object, b: object) -> None:
    """Equal bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert isinstance(b, dict)
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_steps_after_the_last_checkpoint_are_run_again(tmp_path: Path) -> None:
    """A killed process leaves a log ahead of its checkpoint, here at step 4 of 6."""
    options = Options(steps=11)
    assert train(tmp_path, "stock", options)
    expected = read_log(layout.log(tmp_path, "stock"))
    saved = tmp_path / "saved.pt"
    layout.checkpoint(tmp_path, "stock").unlink()
    train(tmp_path, "stock", options, stop_after(4))
    layout.checkpoint(tmp_path, "stock").replace(saved)
    train(tmp_path, "stock", options, stop_after(6))
    saved.replace(layout.checkpoint(tmp_path, "stock"))
    assert train(tmp_path, "stock", options)
    assert read_log(layout.log(tmp_path, "stock"))[:-1] == expected[:-1]


def test_checkpoint_ahead_of_its_log_starts_anew(tmp_path: Path) -> None:
    """A log with a hole would look whole; a fresh start is honest."""
    options = Options(steps=6)
    train(tmp_path, "stock", options, stop_after(4))
    log = layout.log(tmp_path, "stock")
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    assert train(tmp_path, "stock", options)
    assert [event.get("step") for event in read_log(log)] == [None, 1, 2, 3, 4, 5, 6, None]


def test_run_dies_after_twenty_nonfinite_losses_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images whose scores are NaN count as wrong, and skipped steps are seen as skipped."""

    class Broken(ViT):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) * math.inf

    monkeypatch.setattr("allfinite.train.loop.ViT", Broken)
    assert train(tmp_path, "stock", Options(steps=50))
    events = read_log(layout.log(tmp_path, "stock"))
    assert len(events) == 1 + recipe.DEATH_STREAK + 1
    assert all(event["skipped"] and math.isnan(event["loss"]) for event in events[1:-1])
    assert events[-1]["died"]
    assert events[-1]["accuracy"] == 0.0
    assert events[-1]["scale"] == 65536.0 * 2.0**-recipe.DEATH_STREAK


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_other_dtypes_train_without_a_scale(tmp_path: Path, dtype: str) -> None:
    assert train(tmp_path, "advised", Options(steps=3, dtype=dtype))
    steps = [event for event in read_log(layout.log(tmp_path, "advised")) if event["event"] == "step"]
    assert {event["scale"] for event in steps} == {1.0}
    assert not any(event["skipped"] for event in steps)
