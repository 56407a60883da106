"""The part of ``GradScaler`` that is not about gradients: its hyper-parameters, and saving and loading."""

import warnings
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from allfinite._C import ScalePolicy
from allfinite.amp import _checks

_POLICY = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")


class ScaleState(torch.amp.GradScaler):
    """The base of ``GradScaler``, which documents the arguments."""

    def __init__(
        self,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        *,
        min_scale: float,
        max_scale: float,
    ) -> None:
        if enabled:
            checked = _checks.policy(growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
            init_scale = _checks.scale("init_scale", init_scale)
            growth_factor, backoff_factor = checked.growth_factor, checked.backoff_factor
            growth_interval = checked.growth_interval
            min_scale, max_scale = checked.min_scale, checked.max_scale
            if device == "cuda" and not torch.cuda.is_available() and find_spec("torch_xla") is None:
                warnings.warn(
                    "allfinite.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=3
                )
                enabled = False
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        # torch sets these only where the scaler is enabled, so that its getters raise on a disabled one.
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)

        self._min_scale = min_scale
        self._max_scale = max_scale
        self._given_scale = init_scale  # the last one that did not come from the policy
        self._restored = False  # loaded or unpickled: unscale_ and step may create the tensors

    @property
    def policy(self) -> ScalePolicy:
        """The hyper-parameters of the scale's movement, as they are now."""
        return _checks.policy(
            self._growth_factor, self._backoff_factor, self._growth_interval, self._min_scale, self._max_scale
        )

    def get_min_scale(self) -> float:
        """The floor: the scale is not lowered below it."""
        return self._min_scale

    def get_max_scale(self) -> float:
        """The cap: the scale does not grow above it."""
        return self._max_scale

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor. Raises ValueError unless it is finite and > 1."""
        self._set(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the back-off factor. Raises ValueError unless it lies in (0, 1)."""
        self._set(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval. Raises ValueError unless it is >= 1. Already reached: the next update grows."""
        self._set(growth_interval=new_interval)

    def set_min_scale(self, new_scale: float) -> None:
        """Sets the floor. Raises ValueError unless it lies in [2^-126, 2^126] and not above the cap."""
        self._set(min_scale=new_scale)

    def set_max_scale(self, new_scale: float) -> None:
        """Sets the cap. Raises ValueError unless it lies in [2^-126, 2^126] and not below the floor."""
        self._set(max_scale=new_scale)

    def _set(self, **changes: Any) -> None:
        values = {name: getattr(self, f"_{name}") for name in _POLICY} | changes
        if self._enabled:
            checked = _checks.policy(**values)
            values = {name: getattr(checked, name) for name in _POLICY}
        for name, value in values.items():
            setattr(self, f"_{name}", value)

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries and ``"min_scale"``, ``"max_scale"``; empty for a disabled scaler.

        ``torch.amp.GradScaler`` loads it too. Waits for the device.
        """
        bounds = {"min_scale": self._min_scale, "max_scale": self._max_scale} if self._enabled else {}
        return super().state_dict() | bounds

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class or of ``torch.amp.GradScaler`` (the bounds then stay as they are).

        All values are checked first; an error changes nothing. ``unscale_`` and ``step`` work at once afterwards.

        Raises:
            RuntimeError: an empty dict. KeyError: an entry of torch's is missing. ValueError, TypeError: a value that
            no scaler can have.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "allfinite.amp.GradScaler: expected the state of an enabled GradScaler, but got none: The source state "
                "dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        scale = _checks.scale("scale", state_dict["scale"])
        growth_tracker = _checks.tracker(state_dict["_growth_tracker"])
        self._set(
            growth_factor=state_dict["growth_factor"],
            backoff_factor=state_dict["backoff_factor"],
            growth_interval=state_dict["growth_interval"],
            min_scale=state_dict.get("min_scale", self._min_scale),
            max_scale=state_dict.get("max_scale", self._max_scale),
        )
        self._init_scale = self._given_scale = scale
        self._init_growth_tracker = growth_tracker
        if self._scale is not None:
            self._scale.fill_(scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(growth_tracker)
        self._restored = True

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_restored": True}
