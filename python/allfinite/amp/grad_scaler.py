"""``GradScaler``: torch's, with a floor, a cap, validated values and an account of each step."""

import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.utils.weak import TensorWeakRef

from allfinite.amp import _checks, _device_ops, _fused, _gradients
from allfinite.amp._device_ops import any_found
from allfinite.amp._scale_state import ScaleState
from allfinite.amp._step_result import Attempt, Offender, StepResult, find_offender

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass
class _Record:
    """What the scaler knows of an optimizer, beside torch's own per-optimizer state, until ``update()``."""

    optimizer: Callable[[], Any]
    scaled_flags: list[Tensor] | None = None
    offender: Offender | None = None
    skipped: bool | None = None
    divided: bool = False  # whether the gradients are unscaled now


class GradScaler(ScaleState):
    """Loss scaling as ``torch.amp.GradScaler``, of which it is a subclass and whose private names it keeps.

    What differs:

    * The scale stays within ``min_scale`` and ``max_scale``, and every value is validated where it enters.
    * The unscaled gradients are checked too; duplicates of a sparse gradient are summed before the check; memory that
      several gradients share is unscaled once.
    * ``last_step`` tells whether the step was skipped, why, and which parameter was the first to blame.
    * A step without any gradient does nothing. After ``load_state_dict`` or unpickling, ``unscale_`` and ``step`` work
      before the first ``scale``. A skipped first step of a fused optimizer leaves no uninitialised momentum.

    On a CPU the maths are ``torch.ops.allfinite``; on other devices torch's own ops are used, with the floor and the
    cap added on the device. A gradient that is a DTensor goes through torch's op, which agrees over its mesh.

    Args:
        device: ``"cuda"``, ``"cpu"`` or another device type. ``"cuda"`` without CUDA warns and disables the scaler.
        init_scale: the first scale; finite and > 0 as float32.
        growth_factor: finite and > 1.
        backoff_factor: in (0, 1).
        growth_interval: good iterations in a row until the scale grows; >= 1.
        enabled: False passes everything through, and nothing is validated.
        min_scale: the scale is not lowered below it, in [2^-126, 2^126]. A value that is given (``init_scale``,
            ``update(new_scale)``, a loaded state) may lie below. The first skip at the floor warns.
        max_scale: the scale does not grow above it; likewise.
        process_group: the ranks that skip together: found_inf is reduced over them, once an optimizer, so all of
            them must call ``unscale_`` and ``step`` alike. None: no communication, whatever the default group is.

    Raises:
        ValueError: a value out of its range (also an AssertionError, which torch raises for some of them).
        TypeError: a value of the wrong kind.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        self._process_group = process_group
        self._warned_at_floor = False
        self._last_step: StepResult | Attempt | None = None
        self._records: dict[int, _Record] = {}
        self._unscaled: dict[int, TensorWeakRef] = {}

    # ---- the loss ----

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: list[Tensor]) -> list[Tensor]: ...
    @overload
    def scale(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...
    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Tensor | Iterable[Tensor]:
        """Multiplies a loss, or all losses in nested lists and tuples, by the scale.

        Args:
            outputs: tensors of any shape and device. The first one ever seen says where the scale lives.

        Returns:
            The same structure, named tuples included; other iterables as a lazy ``map``. A 16-bit tensor of any shape
            comes back as float32, because the default scale alone is beyond float16; an integer tensor too. NaN and
            infinities pass through. A disabled scaler returns ``outputs`` itself.

        Raises:
            ValueError: neither a tensor nor an iterable of them (a mapping or a string is none).
        """
        if not self._enabled:
            return outputs
        per_device: dict[torch.device, Tensor] = {}

        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                if self._scale is None:
                    self._lazy_init_scale_growth_tracker(value.device)
                assert self._scale is not None
                if value.device not in per_device:
                    per_device[value.device] = self._scale.to(value.device, non_blocking=True)
                return (value.float() if value.dtype in _SIXTEEN_BIT else value) * per_device[value.device]
            if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
                raise ValueError(
                    "allfinite.amp.GradScaler: expected outputs to be a Tensor or an iterable of Tensors, "
                    f"but got {type(value).__name__}"
                )
            if isinstance(value, tuple) and hasattr(value, "_make"):
                return value._make(map(apply, value))
            return type(value)(map(apply, value)) if isinstance(value, (list, tuple)) else map(apply, value)

        return apply(outputs)  # type: ignore[no-any-return]

    # ---- the gradients ----

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale, in place and without a host sync, and checks them.

        Optional: for whoever wants to clip or look at the gradients before ``step``. Once per optimizer and iteration.
        A gradient counts as non-finite if it is so before or after it is unscaled.

        Raises:
            ValueError: a float16 gradient, by name, before any is touched: unscaling would flush it.
            RuntimeError: called twice, after ``step``, or for a gradient that another optimizer's ``unscale_`` or
                step has already unscaled since the last ``update``, by the parameter's name.
            AssertionError: before any ``scale``, unless the state was loaded or unpickled.
        """
        if not self._enabled:
            return
        self._place_restored(optimizer)
        self._check_scale_growth_tracker("unscale_")
        stage = self._state_of(optimizer)["stage"]
        if stage is OptState.UNSCALED:
            raise RuntimeError(
                "allfinite.amp.GradScaler: expected one unscale_() in an iteration, but got a second: unscale_() has "
                "already been called on this optimizer since the last update()."
            )
        if stage is OptState.STEPPED:
            raise RuntimeError(
                "allfinite.amp.GradScaler: expected unscale_() before step(), but got it later: unscale_() is being "
                "called after step()."
            )
        entries = list(_gradients.entries(optimizer))
        self._refuse_unscaled(entries)
        self._unscale(optimizer, allow_fp16=False)
        self._mark_unscaled(entries)

    def _unscale(self, optimizer: Any, allow_fp16: bool) -> None:
        scale = self._scale
        assert scale is not None
        state, record = self._state_of(optimizer), self._record_of(optimizer)
        # In float64, as torch; there is none on MPS.
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        zero = torch.zeros_like(inverse)
        if self._may_be_below_one():
            before = self._unscale_grads_(optimizer, torch.ones_like(inverse), zero, allow_fp16)
            record.scaled_flags = list(before.values())
        found = self._unscale_grads_(optimizer, inverse, zero, allow_fp16)
        state["found_inf_per_device"] = found
        state["stage"] = OptState.UNSCALED
        record.divided = True
        self._share(found)
        self._note_offender(optimizer, found)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        per_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        flags: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            found = list(_gradients.entries(optimizer))
            for entry in found:
                assert entry.param.grad is not None
                if not allow_fp16 and entry.param.grad.dtype is torch.float16:
                    raise ValueError(
                        "allfinite.amp.GradScaler: expected gradients of another dtype, but got float16: Attempting to "
                        f"unscale FP16 gradients. The gradient of {entry.label()} is float16, where "
                        "unscaled values vanish: keep the parameters in float32 and let torch.autocast cast them"
                    )
            for entry in found:
                values = _gradients.values(entry.param)
                per_device[values.device].append(values)
            for device, grads in per_device.items():
                flags[device] = found_inf.to(device, copy=True, non_blocking=True)
                inverse = inv_scale.to(device, non_blocking=True)
                _device_ops.unscale_and_check_(grads, flags[device], inverse, self._may_be_below_one())
        return flags

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        found = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), True)
        self._share(found)
        self._state_of(optimizer)["found_inf_per_device"] = found
        return found

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        found: dict[Any, Tensor] = self._state_of(optimizer)["found_inf_per_device"]
        return found

    def _share(self, found: dict[torch.device, Tensor]) -> None:
        """Makes the flags those of all ranks. A rank without gradients takes part: the others wait for it."""
        if self._process_group is None:
            return
        assert self._scale is not None
        together = any_found(found.values(), self._scale.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._process_group)
        if not found:
            found[together.device] = together
        for flag in found.values():
            flag.copy_(together)

    def _note_offender(self, optimizer: Any, found: dict[torch.device, Tensor]) -> None:
        """Looks for the parameter to blame at once where that needs no sync: clipping may yet hide it."""
        if all(flag.device.type == "cpu" for flag in found.values()) and any(flag.item() for flag in found.values()):
            self._record_of(optimizer).offender = find_offender(optimizer)

    def _refuse_unscaled(self, entries: list[_gradients.Entry]) -> None:
        for entry in entries:
            seen = self._unscaled.get(id(entry.param.grad))
            if seen is not None and seen() is entry.param.grad:
                raise RuntimeError(
                    f"allfinite.amp.GradScaler: expected gradients that are still scaled, but got that of "
                    f"{entry.label()}, which another optimizer's unscale_() or step() has unscaled since the last "
                    "update(): give each parameter to one optimizer, or call zero_grad(set_to_none=True) between them"
                )

    def _mark_unscaled(self, entries: list[_gradients.Entry]) -> None:
        for entry in entries:
            if entry.param.grad is not None:
                self._unscaled[id(entry.param.grad)] = TensorWeakRef(entry.param.grad)

    # ---- the step ----

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients, if that was not done, and calls ``optimizer.step`` unless one is not finite.

        Args:
            optimizer: whose gradients these are.
            args: passed on to ``optimizer.step``; None is allowed, a callable is not.
            kwargs: passed on, too; no ``closure``.

        Returns:
            What ``optimizer.step`` returns, or None where it was not called; see ``last_step``. A fused optimizer
            is always called and skips by itself, without a host sync, but for the first step of an SGD momentum.

        Raises:
            RuntimeError: a closure; called twice since the last ``update``. See also ``unscale_``.
        """
        if not self._enabled:
            value: float | None = optimizer.step(*args, **kwargs)
            self._last_step = StepResult("stepped", scale=1.0)
            return value
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise RuntimeError(
                "allfinite.amp.GradScaler: expected no closure, but got one: Closure use is not currently supported if "
                "GradScaler is enabled."
            )
        self._place_restored(optimizer)
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "allfinite.amp.GradScaler: expected one step() in an iteration, but got a second: step() has already "
                "been called since the last update()."
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            value = self._step_fused(optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            checked = self._was_checked(optimizer, state)
            value = self._maybe_opt_step(optimizer, state, *args, **kwargs) if checked else None
        state["stage"] = OptState.STEPPED
        self._conclude(optimizer, state)
        return value

    @staticmethod
    def _was_checked(optimizer: Any, state: dict[str, Any]) -> bool:
        """Whether there are gradients, all of them checked. Raises where some came only after ``unscale_``."""
        if state["found_inf_per_device"]:
            return True
        if any(True for _ in _gradients.entries(optimizer)):
            raise _checks.ScalerStateError(
                "allfinite.amp.GradScaler: expected gradients at unscale_(), but got them later: No inf checks were "
                "recorded for this optimizer: its gradients came after unscale_()."
            )
        return False

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        skipped = any(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
        self._record_of(optimizer).skipped = skipped
        value: float | None = None if skipped else optimizer.step(*args, **kwargs)
        return value

    def _step_fused(self, optimizer: Any, state: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer: let its "
                "step() use the attributes `grad_scale` and `found_inf` instead.",
                FutureWarning,
                stacklevel=3,
            )
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        scale, _ = self._check_scale_growth_tracker("step")
        ready = state["stage"] is OptState.READY
        entries: list[_gradients.Entry] = []
        if ready:
            entries = list(_gradients.entries(optimizer))
            self._refuse_unscaled(entries)
            _gradients.separate_shared(entries)
            if self._may_be_below_one():
                # The kernel divides without a check of the quotient.
                self._unscale(optimizer, allow_fp16=True)
                ready = False
            else:
                self._note_offender(optimizer, self._check_inf_per_device(optimizer))
        self._was_checked(optimizer, state)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if ready:
            grad_scale = scale * (1.0 if grad_scale is None else grad_scale)
        found_inf = any_found(state["found_inf_per_device"].values(), scale.device)
        result = _fused.step(optimizer, found_inf, grad_scale, args, kwargs)
        self._mark_unscaled(entries)
        return result

    # ---- the account of the step ----

    @property
    def last_step(self) -> StepResult | None:
        """What the latest ``step`` of any optimizer did; None before the first.

        The steps themselves do not wait for the device on its account; reading this may. A skip of a fused optimizer
        on a device names the parameter only if this is read before the gradients are cleared.
        """
        if isinstance(self._last_step, Attempt):
            self._last_step = self._warn_at_floor(self._last_step.result())
        return self._last_step

    def _conclude(self, optimizer: Any, state: dict[str, Any]) -> None:
        flags = list(state["found_inf_per_device"].values())
        if not flags:
            self._last_step = StepResult("no_gradients")
            return
        scale, _ = self._check_scale_growth_tracker("step")
        record = self._record_of(optimizer)
        attempt = Attempt(
            flags,
            record.scaled_flags,
            record.skipped,
            scale.clone(),
            self._min_scale,
            record.divided,
            record.optimizer,
            record.offender,
            self._process_group is not None,
        )
        self._last_step = self._warn_at_floor(attempt.result()) if record.skipped or attempt.on_host() else attempt

    def _warn_at_floor(self, result: StepResult) -> StepResult:
        if result.at_floor and not self._warned_at_floor:
            self._warned_at_floor = True
            advice = (
                "Give a larger one with update(new_scale)."
                if result.reason == "after_unscale"
                else "If the true gradients are beyond float16, give a smaller min_scale; otherwise the values are not "
                "finite before the loss is scaled."
            )
            warnings.warn(
                f"allfinite.amp.GradScaler: {result}, which is not above min_scale={self._min_scale:g}, so that it "
                f"will not be lowered. {advice}",
                stacklevel=4,
            )
        return result

    # ---- the scale ----

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by the outcome of all optimizers since the last ``update``, on the device.

        Args:
            new_scale: instead, the scale to go on with: an int, a float or a tensor of one element, on any device
                (it is read by the host), finite and > 0 as float32. The growth tracker stays.

        Raises:
            RuntimeError: no ``unscale_`` or ``step`` since the last ``update`` (also an AssertionError, as in torch).
            ValueError, TypeError: a ``new_scale`` that no scaler can have; nothing is changed.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            value = _checks.scale("new_scale", new_scale)
            if self._scale is None and self._restored:
                self._lazy_init_scale_growth_tracker(torch.device(self._device))
            scale, _ = self._check_scale_growth_tracker("update")
            scale.fill_(value)
            self._given_scale = value
        else:
            scale, growth_tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            if flags:
                found_inf = any_found(flags, scale.device)
                _device_ops.update_scale_(scale, growth_tracker, found_inf, self.policy)
            elif all(state["stage"] is OptState.READY for state in states):
                raise _checks.ScalerStateError(
                    "allfinite.amp.GradScaler: expected unscale_() or step() since the last update(), but got neither: "
                    "No inf checks were recorded prior to update."
                )
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _may_be_below_one(self) -> bool:
        return min(self._given_scale, self._min_scale) < 1

    # ---- helpers ----

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_last_step": self.last_step, "_records": {}, "_unscaled": {}}

    def _place_restored(self, optimizer: Any) -> None:
        """Creates the tensors of a loaded or unpickled scaler that has not seen a loss yet."""
        if self._scale is None and self._restored:
            self._lazy_init_scale_growth_tracker(_gradients.device_of(optimizer) or torch.device(self._device))

    def _record_of(self, optimizer: Any) -> _Record:
        self._state_of(optimizer)
        return self._records[id(optimizer)]

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        """torch's state of the optimizer, and a record beside it; neither is inherited from one that is gone."""
        key = id(optimizer)
        if not self._per_optimizer_states:  # a new iteration, also where a subclass has an update() of its own
            self._records.clear()
            self._unscaled.clear()
        record = self._records.get(key)
        if record is not None and record.optimizer() is not optimizer:
            # The address was used again. What the old one found still counts at update().
            if key in self._per_optimizer_states:
                self._per_optimizer_states[-1 - len(self._per_optimizer_states)] = self._per_optimizer_states.pop(key)
            record = None
        if record is None:
            try:
                reference: Callable[[], Any] = weakref.ref(optimizer)
            except TypeError:  # a class without __weakref__: kept until update(), so its address is not used again
                reference = lambda: optimizer  # noqa: E731
            self._records[key] = _Record(reference)
        return self._per_optimizer_states[key]
