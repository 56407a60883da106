"""``torch.nn.Softmax`` over ``allfinite.softmax``."""

import warnings

import torch
from torch import Tensor

from allfinite import ops


class Softmax(torch.nn.Softmax):
    """Drop-in for ``torch.nn.Softmax``: same argument and ``repr``; ``dim=None`` chooses as torch does, and warns.

    What differs: the result has the input's dtype, under autocast too (torch casts to float32 on CUDA); a row of -inf
    alone gives 0 with gradient 0, where torch gives NaN. See ``allfinite.softmax`` for dtypes and errors.
    """

    def forward(self, input: Tensor) -> Tensor:
        return ops.softmax(input, _implicit_dim(input.dim()) if self.dim is None else self.dim)


def _implicit_dim(dims: int) -> int:
    dim = 0 if dims in (0, 1, 3) else 1
    warnings.warn(f"allfinite.nn.Softmax: dim=None is deprecated, as in torch; pass dim={dim}", stacklevel=4)
    return dim
