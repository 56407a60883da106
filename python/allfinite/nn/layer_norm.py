"""``torch.nn.LayerNorm`` over ``allfinite.layer_norm``."""

import torch
from torch import Tensor

from allfinite import norms


class LayerNorm(torch.nn.LayerNorm):
    """Drop-in for ``torch.nn.LayerNorm``: same arguments, parameters, state dict and ``repr``.

    What differs: 16-bit input is taken beside float32 parameters on every device, and stays 16-bit under autocast
    (torch casts it to float32 on CUDA); rows of any magnitude and any mean are right. See ``allfinite.layer_norm`` for
    shapes, dtypes, errors and the behaviour of NaN and infinity.
    """

    def forward(self, input: Tensor) -> Tensor:
        return norms.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
