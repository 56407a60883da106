"""F3 of add_layer_norm and add_rms_norm: sums bit for bit, outputs and gradients against float64 on the stored sum."""

import pytest
import torch

import allfinite
from support.add_norm import NAMES, random_case
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits

# dtype of input, residual and weight
MIXED = [
    (dtype, residual, weight)
    for dtype in SIXTEEN_BIT
    for residual in (dtype, torch.float32)
    for weight in (dtype, torch.float32)
]
SHAPES = [
    ((3,), (1,)),
    ((2, 3), (7,)),
    ((4,), (63,)),
    ((3,), (4, 5, 3)),
    ((6,), (257,)),
    ((), (100,)),
    ((1000,), (33,)),
    ((2,), (20000,)),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_all_shapes(name, dtype, batch, shape):
    """F3: tails of vectors, rows longer than a block and rows of one element round as well as any other."""
    random_case(name, dtype, batch=batch, shape=shape).assert_accurate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "residual_dtype", "weight_dtype"), MIXED, ids=str)
@pytest.mark.parametrize("n", [50, 129])
def test_f3_mixed_dtypes(name, dtype, residual_dtype, weight_dtype, n):
    """F3: each result in the dtype of its tensor, rounded once from fp32; the sum keeps residual's digits."""
    case = random_case(name, dtype, residual_dtype=residual_dtype, weight_dtype=weight_dtype, batch=(37,), shape=(n,))
    case.assert_accurate()
    result = case.run()
    assert result["y"].dtype == result["dx"].dtype == dtype
    assert result["sum"].dtype == result["dresidual"].dtype == residual_dtype
    assert result["dweight"].dtype == weight_dtype


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_f3_absent_parameters(name, dtype, absent):
    """F3: weight and bias may each be left out."""
    random_case(name, dtype, **dict.fromkeys(absent)).assert_accurate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("residual_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("absent", ["dy", "dsum"])
def test_f3_either_gradient_may_be_absent(name, residual_dtype, absent):
    """F3: an output that is not used sends no gradient: it must neither be read nor become NaN."""
    case = random_case(name, torch.float16, residual_dtype=residual_dtype, **{absent: None})
    case.assert_accurate()
    if absent == "dy":
        result = case.run()
        assert_same_bits(result["dresidual"], case.dsum)
        assert_same_bits(result["dx"], case.dsum.half())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_the_norm_is_that_of_the_stored_sum(name, dtype):
    """F3: statistics of the unrounded sum would differ from what a later layer sees: same bits as the norm alone."""
    case = random_case(name, dtype)
    plain = allfinite.rms_norm if case.rms else allfinite.layer_norm
    leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}
    total = case.rounded_sum().requires_grad_()
    parameters = [leaves["dweight"]] if case.rms else [leaves["dweight"], leaves["dbias"]]
    y = plain(total, case.shape, *parameters, case.eps)
    want = torch.autograd.grad(y, [total, *parameters], case.dy)
    case.dsum = None
    result = case.run()
    assert_same_bits(result["y"], y.detach())
    for key, gradient in zip(("dx", "dweight", "dbias"), want, strict=False):
        assert_same_bits(result[key], gradient)


@pytest.mark.parametrize("name", NAMES)
def test_f3_gradients_are_added_before_the_one_rounding(name):
    """F3: dx of the norm rounded to bf16 and then added to dsum is off by up to half an ulp of each, twice over."""
    case = random_case(name, torch.bfloat16, batch=(200,))
    exact = case.reference()["dx"].value
    # fp32 arithmetic moves a value across a rounding boundary with a chance of about 2^-14 an element and term.
    assert (case.run()["dx"] != exact.bfloat16()).double().mean() < 2e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f3_default_eps(name, dtype):
    """F3: add_rms_norm's eps=None is the epsilon of the arithmetic, whatever residual is; add_layer_norm's is 1e-5."""
    case = random_case(name, dtype)
    case.x, case.residual = case.x * 2e-4, case.residual * 2e-4
    if case.rms:
        case.eps = None
        case.assert_accurate()
    arguments = (case.x, case.residual, case.shape)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps if case.rms else 1e-5
    op = getattr(allfinite, name)
    assert_same_bits(op(*arguments)[0], op(*arguments, eps=eps)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [512, 8192])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_f3_many_rows_do_not_stall_the_column_sums(name, dtype, rows):
    """F3: column sums kept in bf16 stop at 256, whatever the number of rows."""
    random_case(name, dtype, batch=(rows,), dy=torch.ones(rows, 33, dtype=dtype)).assert_accurate()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_f3_fp32_does_not_depend_on_the_mean(name, mean):
    """F3: residual streams drift far from 0: the norm of the sum must not lose digits there."""
    case = random_case(name, torch.float32, batch=(8,), shape=(4096,))
    case.residual = case.residual + mean
    case.assert_accurate()
