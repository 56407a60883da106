"""The error bounds of the contract (F3), written once: every accuracy test asserts through these."""

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
OUTPUT_TERMS, COLUMN_TERMS = 2**-20, 2**-21  # beside one ulp: of the terms of an output, of dgamma and dbeta
GRADIENT_NORM = 1e-6  # relative
FP32_SOFTMAX = 2**-17  # of the terms; weights below 2^-126 may flush
LOSS_GRADIENT_TERMS = 2**-19  # beside one ulp
FP32_NORM = 2e-7  # relative L2 of the fp32 norms


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of ``dtype`` at ``value`` (float64), in float64; subnormals included."""
    info = torch.finfo(dtype)
    magnitude = value.abs().clamp(min=info.tiny, max=info.max)
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(value, info.eps), exponent - 1)


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The float64 ``exact`` rounded to ``dtype``, as float64: where it is infinite, infinity is the right result."""
    return exact.to(dtype).double()


def assert_within_one_ulp(actual: Tensor, exact: Tensor, terms: Tensor | float = 0.0, factor: float = 2**-20) -> None:
    """|actual - exact| <= 1 ulp + factor * terms, elementwise; infinities must agree, NaN never passes.

    Args:
        actual: the result under test, of the dtype whose ulp counts.
        exact: float64.
        terms: the sum of the absolute values that were added up, float64.
        factor: 2^-20 for outputs, 2^-21 for dgamma and dbeta.
    """
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    got = actual.double()
    bound = ulp(exact, actual.dtype) + factor * terms
    near = (got - exact).abs() <= bound
    same_infinity = torch.isinf(got) & (got == rounded(exact, actual.dtype))
    wrong = ~(near | same_infinity)
    if wrong.any():
        i = int(torch.nonzero(wrong.flatten())[0])
        worst = got.flatten()[i].item(), exact.flatten()[i].item(), bound.flatten()[i].item()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are beyond the bound; "
            f"first at {i}: got {worst[0]!r}, exact {worst[1]!r}, bound {worst[2]!r}"
        )


def relative_l2(actual: Tensor, exact: Tensor) -> float:
    """||actual - exact|| / ||exact|| in float64; 0 where both are 0; NaN where anything is not finite."""
    got = actual.double()
    difference, norm = torch.linalg.vector_norm(got - exact), torch.linalg.vector_norm(exact)
    if not torch.isfinite(got).all():
        return float("nan")
    return 0.0 if difference == 0 else float(difference / norm)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Equal element by element, NaN equal to NaN, +0 different from -0."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_linear(base: Tensor, scaled: Tensor, exponent: int) -> None:
    """F4: ``scaled`` is 2^exponent times ``base``, bit for bit where both are normal and finite; enough of them are."""
    info = torch.finfo(base.dtype)
    normal = (base.abs() >= info.tiny) & (scaled.abs() >= info.tiny) & scaled.isfinite()
    normal |= (base == 0) & (scaled == 0)
    back = torch.ldexp(scaled.double(), torch.tensor(-exponent))  # exact in float64
    assert torch.equal(base.double()[normal], back[normal])
    assert normal.double().mean() > 0.9


def assert_relative_l2(actual: Tensor, exact: Tensor, limit: float, terms: Tensor | None = None) -> None:
    """||actual - exact|| <= limit * (||exact|| + ||terms||) over the tensor; NaN and infinity never pass.

    Args:
        actual: the result under test.
        exact: float64.
        limit: 2e-7 for the norms in float32.
        terms: float64, elementwise the sum of the absolute values that were added up; none: 0.
    """
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    error = torch.linalg.vector_norm(actual.double() - exact)
    allowed = torch.linalg.vector_norm(exact)
    if terms is not None:
        allowed = allowed + torch.linalg.vector_norm(terms)
    assert error <= limit * allowed, f"L2 error {error / allowed:.3g} of the allowed unit, limit {limit:.3g}"
