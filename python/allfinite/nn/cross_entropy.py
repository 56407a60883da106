"""``torch.nn.CrossEntropyLoss`` over ``allfinite.cross_entropy``."""

import torch
from torch import Tensor

from allfinite import losses


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """Drop-in for ``torch.nn.CrossEntropyLoss``: same arguments, state dict and ``repr``; and ``z_loss``.

    What differs: the loss is float32 for 16-bit logits, and their gradient is rounded once, after the loss scale has
    been multiplied in; ignored rows are not read. See ``allfinite.cross_entropy`` for shapes, dtypes, errors and the
    behaviour of NaN and infinity.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as torch's.
        z_loss: factor of ``logsumexp(input) ** 2`` in the loss; >= 0.
    """

    z_loss: float = 0.0

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss = z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return losses.cross_entropy(
            input,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            # A module of torch's that was given this forward has no z_loss.
            z_loss=getattr(self, "z_loss", 0.0),
        )
