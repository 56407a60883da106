"""unscale_and_check_: values, the overflow flag, and what is refused. Shared memory: test_unscale_shared_memory.py."""

import math

import pytest
import torch
from torch import Tensor

import allfinite
from support import gradients
from support.bounds import assert_same_bits
from support.gradients import torch_unscale, unscale

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:`torch.jit.script` is deprecated")


# --- values


@pytest.mark.parametrize("layout", gradients.LAYOUTS)
@pytest.mark.parametrize("dtype", gradients.REAL + gradients.COMPLEX, ids=str)
def test_f3_product_in_fp32_rounded_once(dtype: torch.dtype, layout: str) -> None:
    """F3: every number of the view, none beside it."""
    base = gradients.random(6, 7, 10, dtype=dtype)
    before = base.clone()
    view = gradients.LAYOUTS[layout](base)
    expected = gradients.unscaled(gradients.parts(view), 0.3)
    assert unscale([view], 0.3) == 0
    assert_same_bits(gradients.parts(view), expected)
    gradients.LAYOUTS[layout](before).copy_(view)
    assert_same_bits(gradients.parts(base), gradients.parts(before))


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f3_every_length_of_tail(dtype: torch.dtype) -> None:
    """F3: vectors of every width, and what is left of them."""
    for n in [*range(70), 1000]:
        grad = torch.randn(n, dtype=dtype)
        expected = gradients.unscaled(grad, 0.3)
        assert unscale([grad], 0.3) == 0
        assert_same_bits(grad, expected)


@pytest.mark.parametrize("dtype", gradients.REAL[:2], ids=str)
@pytest.mark.parametrize("inv_scale", [2.0, 0.3, 2.0**-16, 3e-5])
def test_f3_every_16_bit_number(dtype: torch.dtype, inv_scale: float) -> None:
    """F3: conversions of subnormals, ties and overflow; a NaN stays NaN, whichever."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = gradients.unscaled(patterns, inv_scale)
    grad = patterns.clone()
    assert unscale([grad], inv_scale) == 1
    number = ~expected.isnan()
    assert_same_bits(grad[number], expected[number])
    assert grad[~number].isnan().all()


def test_f4_powers_of_two_leave_no_trace() -> None:
    """F4, N42: what was scaled by 2^16 comes back bit for bit, so training in bf16 with a scaler changes nothing."""
    for dtype in gradients.REAL[1:]:
        grad = torch.randn(1000, dtype=dtype)
        scaled = grad * 2.0**16
        assert unscale([scaled], 2.0**-16) == 0
        assert_same_bits(scaled, grad)


def test_one_call_takes_any_mix() -> None:
    grads = [
        view(gradients.random(6, 7, 10, dtype=dtype)) for dtype in gradients.REAL for view in gradients.LAYOUTS.values()
    ]
    expected = [gradients.unscaled(g, 0.3) for g in grads]
    assert unscale(grads, 0.3) == 0
    for grad, exact in zip(grads, expected, strict=True):
        assert_same_bits(grad, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_cases_of_torchs_own_test(dtype: torch.dtype, bad: float) -> None:
    """Dense, transposed and sliced pairs; inv_scale 0.25 turns 4 into 1; infinity or NaN in either member is found."""

    def new() -> Tensor:
        return torch.full((10, 10), 4.0, dtype=dtype)

    pairs = [
        lambda: [new(), new()],
        lambda: [new(), new().t()],
        lambda: [new(), new()[:, :5]],
        lambda: [new()[:, :5], new()[:, :5]],
        lambda: [new(), new().half()],
    ]
    for pair in pairs:
        grads = pair()
        assert unscale(grads, 0.25) == 0
        assert all((g == 1).all() for g in grads)
        for position in (0, 1):
            grads = pair()
            grads[position][2, 2] = bad
            assert unscale(grads, 0.25) == 1
            others = torch.ones(grads[position].shape, dtype=torch.bool)
            others[2, 2] = False
            assert (grads[position][others] == 1).all()
            assert (grads[1 - position] == 1).all()


def test_same_bits_as_torch_where_torch_is_right() -> None:
    ours = [torch.randn(33, dtype=d) for d in gradients.REAL]
    theirs = [g.clone() for g in ours]
    assert unscale(ours, 0.3) == 0
    assert torch_unscale(theirs, 0.3) == 0
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(mine, other)


def test_inv_scale_1_only_checks() -> None:
    """Not even the payload of a NaN or the sign of a zero may change."""
    bits = torch.tensor([0x7FC12345, -0x80000000, 0x7F800000, 0x00000001, 0x3F800000], dtype=torch.int32)
    grad = bits.clone().view(torch.float32)
    assert unscale([grad], 1.0) == 1
    assert torch.equal(grad.view(torch.int32), bits)


# --- the flag


@pytest.mark.parametrize(
    ("dtype", "value", "inv_scale"),
    [
        (torch.float16, 60000.0, 2.0),
        (torch.bfloat16, 3e38, 2.0),
        (torch.bfloat16, 3.3895e38, 1.003),  # finite in float32
        (torch.float32, 3e38, 2.0),
        (torch.float64, 1.5e308, 2.0),
        (torch.complex64, 3e38, 2.0),
    ],
)
def test_f1_overflow_of_the_unscaled_value_is_reported(dtype: torch.dtype, value: float, inv_scale: float) -> None:
    """F1, N1c: a finite gradient whose unscaled value is infinite must not reach the optimizer as if it were fine."""
    grad = torch.tensor([1.0, value], dtype=dtype)
    assert unscale([grad], inv_scale) == 1
    assert gradients.parts(grad).isinf().any()


def test_n1c_torch_does_not_report_it() -> None:
    """Why the test above exists: torch writes infinity and reports nothing."""
    grad = torch.tensor([60000.0], dtype=torch.float16)
    assert torch_unscale([grad], 2.0) == 0
    assert grad.isinf().all()


@pytest.mark.parametrize("dtype", gradients.REAL[:2], ids=str)
def test_f1_the_last_value_that_does_not_overflow(dtype: torch.dtype) -> None:
    """The flag turns where rounding turns to infinity, not a step before or after."""
    inv_scale = 1.7
    values = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    fits = gradients.unscaled(values, inv_scale).isfinite()
    last = int(fits.nonzero().max())
    assert not fits[last + 1]
    assert unscale([values[last : last + 1].clone()], inv_scale) == 0
    assert unscale([values[last + 1 : last + 2].clone()], inv_scale) == 1


def test_f1_a_tie_between_the_largest_number_and_infinity() -> None:
    """65520 = 32760 * 2 rounds to infinity in fp16; the float32 below it does not."""
    below = math.nextafter(65520 / 32752, 0)
    assert unscale([torch.tensor([32752.0], dtype=torch.float16)], 65520 / 32752) == 1
    assert unscale([torch.tensor([32752.0], dtype=torch.float16)], below - 1e-6) == 0


def test_f1_finite_float64_beyond_float32_is_finite() -> None:
    """N15: a check in float32 reports 1e300."""
    grad = torch.tensor([1e300], dtype=torch.float64)
    assert unscale([grad], 0.5) == 0
    assert grad.item() == 5e299


def test_n13_no_sum_is_taken() -> None:
    """Two finite numbers whose sum overflows are fine; two infinities whose sum is NaN, or cancels, are not."""
    assert unscale([torch.tensor([3e38, 3e38])]) == 0
    assert unscale([torch.tensor([math.inf, -math.inf])]) == 1


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f2_an_infinity_is_found_whatever_the_factor(dtype: torch.dtype) -> None:
    """F2: inf * 0 is NaN, inf * tiny infinity."""
    for inv_scale in (0.0, 2.0**-149, 0.5, 1.0, 4.0):
        for bad in (math.inf, -math.inf, math.nan):
            assert unscale([torch.tensor([1.0, bad], dtype=dtype)], inv_scale) == 1


@pytest.mark.parametrize("dtype", gradients.REAL, ids=str)
def test_f2_found_in_every_place(dtype: torch.dtype) -> None:
    """F2: every lane of a vector, and the tail; alone among zeros, which a sum or a comparison could swallow."""
    for place in range(67):
        for bad in (math.inf, -math.inf, math.nan, torch.finfo(dtype).max):
            grad = torch.zeros(67, dtype=dtype)
            grad[place] = bad
            assert unscale([grad], 2.0) == 1, (place, bad)


def test_f2_a_broken_scale_shows() -> None:
    """N1: a scale of 0 has the inverse infinity, which turns a zero gradient into NaN."""
    assert unscale([torch.zeros(3)], math.inf) == 1
    assert unscale([torch.zeros(3)], math.nan) == 1
    assert unscale([torch.ones(3)], 0.0) == 0


def test_flag_is_only_ever_set_to_one() -> None:
    """Several groups share one flag: a later good one must not clear it, and a sum over devices counts it once."""
    found_inf = torch.zeros(1)
    bad, good = torch.full((2,), math.inf), torch.ones(2)
    for grads in ([bad, bad.clone()], [good], [], [good, bad]):
        allfinite.unscale_and_check_(grads, found_inf, torch.tensor([0.5]))
        assert found_inf.tolist() == [1.0]
    other = torch.full((), 7.0)
    allfinite.unscale_and_check_([good], other, torch.tensor(0.5))
    assert other == 7


def test_gradients_after_a_bad_one_are_unscaled_too() -> None:
    grads = [torch.tensor([math.inf]), torch.tensor([4.0])]
    assert unscale(grads, 0.5) == 1
    assert grads[1].item() == 2


# --- shapes


def test_nothing_to_do() -> None:
    assert unscale([]) == 0
    assert unscale([torch.zeros(0), torch.zeros(3, 0, dtype=torch.float16), torch.zeros(0, 4).t()]) == 0


def test_ten_thousand_small_tensors() -> None:
    """N44 in small: the last of many is not lost, and neighbours in one range of bytes stay apart."""
    grads = [torch.full((1 + i % 3,), 2.0, dtype=gradients.REAL[i % 4]) for i in range(10_000)]
    assert unscale(grads) == 0
    assert all(g.sum() == g.numel() for g in grads)
    grads[-1][-1] = math.nan
    assert unscale(grads) == 1


def test_f5_same_bits_with_any_number_of_threads() -> None:
    """F5, and the borders between the threads' byte ranges: no number is done twice or left out."""
    threads = torch.get_num_threads()
    base = [torch.randn(100_003 + i, dtype=d) for i, d in enumerate(gradients.REAL)]
    base.append(torch.randn(601, 703)[:, ::3])
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            grads = [g.clone() for g in base[:-1]]
            grads.append(torch.empty(601, 703)[:, ::3].copy_(base[-1]))
            assert unscale(grads, 0.3) == 0
            results.append(grads)
    finally:
        torch.set_num_threads(threads)
    for grads in results:
        for grad, original in zip(grads, base, strict=True):
            assert_same_bits(grad, gradients.unscaled(original, 0.3))


# --- refusals


# --- torch's machinery


def test_a_gradient_that_is_part_of_a_graph_is_refused() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for grad in (leaf, leaf * 2):
        with pytest.raises(NotImplementedError, match=r"expected tensors without gradient or torch\.no_grad\(\)"):
            unscale([grad])
        assert grad.detach().min() >= 1
    with torch.no_grad():
        unscale([leaf])
    assert leaf.tolist() == [0.5, 0.5]


def test_a_forward_mode_tangent_is_refused() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match="forward-mode tangent"):
            unscale([dual])


@pytest.mark.parametrize("which", [0, 1])
def test_writes_are_counted_for_autograd(which: int) -> None:
    """A graph that saved a gradient (or the flag) must notice that it changed, or its own gradient is wrong."""
    saved = [torch.full((2,), math.inf), torch.zeros(2).sum()]
    loss = (torch.ones((), requires_grad=True) * saved[which]).sum()
    allfinite.unscale_and_check_([saved[0]], saved[1], torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_works_in_inference_mode() -> None:
    outside = torch.ones(2)
    with torch.inference_mode():
        inside = torch.ones(2)
        assert unscale([outside, inside]) == 0
    assert outside.tolist() == inside.tolist() == [0.5, 0.5]


def test_vmap_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Batching rule not implemented for allfinite::unscale_and_check_"):
        torch.vmap(lambda t: unscale([t]))(torch.ones(2, 3))


def test_opcheck() -> None:
    op = torch.ops.allfinite.unscale_and_check_.default
    grads = [torch.randn(3, 4), torch.randn(4, 3).t().half(), torch.randn(5, dtype=torch.float64)[::2]]
    torch.library.opcheck(op, (grads, torch.zeros(()), torch.tensor(0.5)))


def test_compiles_without_a_graph_break() -> None:
    def step(first: Tensor, second: Tensor, found_inf: Tensor) -> Tensor:
        allfinite.unscale_and_check_([first, second], found_inf, torch.full((), 0.5))
        return first + 1

    first, second, found_inf = torch.ones(3), torch.full((2,), math.inf), torch.zeros(())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(first, second, found_inf).tolist() == [1.5] * 3
    assert first.tolist() == [0.5] * 3
    assert found_inf == 1


def test_exports() -> None:
    """torch.export keeps the writes, also after they are made functional."""

    class Unscale(torch.nn.Module):
        def forward(self, grad: Tensor, found_inf: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
            grad, found_inf = grad.clone(), found_inf.clone()
            torch.ops.allfinite.unscale_and_check_([grad], found_inf, inv_scale)
            return grad, found_inf

    inverse = torch.full((1,), 0.25)
    program = torch.export.export(Unscale(), (torch.ones(2), torch.zeros(1), inverse))
    for exported in (program, program.run_decompositions({})):
        grad, found_inf = exported.module()(torch.tensor([8.0, float("inf")]), torch.zeros(1), inverse)
        assert grad.tolist() == [2.0, float("inf")]
        assert found_inf.item() == 1.0
