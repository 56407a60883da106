"""Loss scaling: a ``GradScaler`` with a floor, a cap and a reason for each skipped step."""

from allfinite._C import ScalePolicy
from allfinite.amp._step_result import StepResult
from allfinite.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "ScalePolicy", "StepResult"]
