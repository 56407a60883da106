"""F4 and F5 of add_layer_norm and add_rms_norm: loss scale, number of threads, other rows."""

import pytest
import torch

from support.add_norm import NAMES, random_case
from support.bounds import DTYPES, SIXTEEN_BIT, assert_linear, assert_same_bits

GRADIENTS = ("dx", "dresidual", "dweight", "dbias")


def not_tiny(t):
    """Gradients of 2^-3 to 8 keep |d| * 2^k within the range in which the rule holds bit for bit."""
    return torch.where(t.abs() < 2**-3, t.new_tensor(0.25), t)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-50, -24, -1, 1, 16, 24, 55])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_f4_gradients_are_linear_in_powers_of_two(name, dtype, residual_dtype, exponent):
    """F4: with both incoming gradients scaled: adding dsum must not round where the rest does not."""
    case = random_case(name, dtype, residual_dtype=residual_dtype, batch=(64,), shape=(100,))
    case.dy, case.dsum = not_tiny(case.dy), not_tiny(case.dsum)
    base = case.run()
    case.dy, case.dsum = (torch.ldexp(t, torch.tensor(exponent)) for t in (case.dy, case.dsum))
    scaled = case.run()
    for key in GRADIENTS:
        if key in base:
            assert_linear(base[key], scaled[key], exponent)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [-8, 4, 11])
@pytest.mark.parametrize("residual_dtype", [torch.float16, torch.float32], ids=str)
def test_f4_fp16_gradients_are_linear_in_powers_of_two(name, residual_dtype, exponent):
    """F4: the same in fp16, whose own range is the limit."""
    case = random_case(name, torch.float16, residual_dtype=residual_dtype, batch=(64,), shape=(100,))
    case.dy, case.dsum = not_tiny(case.dy), not_tiny(case.dsum)
    base = case.run()
    case.dy, case.dsum = (torch.ldexp(t, torch.tensor(exponent)) for t in (case.dy, case.dsum))
    scaled = case.run()
    for key in GRADIENTS:
        if key in base:
            assert_linear(base[key], scaled[key], exponent)


@pytest.mark.parametrize("name", NAMES)
def test_f4_crossing_into_the_rescued_range_changes_no_mantissa(name):
    """F4: dy * weight beyond 2^60 is scaled first: the same bits as just below it, dsum included."""
    case = random_case(name, torch.float32, batch=(8,), shape=(128,))
    case.dy, case.dsum, case.weight = not_tiny(case.dy), not_tiny(case.dsum), case.weight.abs() + 0.5
    base, dy, dsum = case.run(), case.dy, case.dsum
    for exponent in (58, 60, 61, 70, -58, -61, -70):
        case.dy, case.dsum = (torch.ldexp(t, torch.tensor(exponent)) for t in (dy, dsum))
        assert_linear(base["dx"], case.run()["dx"], exponent)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 100), (33, 65), (700, 257), (5000, 64)])
def test_f5_threads_do_not_change_bits(name, dtype, rows, n):
    """F5: column sums are added in fixed chunks, not one a thread."""
    wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
    case = random_case(name, dtype, residual_dtype=wide, batch=(rows,), shape=(n,))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(case.run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for key, value in results[0].items():
            assert_same_bits(value, other[key])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [5, 64, 1000])
def test_f5_a_row_does_not_depend_on_its_batch(name, dtype, n):
    """F5: a row alone, in a batch, and at a misaligned address has the same bits."""
    case = random_case(name, dtype, batch=(67,), shape=(n,))
    batch = case.run()
    full = {key: getattr(case, key) for key in ("x", "residual", "dy", "dsum")}
    for row in (0, 13, 66):
        for offset in (0, 1):
            for key, t in full.items():
                setattr(case, key, torch.cat([t.new_zeros(offset), t[row]])[offset:])
            alone = case.run()
            for key in ("y", "sum", "dx", "dresidual"):
                assert_same_bits(alone[key], batch[key][row])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", ["dx", "dresidual", "dweight", "dx dweight", "dresidual dweight", "dx dresidual"])
def test_gradients_do_not_depend_on_which_are_wanted(name, residual_dtype, wanted):
    """Frozen weights, a residual without gradient: what is left has the bits of the full backward."""
    case = random_case(name, torch.bfloat16, residual_dtype=residual_dtype, batch=(50,), shape=(70,))
    full = case.run()
    leaves = {key: t.clone().requires_grad_(key in wanted.split()) for key, t in case.leaves().items()}
    y, total = case.call(leaves)
    assert total.requires_grad == bool({"dx", "dresidual"} & set(wanted.split()))
    outputs = [(y, case.dy)] + ([(total, case.dsum)] if total.requires_grad else [])
    torch.autograd.backward(*zip(*outputs, strict=True))
    for key, leaf in leaves.items():
        if key in wanted.split():
            assert_same_bits(leaf.grad, full[key])
        else:
            assert leaf.grad is None
