"""Ops with faults, as modules that stand in for allfinite: what the harness must find."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import allfinite

Edit = Callable[[Tensor], Tensor]


class _Edited(torch.autograd.Function):
    """Changes a result on its way out, or the gradients that come out of the real backward."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, forward: Edit, backward: Edit) -> Tensor:
        ctx.backward_edit = backward
        return forward(t.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_edit(grad.clone()), None, None


def _keep(t: Tensor) -> Tensor:
    return t


def norm_with(output: Edit = _keep, dx: Edit = _keep, dweight: Edit = _keep) -> SimpleNamespace:
    """layer_norm whose output or gradients are edited."""

    def layer_norm(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        x = _Edited.apply(x, _keep, dx)
        weight = None if weight is None else _Edited.apply(weight, _keep, dweight)
        return _Edited.apply(allfinite.layer_norm(x, shape, weight, bias, eps), output, _keep)

    return SimpleNamespace(layer_norm=layer_norm)


def three_ulps_off(t: Tensor) -> Tensor:
    """The last number of a tensor moves by three ulps."""
    if t.numel() and t.dtype in (torch.float16, torch.bfloat16) and t.flatten()[-1].isfinite():
        t.view(-1).view(torch.int16)[-1] += 3
    return t


def nan_becomes_zero(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, torch.inf, -torch.inf)


def saturates(t: Tensor) -> Tensor:
    return t.nan_to_num(torch.nan)


def depends_on_the_batch(t: Tensor) -> Tensor:
    """Half an ulp more where there are several rows."""
    return torch.nextafter(t, torch.full_like(t, torch.inf)) if t.dtype == torch.float32 and len(t) > 1 else t


def depends_on_the_threads(t: Tensor) -> Tensor:
    return torch.nextafter(t, torch.full_like(t, torch.inf)) if torch.get_num_threads() == 5 else t


def flushes_small_gradients(t: Tensor) -> Tensor:
    """What is below 2^-30 vanishes, as in a kernel that rounds on the way."""
    return torch.where(t.abs() < 2.0**-30, 0, t)


def rounds_sums_to_bf16(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16).to(t.dtype)


def norm_that_ignores_strides() -> SimpleNamespace:
    """layer_norm that reads memory in order, from the first number on."""

    def layer_norm(x: Tensor, *rest: Any) -> Tensor:
        return allfinite.layer_norm(x.as_strided(x.shape, torch.empty(x.shape).stride()), *rest)

    return SimpleNamespace(layer_norm=layer_norm)


def attention_without_mask() -> SimpleNamespace:
    """Attention that forgets bool masks."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        mask = mask if mask is None or mask.is_floating_point() else None
        return allfinite.scaled_dot_product_attention(q, k, v, mask, **options)

    return SimpleNamespace(scaled_dot_product_attention=attention)


class _RoundedD(torch.autograd.Function):
    """Moves D = sum(dO * O) by the rounding of O: in the backward that is a gradient of lse."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, lse: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rounding = rounding
        return output.clone(), lse.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, None]:
        moved = (grad.double() * ctx.rounding).sum(-1)
        return grad, grad_lse - moved.to(grad_lse.dtype), None


def attention_with_rounded_d() -> SimpleNamespace:
    """Attention whose backward takes D from the rounded output, as many do."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        output, lse = allfinite.scaled_dot_product_attention(q, k, v, mask, **options)
        wide = (
            None if t is None else t.detach() if t.dtype == torch.bool else t.detach().double() for t in (q, k, v, mask)
        )
        exact, _ = allfinite.scaled_dot_product_attention(*wide, **options)
        return _RoundedD.apply(output, lse, (output.detach().double() - exact).nan_to_num(0, 0, 0))

    return SimpleNamespace(scaled_dot_product_attention=attention)


def unscale_that(fault: str) -> SimpleNamespace:
    """unscale_and_check_ by loops over entries, with one of three faults."""

    def unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        if fault == "clears the flag":
            found_inf.zero_()
        if fault == "scales shared memory twice" and all(0 not in t.stride() for t in grads):
            for t in grads:
                allfinite.unscale_and_check_([t], found_inf, inv_scale)
        else:
            allfinite.unscale_and_check_(grads, found_inf, inv_scale)

    return SimpleNamespace(unscale_and_check_=unscale)


def scale_update_in_float32() -> SimpleNamespace:
    """update_scale_ with its product in float32 and no bounds."""

    def update(
        scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int, **_: Any
    ) -> None:
        if found != 0:
            scale.mul_(torch.tensor(backoff))
            tracker.zero_()
        elif int(tracker) + 1 >= interval:
            scale.mul_(torch.tensor(growth))
            tracker.zero_()
        else:
            tracker.add_(1)

    return SimpleNamespace(update_scale_=update)


def stats_in_float32() -> SimpleNamespace:
    """grad_stats whose norm is added up in float32."""

    def grad_stats(grads: list[Tensor]) -> tuple[Tensor, ...]:
        found, _, *rest = allfinite.grad_stats(grads)
        squares = sum((t.float().square().sum() for t in grads), torch.zeros(()))
        return found, squares.sqrt().double(), *rest

    return SimpleNamespace(grad_stats=grad_stats)
