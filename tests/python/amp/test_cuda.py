"""On a CUDA device, where torch's ops do the scaler's maths; skipped where there is none."""

import pytest
import torch

from allfinite.amp import GradScaler
from support.amp import INF

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("fused", [False, True])
def test_steps_skips_grows_and_stops_at_the_bounds(fused: bool) -> None:
    made = GradScaler("cuda", init_scale=2.0, growth_interval=1, min_scale=1.0, max_scale=3.0)
    param = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([("weight", param)], lr=1.0, momentum=0.9, fused=fused)
    made.scale(param.sum() * INF).backward()
    made.step(optimizer)
    assert made.last_step is not None
    assert (made.last_step.status, made.last_step.reason, made.last_step.param_name) == ("skipped", "inf", "weight")
    made.update()
    assert (param.tolist(), made.get_scale()) == ([1.0] * 4, 1.0)
    for scale in (2.0, 3.0, 3.0):
        optimizer.zero_grad()
        made.scale(param.sum()).backward()
        made.step(optimizer)
        made.update()
        assert made.get_scale() == scale
    assert made.last_step.status == "stepped"


def test_an_ordinary_iteration_of_a_fused_optimizer_does_not_wait_for_the_device() -> None:
    """N41: neither unscaling, nor the step and its account, nor the update, floor and cap included."""
    made = GradScaler("cuda", init_scale=2.0)
    param = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    torch.cuda.synchronize()
    for _ in range(2):
        made.scale(param.sum()).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            made.step(optimizer)
            made.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert made.last_step is not None
    assert made.last_step.status == "stepped"
