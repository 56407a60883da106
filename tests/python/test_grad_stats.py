"""grad_stats: norm, largest magnitude, counts, the flag, and what is refused."""

import math

import pytest
import torch
from torch import Tensor

import allfinite
from support import gradients
from support.bounds import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:`torch.jit.script` is deprecated")

# Rounding of 10^5 additions in double; the contract (F3) allows 1e-6.
CLOSE = 1e-12


@pytest.mark.parametrize("layout", gradients.LAYOUTS)
@pytest.mark.parametrize("dtype", gradients.REAL + gradients.COMPLEX, ids=str)
def test_f3_every_statistic_of_every_layout(dtype: torch.dtype, layout: str) -> None:
    base = gradients.random(6, 7, 10, dtype=dtype)
    base[:, :, ::3] = 0
    base[:, 2, 1::3] = torch.finfo(dtype).tiny / 4
    view = gradients.LAYOUTS[layout](base)
    exact = gradients.flat64([view])
    stats = allfinite.grad_stats([view])
    assert math.isclose(stats.norm.item(), exact.norm().item(), rel_tol=CLOSE)
    assert stats.amax.item() == exact.abs().max().item()
    assert stats.zeros.item() == int((exact == 0).sum())
    assert stats.subnormals.item() == gradients.subnormals(view)
    assert stats.found_inf.item() == 0


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f3_every_length_of_tail(dtype: torch.dtype) -> None:
    """F3: vectors of every width, and what is left of them."""
    for n in [*range(70), 1000]:
        grad = torch.randn(n, dtype=dtype)
        grad[::5] = 0
        grad[1::7] = torch.finfo(dtype).tiny * 0.75
        exact = grad.double()
        stats = allfinite.grad_stats([grad])
        assert math.isclose(stats.norm.item(), math.hypot(*exact.tolist()), rel_tol=CLOSE)
        assert stats.amax.item() == max(exact.abs().tolist(), default=0.0)
        assert stats.zeros.item() == int((exact == 0).sum())
        assert stats.subnormals.item() == gradients.subnormals(grad)


def test_one_call_takes_any_mix() -> None:
    grads = [
        view(gradients.random(6, 7, 10, dtype=dtype)) * 10**i
        for i, dtype in enumerate(gradients.REAL + gradients.COMPLEX[1:])
        for view in gradients.LAYOUTS.values()
    ]
    exact = gradients.flat64(grads)
    stats = allfinite.grad_stats(grads)
    assert math.isclose(stats.norm.item(), exact.norm().item(), rel_tol=CLOSE)
    assert stats.amax.item() == exact.abs().max().item()


def test_results_are_numbers_of_the_documented_dtypes() -> None:
    for grads in ([], [torch.ones(2, dtype=torch.float16)]):
        stats = allfinite.grad_stats(grads)
        assert [t.dtype for t in stats] == [torch.float32, torch.float64, torch.float64, torch.int64, torch.int64]
        assert all(t.shape == () for t in stats)


def test_nothing_to_read() -> None:
    for grads in ([], [torch.zeros(0), torch.zeros(0, 3, dtype=torch.float16).t()]):
        assert [t.item() for t in allfinite.grad_stats(grads)] == [0, 0, 0, 0, 0]


def test_one_tensor_or_any_iterable() -> None:
    """A bare tensor must not be taken apart into its rows' tensors by accident of being iterable."""
    tensor = torch.eye(3)
    for argument in (tensor, (tensor,), (t for t in (tensor,))):
        stats = allfinite.grad_stats(argument)
        assert (stats.zeros.item(), stats.amax.item()) == (6, 1)


# --- range


@pytest.mark.parametrize(
    ("value", "count", "norm", "torchs"),
    [
        (1e19, 128, 1e19 * math.sqrt(128), math.inf),  # case J
        (1e20, 2, 1e20 * math.sqrt(2), math.inf),  # N11
        (1e-24, 10**6, 1e-21, 0.0),  # case K
    ],
)
def test_f1_squares_beyond_float32(value: float, count: int, norm: float, torchs: float) -> None:
    """F1: torch's norm is infinite, and clipping then sets every gradient to 0; or 0, and clipping never acts."""
    grad = torch.full((count,), value)
    stats = allfinite.grad_stats([grad])
    assert math.isclose(stats.norm.item(), norm, rel_tol=1e-7)  # the value itself is a float32
    assert stats.found_inf == 0
    # The reason for the test. Whether torch adds up in float32 or double within a tensor is its own affair.
    assert torch.linalg.vector_norm(grad).item() in (torchs, pytest.approx(norm))


def test_f1_a_16_bit_total_beyond_the_dtype() -> None:
    """N12, torchtitan's case: fp16 norms of tensors are finite, that of all is not; torch returns infinity."""
    grads = [torch.full((4,), 30000.0, dtype=torch.float16) for _ in range(4)]
    assert allfinite.grad_stats(grads).norm == 120000
    assert torch.nn.utils.get_total_norm(grads).isinf()


def test_f3_norm_does_not_depend_on_the_partition() -> None:
    """In bf16 torch gives 316.0 for a hundred tensors of ones in 1000 and 316.23 for one tensor."""
    whole = torch.ones(100, 1000, dtype=torch.bfloat16)
    exact = math.sqrt(100_000)
    for grads in ([whole], list(whole), [*whole.flatten()[:400], whole.flatten()[400:]]):
        assert math.isclose(allfinite.grad_stats(grads).norm.item(), exact, rel_tol=CLOSE)
    assert torch.nn.utils.get_total_norm(list(whole)).item() == 316.0


@pytest.mark.parametrize("value", [1.7e308, 1e300, 1e160, 1e-155, 1e-200, 2.2e-308, 5e-324])
def test_f1_squares_beyond_float64(value: float) -> None:
    """F1: a second read with a power of two where the squares leave double's range."""
    grads = [torch.full((3, 3), value, dtype=torch.float64).t()[:, :2], torch.zeros(3, dtype=torch.float16)]
    stats = allfinite.grad_stats(grads)
    exact = math.hypot(*[value] * 6)
    assert stats.norm.item() == exact if exact == math.inf else math.isclose(stats.norm.item(), exact, rel_tol=1e-15)
    assert stats.found_inf == 0  # the values are finite, also where the norm is beyond double
    assert stats.amax == value


def test_f1_a_large_float64_beside_small_numbers() -> None:
    grads = [torch.tensor([3e200, 4e200], dtype=torch.float64), torch.ones(5), torch.ones(5, dtype=torch.bfloat16)]
    stats = allfinite.grad_stats(grads)
    assert math.isclose(stats.norm.item(), 5e200, rel_tol=1e-15)
    assert stats.zeros == 0


# --- what is not finite


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f2_infinity_and_nan_show_in_every_statistic(dtype: torch.dtype) -> None:
    """F2, case L: the caller can skip the step, and the gradients are as they were."""
    for values, expected in [([math.inf], math.inf), ([-math.inf], math.inf), ([math.inf, math.nan], math.nan)]:
        grad = torch.tensor([3.0, *values, 4.0], dtype=dtype)
        before = grad.clone()
        stats = allfinite.grad_stats([torch.ones(100), grad])
        for statistic in (stats.norm.item(), stats.amax.item()):
            assert math.isnan(statistic) if math.isnan(expected) else statistic == expected
        assert stats.found_inf == 1
        assert_same_bits(grad, before)


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f2_found_in_every_place(dtype: torch.dtype) -> None:
    """F2: every lane of a vector, and the tail."""
    for place in range(67):
        for bad, amax in ((math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)):
            grad = torch.zeros(67, dtype=dtype)
            grad[place] = bad
            stats = allfinite.grad_stats([grad])
            assert stats.found_inf == 1
            assert str(stats.amax.item()) == str(amax)
            assert str(stats.norm.item()) == str(amax)


def test_f2_a_nan_before_or_after_an_infinity_is_not_lost() -> None:
    """A maximum by comparison forgets a NaN, or everything before it."""
    for order in ([math.nan, math.inf, 1.0], [1.0, math.inf, math.nan], [math.inf, math.nan, 1.0]):
        for grads in ([torch.tensor(order)], [torch.tensor([v]) for v in order]):
            assert allfinite.grad_stats(grads).amax.isnan()


# --- counts


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f3_counts_are_exact_at_their_borders(dtype: torch.dtype) -> None:
    """Subnormal in its own dtype: 6e-8 is in fp16 and is not in bf16. -0 is zero, the smallest normal number is not."""
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    values = [0.0, -0.0, smallest, -smallest, info.tiny - smallest, info.tiny, -info.tiny, 6e-8, 1.0]
    for repeat in (1, 40):  # by scalars, and by vectors with a tail
        stats = allfinite.grad_stats([torch.tensor(values * repeat, dtype=dtype)])
        assert stats.zeros.item() == 2 * repeat
        assert stats.subnormals.item() == (4 if dtype == torch.float16 else 3) * repeat


def test_memory_that_entries_share_counts_each_time() -> None:
    """Two parameters with one gradient have the norm of two gradients; an expanded one that of its elements."""
    grad = torch.tensor([3.0, 4.0])
    assert math.isclose(allfinite.grad_stats([grad, grad]).norm.item(), math.sqrt(50), rel_tol=CLOSE)
    expanded = allfinite.grad_stats([torch.tensor([[2.0], [0.0]]).expand(2, 9)])
    assert expanded.norm.item() == 6
    assert expanded.zeros.item() == 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64], ids=str)
def test_any_views(dtype: torch.dtype) -> None:
    """Every element once for each index that means it, whatever sizes and strides."""
    for _ in range(200):
        base = gradients.random(100, dtype=dtype)
        base[::3] = 0
        views = gradients.random_views(base, 4)
        exact = gradients.flat64(views)
        stats = allfinite.grad_stats(views)
        assert math.isclose(stats.norm.item(), exact.norm().item(), rel_tol=CLOSE)
        assert stats.zeros.item() == int((exact == 0).sum())


def test_ten_thousand_small_tensors() -> None:
    grads = [torch.full((1 + i % 3,), float(i % 2), dtype=gradients.REAL[i % 4]) for i in range(10_000)]
    exact = gradients.flat64(grads)
    stats = allfinite.grad_stats(grads)
    assert stats.norm.item() == exact.norm().item()
    assert stats.zeros.item() == int((exact == 0).sum())


def test_f5_same_bits_with_any_number_of_threads() -> None:
    """F5: chunks are cut by bytes, not by threads."""
    threads = torch.get_num_threads()
    grads = [torch.randn(200_003 + i, dtype=d) for i, d in enumerate(gradients.REAL)]
    grads.append(torch.randn(601, 703)[:, ::3])
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(allfinite.grad_stats(grads))
    finally:
        torch.set_num_threads(threads)
    assert math.isclose(results[0].norm.item(), gradients.flat64(grads).norm().item(), rel_tol=CLOSE)
    for stats in results[1:]:
        for mine, first in zip(stats, results[0], strict=True):
            assert_same_bits(mine, first)


# --- refusals and torch's machinery


def test_lazy_conjugates_and_negatives() -> None:
    base = torch.tensor([3 + 4j, -1 - 2j], dtype=torch.complex64)
    assert math.isclose(allfinite.grad_stats([base.conj()]).norm.item(), math.sqrt(30), rel_tol=CLOSE)
    assert allfinite.grad_stats([base.conj().imag]).amax == 4


def test_a_backward_through_it_is_refused() -> None:
    """Not silently without gradient: a penalty on this norm would do nothing."""
    stats = allfinite.grad_stats([torch.ones(2, requires_grad=True) * 2])
    with pytest.raises(RuntimeError, match="derivative for allfinite::_grad_stats is not implemented"):
        stats.norm.backward()


def test_a_forward_mode_tangent_is_refused() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match="forward AD"):
            allfinite.grad_stats([dual])


def test_vmap_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Batching rule not implemented for allfinite::grad_stats"):
        torch.vmap(lambda t: allfinite.grad_stats([t]).norm)(torch.ones(2, 3))


def test_opcheck() -> None:
    grads = [torch.randn(3, 4), torch.randn(4, 3).t().half(), torch.randn(5, dtype=torch.float64)[::2]]
    torch.library.opcheck(torch.ops.allfinite.grad_stats.default, (grads,))
    torch.library.opcheck(torch.ops.allfinite._grad_stats.default, (grads,))


class Norm(torch.nn.Module):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        stats = allfinite.grad_stats([first * 2, second])
        return torch.where(stats.found_inf == 0, stats.norm, -1.0)


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(Norm(), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(3), torch.full((4,), 1.0)).item() == 4.0
    assert compiled(torch.ones(3), torch.full((4,), math.inf)).item() == -1.0


def test_exports() -> None:
    program = torch.export.export(Norm(), (torch.ones(3), torch.ones(4)))
    assert program.module()(torch.ones(3), torch.ones(4)).item() == 4.0
