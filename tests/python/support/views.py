"""The same values in memory in several ways."""

import torch
from torch import Tensor


def views(base: Tensor) -> dict[str, Tensor]:
    """Tensors of the values and shape of ``base``, (6, 8, 10), each in memory in another way."""
    rows = torch.empty(6, 8, 13, dtype=base.dtype)
    rows[..., 2:12] = base
    steps = torch.empty(6, 8, 20, dtype=base.dtype)
    steps[..., ::2] = base
    offset = torch.empty(base.numel() + 1, dtype=base.dtype)
    offset[1:] = base.flatten()
    return {
        "transposed": base.transpose(0, 2).contiguous().transpose(0, 2),
        "inside wider rows": rows[..., 2:12],
        "every second element": steps[..., ::2],
        "one element off": offset[1:].view(base.shape),
        "flipped twice": base.flip(0).flip(0),
        "channels first": base.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }
