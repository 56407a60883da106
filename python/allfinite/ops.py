"""The ops as Python functions, in the argument order of ``torch.nn.functional``.

Each is one call of ``torch.ops.allfinite``; checks, autograd and kernels are in C++.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from allfinite import _C
from allfinite._direct import direct

_softmax = direct(_C.ops.softmax, torch.ops.allfinite.softmax, keywords=("mask", "scale"))
_layer_norm = direct(_C.ops.layer_norm, torch.ops.allfinite.layer_norm)


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


def softmax(input: Tensor, dim: int, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """``softmax(input * scale + mask)`` over one dimension, as ``torch.nn.functional.softmax``.

    Args:
        input: any shape, float16, bfloat16, float32 or float64.
        dim: the dimension whose elements add up to 1; negative counts from the end.
        mask: broadcasts to input's shape without enlarging it. bool: True takes part. float16, bfloat16, float32 or
            float64, whatever input's dtype: added after the scale; -inf masks, a finite value never does;
            differentiable, also where it is broadcast.
        scale: any finite number, 0 and negative ones too.

    Returns:
        A tensor of input's shape and dtype, contiguous, computed in float32 (float64) and rounded once. Scores of any
        magnitude are right, also where ``input * scale`` or the sum with the mask leaves float32's range. A score of
        -inf is masked: weight 0 and gradient 0, whatever lies beneath the mask or arrives as its gradient. A row in
        which nothing takes part is 0. A NaN or +inf score that takes part makes its row NaN; what is masked stays 0.

    Raises:
        TypeError: dtypes. IndexError: ``dim``. ValueError: mask's shape, ``scale``. RuntimeError: tensors on several
        devices. NotImplementedError: a sparse or nested tensor, forward-mode differentiation. (Double backward works.)
    """
    result: Tensor = _softmax(input, dim, mask, scale)
    return result
