"""clip_grad_norm_: a norm in double, products rounded once, and nothing changed where the norm says nothing."""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import allfinite
from allfinite.amp import _device_ops

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = math.inf, math.nan


def with_grads(grads: Iterable[Tensor]) -> list[Tensor]:
    owners = []
    for grad in grads:
        owner = torch.zeros_like(grad).requires_grad_()
        owner.grad = grad
        owners.append(owner)
    return owners


def exact_norm(grads: Iterable[Tensor], order: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]), order))


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_products_against_float64(dtype: torch.dtype, order: float) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(shape).to(dtype) for shape in ((3, 50), (1,), (70_001,), (0,), ())]
    before = [g.clone() for g in grads]
    norm = allfinite.clip_grad_norm_(with_grads(grads), 1.5, order)
    expected = exact_norm(before, order)
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    assert float(norm) == pytest.approx(expected, rel=1e-12)  # double throughout, 7e4 terms: 7e4 * 2^-53 at most
    factor = 1.5 / (expected + 1e-6)
    for grad, old in zip(grads, before, strict=True):
        # The factor and the product are each rounded to fp32 (fp64) and the product to the dtype once more.
        rel = {torch.float64: 1e-12, torch.float32: 2**-22}.get(dtype, torch.finfo(dtype).eps)
        torch.testing.assert_close(grad.double(), old.double() * factor, rtol=rel, atol=torch.finfo(dtype).tiny)


def test_agrees_with_torch_where_torch_is_in_range() -> None:
    torch.manual_seed(1)
    grads = [torch.randn(40, 3, dtype=torch.float64) for _ in range(3)]
    theirs = [g.clone() for g in grads]
    a = allfinite.clip_grad_norm_(with_grads(grads), 0.3)
    b = torch.nn.utils.clip_grad_norm_(with_grads(theirs), 0.3)
    torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    for x, y in zip(grads, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=0)


def test_squares_beyond_fp32_are_clipped_not_zeroed() -> None:
    """torch's norm in fp32 is infinite here, its factor 0, and every gradient becomes 0."""
    grads = [torch.full((1,), 1e19) for _ in range(128)]
    assert float(allfinite.clip_grad_norm_(with_grads(grads), 1.0)) == pytest.approx(1e19 * math.sqrt(128), rel=1e-6)
    assert float(grads[0]) == pytest.approx(1 / math.sqrt(128), rel=1e-6)


def test_squares_below_fp32_do_not_vanish() -> None:
    grads = [torch.full((1000, 1000), 1e-24)]
    assert float(allfinite.clip_grad_norm_(with_grads(grads), 1.0)) == pytest.approx(1e-21, rel=1e-6)


@pytest.mark.parametrize(("value", "order"), [(1e300, 2), (1e-300, 2), (1e200, 5), (1e-200, 5), (1e308, 1)])
def test_powers_beyond_double_are_rescued(value: float, order: float) -> None:
    grads = [torch.full((8,), value, dtype=torch.float64)]
    norm = float(allfinite.clip_grad_norm_(with_grads(grads), INF, order))
    expected = value * 8 ** (1 / order)
    assert norm == pytest.approx(expected, rel=1e-12) or (norm == INF and value == 1e308)


def test_a_factor_below_fp32_does_not_vanish() -> None:
    grads = [torch.full((3,), 3e38), torch.full((2, 2), 3e38).t()]
    allfinite.clip_grad_norm_(with_grads(grads), 1e-30)
    for grad in grads:
        expected = torch.full_like(grad, 1e-30 / math.sqrt(7))
        torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_not_finite_is_returned_and_changes_nothing(dtype: torch.dtype, value: float) -> None:
    grads = [torch.ones(5, dtype=dtype), torch.tensor([1.0, value, 2.0], dtype=dtype)]
    before = [g.clone() for g in grads]
    norm = float(allfinite.clip_grad_norm_(with_grads(grads), 1.0))
    assert math.isnan(norm) if math.isnan(value) else norm == INF
    for grad, old in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_written_below_the_limit() -> None:
    """A factor of 1 must not even count as a write: -0 and NaN payloads stay, and inference tensors work."""
    grads = [torch.tensor([-0.0, 0.25, 1e-45])]
    before = grads[0].view(torch.int32).clone()
    allfinite.clip_grad_norm_(with_grads(grads), 1.0)
    assert torch.equal(grads[0].view(torch.int32), before)


def test_zero_limit_gives_zeros() -> None:
    grads = [torch.randn(3), torch.randn(3).half()]
    allfinite.clip_grad_norm_(with_grads(grads), 0.0)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_parameters_without_gradient_generators_and_single_tensors() -> None:
    bare = torch.zeros(3, requires_grad=True)
    assert float(allfinite.clip_grad_norm_([bare], 1.0)) == 0
    assert float(allfinite.clip_grad_norm_([], 1.0)) == 0
    (owner,) = with_grads([torch.tensor([3.0, 4.0])])
    assert float(allfinite.clip_grad_norm_((p for p in (bare, owner)), 10)) == 5
    assert float(allfinite.clip_grad_norm_(owner, 2.5, foreach=True)) == 5
    torch.testing.assert_close(owner.grad, torch.tensor([1.5, 2.0]))


def test_complex_gradients_count_by_magnitude() -> None:
    grads = [torch.tensor([3 + 4j]), torch.tensor([12.0])]
    assert float(allfinite.clip_grad_norm_(with_grads([g.clone() for g in grads]), 100)) == 13
    assert float(allfinite.clip_grad_norm_(with_grads([g.clone() for g in grads]), 100, 1)) == 17
    owners = with_grads(grads)
    assert float(allfinite.clip_grad_norm_(owners, 6, INF)) == 12
    torch.testing.assert_close(grads[0], torch.tensor([1.5 + 2j]))


def test_shared_memory_is_scaled_once() -> None:
    base = torch.full((4,), 2.0)
    owners = with_grads([base, base.view(2, 2), torch.full((1,), 3.0).expand(5)])
    norm = float(allfinite.clip_grad_norm_(owners, 1.0))
    assert norm == pytest.approx(math.sqrt(16 + 16 + 45))
    assert base[0] == pytest.approx(2 / norm)
    assert owners[2].grad is not None
    assert owners[2].grad[0] == pytest.approx(3 / norm)


def test_strides() -> None:
    torch.manual_seed(2)
    base = torch.randn(40, 30)
    grad = base[::3, 1::2].t()
    expected = grad.clone()
    norm = allfinite.clip_grad_norm_(with_grads([grad]), 1.0)
    torch.testing.assert_close(grad, expected / float(norm), rtol=1e-5, atol=0)  # 1e-6 / norm of the formula


def test_f5_same_bits_with_any_number_of_threads() -> None:
    torch.manual_seed(3)
    grads = [torch.randn(n) for n in (300_000, 17, 65_536, 100_001)]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        copies = [g.clone() for g in grads]
        results.append((allfinite.clip_grad_norm_(with_grads(copies), 1.0), copies))
    torch.set_num_threads(1)
    for norm, copies in results[1:]:
        assert torch.equal(norm, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(copies, results[0][1], strict=True))


@pytest.mark.parametrize("order", [1, 2, INF])
def test_devices_without_kernels_go_through_torch(order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there is run here: torch's ops on CPU tensors."""
    torch.manual_seed(4)
    made = [torch.randn(7), torch.randn(3).half(), torch.randn(5).bfloat16(), torch.randn(2, dtype=torch.complex64)]
    ours, theirs = [g.clone() for g in made], [g.clone() for g in made]
    norm = allfinite.clip_grad_norm_(with_grads(ours), 0.5, order)
    monkeypatch.setattr(_device_ops, "_has_kernels", lambda tensor: False)
    other = allfinite.clip_grad_norm_(with_grads(theirs), 0.5, order)
    torch.testing.assert_close(norm, other, rtol=1e-6, atol=0)  # torch adds a magnitude of complex64 in fp32
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    poisoned = [torch.tensor([1.0, NAN])]
    assert math.isnan(float(allfinite.clip_grad_norm_(with_grads(poisoned), 0.5, order)))
    assert float(poisoned[0][0]) == 1


def test_opcheck() -> None:
    grads = [torch.randn(3, 4), torch.randn(4, 3).t().half(), torch.randn(5, dtype=torch.float64)[::2]]
    norm = torch.tensor(3.0, dtype=torch.float64)
    torch.library.opcheck(torch.ops.allfinite.get_total_norm.default, (grads,))
    torch.library.opcheck(torch.ops.allfinite._get_total_norm.default, (grads, 1.0))
    torch.library.opcheck(torch.ops.allfinite.clip_grads_with_norm_.default, (grads, 1.0, norm))


def test_a_graph_sees_the_write() -> None:
    """Without a counted write, backward would take the clipped value for the saved one."""
    saved = torch.tensor([3.0, 4.0])
    leaf = torch.ones(2, requires_grad=True)
    product = (leaf * saved).sum()
    torch.ops.allfinite.clip_grads_with_norm_([saved], 1.0, torch.tensor(5.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


class Clip(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        norm = torch.ops.allfinite.get_total_norm([y])
        torch.ops.allfinite.clip_grads_with_norm_([y], 1.0, norm)
        return y


def test_compiles_and_exports() -> None:
    x = torch.tensor([3.0, 4.0])
    expected = torch.tensor([0.6, 0.8])
    compiled = torch.compile(Clip(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.export.export(Clip(), (x,)).module()(x), expected, rtol=1e-6, atol=0)
