"""What numbers a tensor holds and how it lies in memory: drawn as a few choices, filled from a seed."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SEEDS = st.integers(0, 2**24 - 1)  # Hypothesis draws ranges up to 2^24 uniformly

# Simplest first: Hypothesis shrinks towards the front.
SPREADS = ("normal", "few values", "constant", "offset", "wide", "whole range", "rows")
SPECIALS = ("none", "none", "none", "none", "zeros", "max", "lowest", "subnormal", "nan", "inf", "-inf", "inf and nan")
FINITE_SPECIALS = SPECIALS[:8]
LAYOUTS = ("contiguous", "misaligned", "every second", "padded", "transposed", "expanded")


# Of ops that promise the whole range of the narrower dtypes only, float64 stays within 2^-450 and 2^450, where squares
# are in its own range. `whole` in what follows: the op promises float64's range as well.
FLOAT64_REACH = 450


@cache
def reach(dtype: torch.dtype, whole: bool = False) -> tuple[int, int]:
    """The lowest (subnormals included) and the highest power of two that tensors of ``dtype`` hold."""
    if dtype == torch.float64 and not whole:
        return -FLOAT64_REACH, FLOAT64_REACH
    info = torch.finfo(dtype)
    return int(np.frexp(info.smallest_normal * info.eps)[1]) - 1, int(np.frexp(info.max)[1]) - 1


@cache
def largest(dtype: torch.dtype, whole: bool = False) -> float:
    """The largest number that tensors of ``dtype`` hold."""
    return 2.0**FLOAT64_REACH if dtype == torch.float64 and not whole else torch.finfo(dtype).max


class Fill(NamedTuple):
    """The numbers of one tensor: a distribution times 2^exponent, and special values in some places."""

    spread: str = "normal"
    exponent: int = 0
    special: str = "none"


@cache
def exponents(dtype: torch.dtype, whole: bool = False) -> st.SearchStrategy[int]:
    """Powers of two: in half of the cases 0, else any that ``dtype`` reaches."""
    low, high = reach(dtype, whole)
    return st.integers(low, 2 * high - low).map(lambda e: e if e <= high else 0)


@cache
def fills(dtype: torch.dtype, finite: bool = False, whole: bool = False) -> st.SearchStrategy[Fill]:
    """Every kind of content for a tensor of ``dtype``."""
    specials = FINITE_SPECIALS if finite else SPECIALS
    kinds = st.sampled_from([(spread, special) for special in specials for spread in SPREADS])
    return st.builds(lambda kind, exponent: Fill(kind[0], exponent, kind[1]), kinds, exponents(dtype, whole))


def numbers(rng: np.random.Generator, shape: Sequence[int], fill: Fill, limits: tuple[int, int]) -> Array:
    """float64 numbers of a fill, before the rounding to a dtype; the last dimension is a row.

    ``limits``: the powers of two of the spread "whole range".
    """
    spread, shape = fill.spread, tuple(shape)
    column = (*shape[:-1], 1) if shape else ()
    if spread == "few values":
        values = rng.integers(-2, 3, shape).astype(np.float64)
    elif spread == "constant":
        values = np.broadcast_to(rng.standard_normal(column) * 8, shape)
    else:
        values = rng.standard_normal(shape)
    if spread == "offset":
        values = values + rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 6)
    elif spread == "wide":
        values = values * 2.0 ** rng.integers(-30, 31, shape)
    elif spread == "rows":
        values = values * 2.0 ** rng.integers(-60, 61, column)
    elif spread == "whole range":
        return np.ldexp(values, rng.integers(limits[0], limits[1] + 1, shape))
    return np.ldexp(values, fill.exponent)


def place_special(rng: np.random.Generator, t: Tensor, special: str, whole: bool = False) -> None:
    """Writes special values into a few places of a contiguous tensor, or all over one of its rows."""
    if special == "none" or t.numel() == 0:
        return
    big, small = largest(t.dtype, whole), 2.0 ** reach(t.dtype, whole)[0]
    flat = t.view(-1)
    row = t.shape[-1] if t.dim() else 1
    if rng.random() < 0.25:
        start = int(rng.integers(t.numel() // row)) * row
        places = np.arange(start, start + row)
    else:
        places = rng.integers(0, t.numel(), int(rng.integers(1, 4)))
    sign = float(rng.choice([-1, 1]))
    value = {
        "zeros": 0.0, "max": big * sign, "lowest": -big, "subnormal": small * sign,
        "nan": np.nan, "inf": np.inf, "-inf": -np.inf, "inf and nan": np.inf,
    }[special]  # fmt: skip
    flat[torch.from_numpy(places)] = value
    if special == "inf and nan":
        flat[int(rng.integers(t.numel()))] = np.nan


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers (``expanded``: those of the first index, repeated) at other strides; gaps hold NaN."""
    if layout == "contiguous" or t.numel() == 0 or t.dim() == 0:
        return t
    if layout == "expanded":
        return t[:1].clone().expand(t.shape)
    gap = torch.nan if t.is_floating_point() else 1
    if layout == "misaligned":
        place = t.new_full((t.numel() + 1,), gap)[1:].view(t.shape)
    elif layout == "every second":
        place = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), gap)[..., ::2]
    elif layout == "padded" or t.dim() < 2:
        place = t.new_full((*t.shape[:-1], t.shape[-1] + 3), gap)[..., : t.shape[-1]]
    else:
        place = t.new_full((*t.shape[:-2], t.shape[-1], t.shape[-2]), gap).transpose(-1, -2)
    return place.copy_(t)


def make(
    rng: np.random.Generator,
    shape: Sequence[int],
    dtype: torch.dtype,
    fill: Fill,
    layout: str = "contiguous",
    whole: bool = False,
) -> Tensor:
    """A tensor of ``dtype``. Without a special value it is finite: numbers beyond the range become the largest."""
    big = largest(dtype, whole)
    with np.errstate(over="ignore"):  # float64 beyond its range becomes the largest, too
        exact = numbers(rng, shape, fill, reach(dtype, whole))
    t = torch.from_numpy(np.array(np.clip(exact, -big, big))).to(dtype)
    place_special(rng, t, fill.special, whole)
    return lay_out(t, layout)
