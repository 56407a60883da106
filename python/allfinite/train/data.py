"""The handwritten digits that ship inside scikit-learn, and the order in which a run reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEST_SHARE = 0.2


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8), fp32, standardised with the training part's mean and deviation; labels int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(device: torch.device) -> Digits:
    """Loads 1437 training and 360 test images; the split is the same for every seed.

    Args:
        device: where the tensors live.

    Returns:
        The four tensors.
    """
    from sklearn import datasets, model_selection  # type: ignore[import-untyped]  # slow, and an optional extra

    pixels, labels = datasets.load_digits(return_X_y=True)
    parts = model_selection.train_test_split(pixels, labels, test_size=TEST_SHARE, random_state=0, stratify=labels)
    train, test = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    mean, deviation = train.mean(), train.std()
    return Digits(
        ((train - mean) / deviation).to(device),
        train_labels.to(device),
        ((test - mean) / deviation).to(device),
        test_labels.to(device),
    )


class BatchOrder:
    """An endless order of batches: each epoch a fresh permutation, whose short rest is dropped.

    Args:
        count: number of samples, at least `batch`.
        batch: samples a batch.
        seed: fixes the order.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self._count = count
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)
        self._rest = torch.empty(0, dtype=torch.int64)

    def next(self) -> Tensor:
        """Indices of the next batch, shape (batch,), int64, on the CPU."""
        if len(self._rest) < self._batch:
            self._rest = torch.randperm(self._count, generator=self._generator)
        indices, self._rest = self._rest[: self._batch], self._rest[self._batch :]
        return indices

    def state_dict(self) -> dict[str, Any]:
        """All that the following batches depend on."""
        return {"generator": self._generator.get_state(), "rest": self._rest.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._generator.set_state(state["generator"])
        self._rest = state["rest"]
