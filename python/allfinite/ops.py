"""The ops as Python functions, in the argument order of ``torch.nn.functional``.

Each is one call of ``torch.ops.allfinite``; checks, autograd and kernels are in C++.
"""

import torch
from torch import Tensor

from allfinite import _C
from allfinite._direct import direct

_softmax = direct(_C.ops.softmax, torch.ops.allfinite.softmax, keywords=("mask", "scale"))


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
