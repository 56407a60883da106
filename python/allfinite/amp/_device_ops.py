"""The ops on gradients and scales on any device: ``torch.ops.allfinite`` where its kernels are, torch's own elsewhere.

The kernels are for the CPU. Tensors on other devices, and tensor subclasses such as DTensor that torch's op knows how
to spread over ranks, go through torch's ops, to which is added here, without a host sync, what they lack: the floor and
the cap, growth once the interval is *reached*, a check of the unscaled value, memory of several gradients scaled once,
complex numbers, norms in double.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from allfinite import _C, gradients
from allfinite._C import ScalePolicy
from allfinite._direct import direct

_get_total_norm = direct(_C.ops.get_total_norm, torch.ops.allfinite.get_total_norm)
_clip_grads_with_norm_ = direct(_C.ops.clip_grads_with_norm_, torch.ops.allfinite.clip_grads_with_norm_)


def unscale_and_check_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, may_overflow: bool) -> None:
    """Multiplies gradients of one device by ``inv_scale`` in place and sets ``found_inf`` to 1 at a non-finite value.

    Args:
        grads: of any floating or complex dtypes and shapes, all on one device.
        found_inf: float32, one element, on that device; set to 1, never cleared.
        inv_scale: float32, one element, on that device.
        may_overflow: whether ``inv_scale`` may be above 1, so that a finite gradient can become infinite by it.
    """
    own: list[Tensor] = []
    others: list[Tensor] = []
    for grad in grads:
        (own if _has_kernels(grad) else others).append(grad)
    if own:
        gradients.unscale_and_check_(own, found_inf, inv_scale)
    for same_dtype in _by_dtype(others):
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale)
        if may_overflow:
            torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, torch.ones_like(inv_scale))


def update_scale_(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, policy: ScalePolicy) -> None:
    """Moves ``scale`` (float32) and ``growth_tracker`` (int32) in place as ``policy`` says, without a host sync.

    Args:
        found_inf: float32; any value but 0 means that a gradient was not finite.
    """
    if _has_kernels(scale):
        gradients.update_scale_(
            scale,
            growth_tracker,
            found_inf,
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
            min_scale=policy.min_scale,
            max_scale=policy.max_scale,
        )
        return
    floor, cap = scale.clamp(max=policy.min_scale), scale.clamp(min=policy.max_scale)
    growth_tracker.clamp_(max=policy.growth_interval - 1)
    torch._amp_update_scale_(
        scale, growth_tracker, found_inf, policy.growth_factor, policy.backoff_factor, policy.growth_interval
    )
    torch.clamp(scale, floor, cap, out=scale)


def get_total_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all values of some tensors together: float64, no dimension.

    Args:
        tensors: as gradients of ``unscale_and_check_``.
        norm_type: > 0; ``inf`` is the largest magnitude.
    """
    if all(map(_has_kernels, tensors)):
        norm: Tensor = _get_total_norm(tensors, norm_type)
        return norm
    if not norm_type > 0:
        raise ValueError(f"allfinite::get_total_norm: expected norm_type > 0, but got {norm_type}")
    complex_or_real: dict[bool, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        complex_or_real[tensor.is_complex()].append(tensor)
    norms: list[Tensor] = []
    for is_complex, group in complex_or_real.items():
        norms += torch._foreach_norm(group, norm_type, dtype=torch.complex128 if is_complex else torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.double() for n in norms]), norm_type)
    return total


def clip_grads_with_norm_(grads: Sequence[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """``grads *= min(1, max_norm / (total_norm + 1e-6))`` in place; nothing where ``total_norm`` is not finite.

    Args:
        grads: as ``tensors`` of :func:`get_total_norm`, all on the device of ``total_norm``.
    """
    if all(map(_has_kernels, grads)):
        _clip_grads_with_norm_(grads, max_norm, total_norm)
        return
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    factor = torch.where(total_norm.isfinite(), factor, 1.0)
    for same_dtype in _by_dtype(grads):
        torch._foreach_mul_(same_dtype, factor)


def any_found(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Exactly 1 where a flag is not 0 (NaN is not), else exactly 0: float32, zero-dimensional, without a host sync."""
    gathered = [flag.to(device, non_blocking=True).reshape(()) for flag in flags]
    return torch.stack(gathered).ne(0).any().float() if gathered else torch.zeros((), device=device)


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cpu and (type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor))


def _by_dtype(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups for torch's op: one dtype each, complex as pairs of reals, the same memory once."""
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    seen = set()
    for grad in grads:
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        memory: object = id(grad)
        if not is_traceable_wrapper_subclass(real):
            expanded = [stride == 0 and size > 1 for stride, size in zip(real.stride(), real.shape, strict=True)]
            real = real[tuple(slice(0, 1) if e else slice(None) for e in expanded)] if any(expanded) else real
            memory = (real.data_ptr(), real.shape, real.stride(), real.dtype)
        if memory not in seen or real.numel() == 0:
            seen.add(memory)
            groups[real.dtype].append(real)
    return list(groups.values())
