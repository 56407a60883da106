"""Unscaling: every kind of gradient, the check before and after, and what must not be unscaled twice.

Each test runs with AllFinite's kernels and with torch's ops, which serve the devices that have no kernels.
"""

from collections.abc import Iterator

import pytest
import torch

from allfinite.amp import GradScaler, _device_ops
from support.amp import INF, NAN, parameter, scaler, sgd, stock


@pytest.fixture(params=["own", "torch"], autouse=True)
def _ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(_device_ops, "_has_kernels", lambda tensor: False)


def unscaled(*params: torch.nn.Parameter, inverse: float = 0.25) -> bool:
    """Calls the hook that other libraries override; returns whether it found something."""
    found = GradScaler("cpu")._unscale_grads_(sgd(*params), torch.tensor(inverse), torch.zeros(()), True)
    assert list(found) == [torch.device("cpu")]
    flag = found[torch.device("cpu")].item()
    assert flag in (0.0, 1.0)
    return flag == 1.0


def layouts(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of 10x10 tensors of 4.0: contiguous, transposed, sliced."""

    def dense() -> torch.Tensor:
        return torch.full((10, 10), 4.0, dtype=dtype)

    def sliced() -> torch.Tensor:
        return torch.full((10, 20), 4.0, dtype=dtype)[:, ::2]

    yield dense(), dense()
    yield dense(), dense().t()
    yield dense(), sliced()
    yield sliced(), sliced().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
def test_layouts_and_dtypes(dtype: torch.dtype, bad: float | None) -> None:
    """Guards a check that misses a value in one memory layout, and one that scales padding or nothing."""
    for pair in layouts(dtype):
        for where in (0, 1):
            params = []
            for i, grad in enumerate(pair):
                grad = grad.clone(memory_format=torch.preserve_format)
                if bad is not None and i == where:
                    grad[2, 2] = bad
                param = torch.nn.Parameter(torch.zeros(10, 10, dtype=dtype))
                param.grad = grad
                params.append(param)
            assert unscaled(*params) is (bad is not None)
            for param in params:
                assert param.grad is not None
                finite = param.grad[param.grad.isfinite()]
                assert finite.eq(1.0).all()
                assert finite.numel() >= 99


def test_a_mixed_list_with_one_bad_gradient_anywhere() -> None:
    """One optimizer with every dtype, sparse and dense: an infinity in any single one is found, and once only."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
    for bad in range(2 * len(dtypes)):
        params = []
        for i, dtype in enumerate([*dtypes, *dtypes]):
            param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
            value = torch.tensor([4.0, INF if i == bad else 4.0], dtype=dtype)
            sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), value, (3,), check_invariants=True)
            param.grad = sparse if i < len(dtypes) else sparse.to_dense()
            params.append(param)
        assert unscaled(*params)
        assert torch.as_tensor(params[-1].grad)[0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_duplicates_of_a_sparse_gradient_are_summed_before_the_check(dtype: torch.dtype) -> None:
    """It is the sum that is applied: torch misses it in every dtype but float16 (N14)."""
    big = torch.finfo(dtype).max * 0.9
    param = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    indices = torch.tensor([[1, 1]])
    param.grad = torch.sparse_coo_tensor(indices, torch.tensor([big, big], dtype=dtype), (2,), check_invariants=True)
    assert unscaled(param, inverse=1.0)
    param.grad = torch.sparse_coo_tensor(indices, torch.tensor([4.0, 8.0], dtype=dtype), (2,), check_invariants=True)
    assert not unscaled(param)
    assert param.grad.to_dense().tolist() == [0.0, 3.0]


def test_complex_gradients_go_by_their_parts() -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    param.grad = torch.tensor([4 + 8j, 3e38 + 3e38j])
    assert not unscaled(param, inverse=0.5), "finite parts, though the magnitude is beyond float32"
    assert param.grad[0] == 2 + 4j
    param.grad = torch.tensor([4 + 8j, complex(0, INF)])
    assert unscaled(param)


def test_finite_doubles_beyond_float32_are_finite() -> None:
    """N15."""
    param = parameter([1.0], [1e300], dtype=torch.float64)
    assert not unscaled(param, inverse=0.5)
    assert torch.as_tensor(param.grad).item() == 5e299


def test_sums_of_finite_gradients_do_not_count() -> None:
    """N13: a check by the sum calls this an overflow."""
    assert not unscaled(parameter([0.0, 0.0], [3e38, 3e38]), inverse=1.0)


def test_the_last_of_very_many_gradients() -> None:
    """N44: guards a launch that stops short of a long list."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(20_000)]
    for param in params:
        param.grad = torch.full((1,), 4.0)
    assert not unscaled(*params)
    params[-1].grad = torch.full((1,), NAN)
    assert unscaled(*params)


def test_empty_gradients() -> None:
    made = GradScaler("cpu")
    nothing = made._unscale_grads_(sgd(parameter(1.0)), torch.ones(()), torch.zeros(()), False)
    assert nothing == {}, "no gradient, no record"
    empty = torch.nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    assert not unscaled(empty, parameter(1.0, 4.0))


def test_the_flag_that_is_passed_in_is_not_written() -> None:
    flag = torch.zeros(())
    GradScaler("cpu")._unscale_grads_(sgd(parameter(1.0, INF)), torch.ones(()), flag, False)
    assert flag.item() == 0.0


def test_memory_of_two_parameters_is_unscaled_once() -> None:
    """N49: torch divides twice."""
    ours, theirs = [parameter(1.0), parameter(1.0)], [parameter(1.0), parameter(1.0)]
    for pair in (ours, theirs):
        pair[0].grad = torch.tensor(8.0)
        pair[1].grad = pair[0].grad
    scaler(4.0).unscale_(sgd(*ours))
    stock(4.0).unscale_(sgd(*theirs))
    assert torch.as_tensor(ours[0].grad).item() == 2.0
    assert torch.as_tensor(theirs[0].grad).item() == 0.5


def test_memory_shared_by_expand_is_unscaled_once() -> None:
    """Torch refuses such a gradient."""
    param = parameter([1.0, 1.0, 1.0])
    param.grad = torch.tensor(8.0).expand(3)
    scaler(4.0).unscale_(sgd(param))
    assert param.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_value_that_unscaling_makes_infinite_is_found() -> None:
    """N1c, and the reason of every report that a scale below 1 wrote infinities into the parameters."""
    param = parameter([1.0], [3e38])
    made = scaler(0.5)
    with pytest.warns(UserWarning, match=r"update\(new_scale\)"):
        made.step(sgd(param))
    assert param.item() == 1.0
    assert made.last_step is not None
    assert (made.last_step.status, made.last_step.reason) == ("skipped", "after_unscale")
    made.update()
    param.grad = torch.tensor([INF])
    made.step(sgd(param))
    assert made.last_step.reason == "inf", "infinite before it was unscaled"


def test_a_float16_gradient_is_refused_before_any_is_touched() -> None:
    """Unscaled float16 values vanish (N2)."""
    first = parameter([1.0], [8.0])
    half = parameter([1.0], [8.0], dtype=torch.float16)
    optimizer = torch.optim.SGD([("head.weight", first), ("head.bias", half)], lr=1.0)
    made = scaler(4.0)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients.*parameter 'head.bias'"):
        made.unscale_(optimizer)
    assert torch.as_tensor(first.grad).item() == 8.0
    half.grad = None
    made.unscale_(optimizer)
    assert torch.as_tensor(first.grad).item() == 2.0


def test_bfloat16_gradients_are_exact_at_powers_of_two() -> None:
    """N42, N16."""
    grads = torch.randn(1000).bfloat16()
    param = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    param.grad = grads * 65536.0
    scaler(65536.0).unscale_(sgd(param))
    assert torch.equal(param.grad, grads)


def test_the_inverse_is_rounded_once_from_float64() -> None:
    """As torch's: bit for bit the same gradients at a scale that is no power of two."""
    ours, theirs = parameter([1.0], [0.1]), parameter([1.0], [0.1])
    scaler(100.0).unscale_(sgd(ours))
    stock(100.0).unscale_(sgd(theirs))
    assert torch.equal(torch.as_tensor(ours.grad), torch.as_tensor(theirs.grad))


def test_all_groups_are_visited() -> None:
    """N4."""
    a, b = parameter(1.0, 8.0), parameter(1.0, INF)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1.0)
    made = scaler(4.0)
    made.step(optimizer)
    assert torch.as_tensor(a.grad).item() == 2.0
    assert (a.item(), b.item()) == (1.0, 1.0)
    assert made.last_step is not None
    assert (made.last_step.param_group, made.last_step.param_index) == (1, 1)
