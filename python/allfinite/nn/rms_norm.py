"""``torch.nn.RMSNorm`` over ``allfinite.rms_norm``."""

import torch
from torch import Tensor

from allfinite import norms


class RMSNorm(torch.nn.RMSNorm):
    """Drop-in for ``torch.nn.RMSNorm``: same arguments, parameters, state dict and ``repr``.

    What differs: 16-bit input is taken beside a float32 weight on every device, and stays 16-bit; rows of any magnitude
    are right. See ``allfinite.rms_norm`` for shapes, dtypes, errors and the behaviour of NaN and infinity.
    """

    def forward(self, x: Tensor) -> Tensor:
        return norms.rms_norm(x, self.normalized_shape, self.weight, self.eps)
