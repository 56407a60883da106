"""The norms as Python functions, in the argument order of ``torch.nn.functional``.

Each is one call of ``torch.ops.allfinite``; checks, autograd and kernels are in C++.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from allfinite import _C
from allfinite._direct import direct

_layer_norm = direct(_C.ops.layer_norm, torch.ops.allfinite.layer_norm)
_rms_norm = direct(_C.ops.rms_norm, torch.ops.allfinite.rms_norm)
_add_layer_norm = direct(_C.ops.add_layer_norm, torch.ops.allfinite.add_layer_norm)
_add_rms_norm = direct(_C.ops.add_rms_norm, torch.ops.allfinite.add_rms_norm)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalization over the last dimensions, as ``torch.nn.functional.layer_norm``.

    Args:
        input: ``(..., *normalized_shape)``, float16, bfloat16, float32 or float64.
        normalized_shape: the last dimensions, over which mean and variance are taken.
        weight: ``normalized_shape``, of input's dtype, or float32 beside a 16-bit input.
        bias: as ``weight``; either may be given alone.
        eps: added to the variance; >= 0.

    Returns:
        ``(x - mean) / sqrt(var + eps) * weight + bias`` in input's shape and dtype, contiguous, computed in float32
        (float64) and rounded once. Rows of any magnitude are right, also where their squares leave float32's range;
        the error does not grow with mean / std. A NaN or infinity makes its own row NaN and no other. Zero variance
        with ``eps=0`` gives ``bias`` and gradient 0.

    Raises:
        TypeError: a dtype that is not listed. ValueError: shapes, ``eps``. RuntimeError: tensors on several devices.
        NotImplementedError: forward-mode differentiation. (Double backward works.)
    """
    result: Tensor = _layer_norm(input, normalized_shape, weight, bias, eps)
    return result


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Root mean square normalization over the last dimensions, as ``torch.nn.functional.rms_norm``.

    Args:
        input: ``(..., *normalized_shape)``, float16, bfloat16, float32 or float64.
        normalized_shape: the last dimensions, over which the mean of squares is taken.
        weight: ``normalized_shape``, of input's dtype, or float32 beside a 16-bit input.
        eps: added to the mean of squares; >= 0. None: the machine epsilon of float32 (float64 for float64).

    Returns:
        ``x / sqrt(mean(x ** 2) + eps) * weight`` in input's shape and dtype, contiguous, computed in float32 (float64)
        and rounded once. Rows of any magnitude are right, also where their squares leave float32's range. A NaN or
        infinity makes its own row NaN and no other. A row of zeros with ``eps=0`` gives 0 and gradient 0.

    Raises:
        TypeError: a dtype that is not listed. ValueError: shapes, ``eps``. RuntimeError: tensors on several devices.
        NotImplementedError: forward-mode differentiation. (Double backward works.)
    """
    result: Tensor = _rms_norm(input, normalized_shape, weight, eps)
    return result


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """``residual_out = input + residual`` and ``layer_norm(residual_out)``, in one pass over memory.

    Args:
        input: ``(..., *normalized_shape)``, float16, bfloat16, float32 or float64.
        residual: of input's shape, without broadcasting, and dtype, or float32 beside a 16-bit input: a float32
            residual stream stays finite where float16's would overflow.
        normalized_shape: the last dimensions, over which mean and variance are taken.
        weight: ``normalized_shape``, of input's dtype, or float32 beside a 16-bit input.
        bias: as ``weight``; either may be given alone.
        eps: added to the variance; >= 0.

    Returns:
        ``(output, residual_out)``, contiguous. ``residual_out`` is in residual's dtype, rounded once from the float32
        (float64) sum; infinite where the sum is beyond the dtype. ``output`` is the norm of the stored
        ``residual_out``, in input's dtype, as ``layer_norm`` gives it; NaN in a row whose sum is not finite. Both are
        differentiable, and either may go unused; the gradients of input and residual are the norm's plus that of
        ``residual_out``, added in float32 (float64) and rounded once.

    Raises:
        As ``layer_norm``; ValueError and TypeError also for the shape and dtype of ``residual``.
    """
    result: tuple[Tensor, Tensor] = _add_layer_norm(input, residual, normalized_shape, weight, bias, eps)
    return result


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual_out = input + residual`` and ``rms_norm(residual_out)``, in one pass over memory.

    Args:
        input: ``(..., *normalized_shape)``, float16, bfloat16, float32 or float64.
        residual: as in ``add_layer_norm``.
        normalized_shape: the last dimensions, over which the mean of squares is taken.
        weight: ``normalized_shape``, of input's dtype, or float32 beside a 16-bit input.
        eps: added to the mean of squares; >= 0. None: the machine epsilon of float32 (float64 for float64).

    Returns:
        ``(output, residual_out)``, as ``add_layer_norm`` with ``rms_norm`` in place of ``layer_norm``.

    Raises:
        As ``rms_norm``; ValueError and TypeError also for the shape and dtype of ``residual``.
    """
    result: tuple[Tensor, Tensor] = _add_rms_norm(input, residual, normalized_shape, weight, eps)
    return result
