"""Several ranks: they skip together where a process group is given, and do not talk where none is."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from allfinite.amp import GradScaler
from support.amp import INF, parameter, sgd

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


def on_two_ranks(work: Callable[[int, dist.ProcessGroup], None]) -> None:
    """Runs ``work`` in two threads, each a rank of one gloo group, and raises what they raise."""
    store, errors = dist.HashStore(), []

    def rank(number: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, number, 2)
            work(number, group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank waits for the other"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("bad", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_one_bad_rank_makes_all_skip_and_back_off(bad: tuple[bool, bool], separate: bool, fused: bool) -> None:
    """N5, N6: a sum of both ranks' flags, 2.0, is taken for "no overflow" by fused kernels; no sum at all lets the
    ranks drift apart."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        made = GradScaler("cpu", init_scale=4.0, growth_interval=1, min_scale=0.5, process_group=group)
        made.scale(torch.ones(()))
        param = parameter([1.0], [INF if bad[rank] else 4.0])
        optimizer = sgd(param, fused=fused)
        if separate:
            made.unscale_(optimizer)
        made.step(optimizer)
        made.update()
        assert param.item() == (1.0 if any(bad) else 0.0)
        assert made.get_scale() == (2.0 if any(bad) else 8.0)
        result = made.last_step
        assert result is not None
        if any(bad):
            assert result.reason == ("inf" if bad[rank] else "other_rank")
            assert result.param_index == (0 if bad[rank] else None)

    on_two_ranks(work)


@pytest.mark.parametrize("bad", [False, True])
def test_a_rank_without_gradients_takes_part(bad: bool) -> None:
    """Guards a hang, and scales that differ: FSDP leaves some ranks without a shard."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        made = GradScaler("cpu", init_scale=4.0, growth_interval=1, min_scale=0.5, process_group=group)
        made.scale(torch.ones(()))
        made.step(sgd(parameter([1.0], [INF if bad else 4.0] if rank == 0 else None)))
        made.update()
        assert made.get_scale() == (2.0 if bad else 8.0)

    on_two_ranks(work)


def test_no_group_given_means_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default group either: a single rank's scaler would wait for the others."""

    def talks(*args: object, **kwargs: object) -> None:
        raise AssertionError("the scaler communicates")

    monkeypatch.setattr(dist, "all_reduce", talks)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    made = GradScaler("cpu", init_scale=4.0)
    made.scale(torch.ones(()))
    param = parameter([1.0], [4.0])
    made.step(sgd(param))
    made.update()
    assert param.item() == 0.0


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bad", [False, True])
def test_sharded_gradients(mesh: DeviceMesh, bad: bool) -> None:
    """FSDP2's parameters are DTensors, for which AllFinite's op has no rule: torch's op must be taken."""
    param = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.tensor([4.0, INF if bad else 4.0]), mesh, [Shard(0)])
    made = GradScaler("cpu", init_scale=4.0, min_scale=0.5)
    made.scale(torch.ones(()))
    made.step(torch.optim.SGD([("weight", param)], lr=1.0))
    made.update()
    assert param.full_tensor().tolist() == ([1.0, 1.0] if bad else [0.0, 0.0])
    assert made.last_step is not None
    assert (made.last_step.reason, made.last_step.param_name) == (("inf", "weight") if bad else (None, None))
