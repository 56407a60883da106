"""The scaler inside the libraries that drive one themselves; skipped where they are not installed."""

from typing import Any

import pytest
import torch

from allfinite.amp import GradScaler
from support.amp import INF, parameter, sgd


def test_accelerate_sees_which_steps_were_skipped() -> None:
    """It replaces optimizer.step and calls scaler.step(optimizer, None)."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = GradScaler("cpu", init_scale=4.0, min_scale=0.5)
    param = parameter([1.0])
    optimizer: Any = accelerator.prepare_optimizer(sgd(param))
    for value, skipped in ((INF, True), (1.0, False)):
        accelerator.scaler.scale(param.sum() * value).backward()
        optimizer.step()
        assert optimizer.step_was_skipped is skipped
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_takes_it_as_a_plugin(package: str) -> None:
    lightning = pytest.importorskip(package)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = GradScaler("cpu", init_scale=4.0)
    precision = lightning.plugins.MixedPrecision("16-mixed", device="cpu", scaler=made)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 2)), batch_size=2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(max_epochs=1, accelerator="cpu", plugins=[precision], **quiet).fit(Module(), data)
    assert made.last_step is not None
    assert made.last_step.status == "stepped"
