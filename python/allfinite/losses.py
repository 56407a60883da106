"""The losses as Python functions, in the argument order of ``torch.nn.functional``."""

import torch
from torch import Tensor

from allfinite import _C
from allfinite._direct import direct

_cross_entropy = direct(_C.ops.cross_entropy, torch.ops.allfinite.cross_entropy, keywords=("z_loss",))


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of logits with class indices or probabilities, as ``torch.nn.functional.cross_entropy``.

    Args:
        input: logits, ``(C)``, ``(N, C)`` or ``(N, C, d1, ...)``, float16, bfloat16, float32 or float64.
        target: class indices (int64 or uint8) of input's shape without ``C``, or class probabilities (floating) of
            input's shape. Differentiable.
        weight: ``(C)``, factor of each class, of input's dtype, or float32 beside a 16-bit input. Not differentiable.
        ignore_index: rows with this class index count nothing and are not read, whatever they hold.
        reduction: ``"none"``, ``"mean"`` (over the weights of the counted targets; with probabilities: over the rows)
            or ``"sum"``.
        label_smoothing: share of the mass, in [0, 1], that is spread over all classes.
        z_loss: adds ``z_loss * logsumexp(input) ** 2`` to each counted row, times the weight of its class index.

    Returns:
        The loss in float32 (float64 for float64 logits) for every dtype of the logits, summed in double. The gradient
        is in input's dtype: multiplied by the incoming one (which may carry a loss scale) in float32 and rounded once.
        Logits of any magnitude give the right loss; a row that holds NaN or inf, or only -inf, gives NaN. Mass on a
        class of -inf gives inf and finite gradients; a class of -inf without mass counts nothing. The mean over no
        counted target is NaN, with gradients 0.

    Raises:
        TypeError: a dtype that is not listed. ValueError: shapes, ``reduction``, ``label_smoothing``, ``z_loss``, an
        ``ignore_index`` beside probabilities. IndexError: a class outside ``[0, C)``. RuntimeError: tensors on several
        devices. NotImplementedError: a gradient of ``weight``, forward-mode differentiation. (Double backward works.)
    """
    result: Tensor = _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, z_loss)
    return result
