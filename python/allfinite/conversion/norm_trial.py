"""Runs a module's own ``forward`` to find the ``NormForm`` with which ``NormLike`` computes the same.

Everything runs on a bare copy (``bare_copy.py``). The state of torch's random generator is restored.
"""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from allfinite.conversion.bare_copy import attributes, bare_copy, first_line, stored
from allfinite.conversion.norms import DtypeRule, NormForm, NormLike, normalized_shape

# Norms in fp32 differ by some 1e-6 in the order of their sums; a variance over n - 1 instead of n by 1 / (2 n).
_TOLERANCE = 1e-5
_LOW = (torch.float16, torch.bfloat16)
_DTYPES = (*_LOW, torch.float32)
# A forward that rounds each step to 16 bits makes some four errors of half an epsilon; another formula makes more.
_ROUNDINGS = 4.0


class _Disagreement(Exception):
    """Why the module is left alone."""


def find_form(module: Module, eps: str, argument: str) -> NormForm | str:
    """The form in which the module computes its norm, or the reason to leave it.

    Args:
        module: as ``norms.structure`` has found it.
        eps: the attribute that holds epsilon.
        argument: the name of forward's argument.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False), _silent():
        bare = bare_copy(module, torch.Generator().manual_seed(0))
        bare.eval()
        try:
            form = _form_in_float32(bare, eps, argument)
            bare.train()
            return _with_dtype(bare, form)
        except _Disagreement as reason:
            return f"its forward, tried on random input, {reason}"


def _form_in_float32(bare: Module, eps: str, argument: str) -> NormForm:
    """The form that agrees with the module's own forward in float32, its dtype apart."""
    shape = tuple(normalized_shape(bare))
    scales = (1.0, (getattr(bare, eps) or torch.finfo(torch.float32).eps) ** 0.5)  # with the second, eps shows
    closest, refusal = float("inf"), ""
    for axis in (-1, 1) if len(shape) == 1 else (-1,):
        inputs = [x * scale for x, scale in itertools.product(_inputs(shape, axis), scales)]
        runs = [(x, _own(bare, x)) for x in inputs]
        refusal = refusal or next((result for _, result in runs if isinstance(result, str)), "")
        taken = [(x, result) for x, result in runs if isinstance(result, Tensor)]
        for form in _forms(bare, eps, argument, axis) if taken else ():
            difference = max(_difference(form, bare, x, expected) for x, expected in taken)
            if difference <= _TOLERANCE:
                return _with_layout(bare, form, taken)
            closest = min(closest, difference)
    if closest == float("inf"):
        raise _Disagreement(refusal or "gives other shapes than a norm")
    raise _Disagreement(f"differs from a layer norm and from an RMS norm by {closest:.2g} of its size")


def _inputs(shape: tuple[int, ...], axis: int) -> list[Tensor]:
    """Random inputs with a mean that is not zero, of 2 to 4 dimensions; no other dimension is as long as the norm."""
    generator = torch.Generator().manual_seed(1)
    two, three, five = (length if length not in shape else length + 4 for length in (2, 3, 5))
    leading: list[tuple[int, ...]] = [(three,), (two, three), (two, three, five)]
    shapes = [(*some, *shape) for some in leading]
    if axis == 1:
        shapes = [(two, *shape, three, five), (two, *shape, three)]
    return [torch.randn(s, generator=generator, device="cpu", dtype=torch.float32) + 0.5 for s in shapes]


def _forms(bare: Module, eps: str, argument: str, axis: int) -> Iterator[NormForm]:
    kinds = ("layer_norm",) if bare._parameters.get("bias") is not None else ("rms_norm", "layer_norm")
    offsets = (0,) if bare._parameters.get("weight") is None else (0, 1)
    for kind, offset in itertools.product(kinds, offsets):
        yield NormForm(kind, eps, argument, offset, axis)  # type: ignore[arg-type]


def _own(bare: Module, x: Tensor) -> Tensor | str:
    """The result of the module's own forward, or what it did instead of giving one."""
    state = attributes(bare)
    given = x.clone()
    try:
        result: Any = bare.forward(given)
    except Exception as error:
        return f"raised {first_line(error)}"
    if changed := stored(bare, state):
        raise _Disagreement(f"stored something in {', '.join(changed)}")
    if not torch.equal(given, x):
        raise _Disagreement("changed its input")
    if not isinstance(result, Tensor):
        raise _Disagreement(f"gave a {type(result).__name__}, not a tensor")
    return result


def _run(form: NormForm, bare: Module, x: Tensor) -> Tensor:
    """``NormLike.forward`` on the copy, which for the time of the call has the form."""
    bare.__dict__["_allfinite_form"] = form
    try:
        return NormLike.forward(bare, x)  # type: ignore[arg-type]
    finally:
        del bare.__dict__["_allfinite_form"]


def _difference(form: NormForm, bare: Module, x: Tensor, expected: Tensor) -> float:
    """The largest difference over the size of the result; infinite where shapes differ."""
    actual = _run(form, bare, x)
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(difference) if difference.isfinite() else float("inf")


def _with_layout(bare: Module, form: NormForm, runs: list[tuple[Tensor, Tensor]]) -> NormForm:
    for keeps_layout in (False, True) if form.axis == 1 else (False,):
        candidate = form._replace(keeps_layout=keeps_layout)
        if all(_run(candidate, bare, x).stride() == expected.stride() for x, expected in runs):
            return candidate
    raise _Disagreement("gives its result in another memory layout")


def _with_dtype(bare: Module, form: NormForm) -> NormForm:
    """The form with the rule for the output's dtype that holds for every pair of dtypes that the module takes."""
    shape = tuple(normalized_shape(bare))
    x32 = next(x for x in _inputs(shape, form.axis) if isinstance(_own(bare, x), Tensor))
    rules: list[DtypeRule] = ["input", "promoted", "weight"]
    for dtype, weight_dtype, autocast in _dtype_cases(bare):
        bare.to(weight_dtype)
        x = x32.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            expected = _own(bare, x)
            if isinstance(expected, str):
                continue  # it does not take these two together
            rules = [r for r in rules if _run(form._replace(dtype=r), bare, x).dtype == expected.dtype]
            where = f"{'under autocast ' if autocast else ''}gives {_short(expected.dtype)} for {_short(dtype)}"
            if not rules:
                raise _Disagreement(f"{where} beside a weight in {_short(weight_dtype)}, which follows no known rule")
            coarsest = max(torch.finfo(t).eps for t in (dtype, weight_dtype, expected.dtype))
            difference = _difference(form._replace(dtype=rules[0]), bare, x, expected)
            if not difference <= _ROUNDINGS * coarsest + _TOLERANCE:
                raise _Disagreement(f"{where} and differs there by {difference:.2g} of its size")
    return form._replace(dtype=rules[0])


def _dtype_cases(bare: Module) -> list[tuple[torch.dtype, torch.dtype, bool]]:
    """(dtype of the input, of the weight, whether under autocast)."""
    weights = _DTYPES if any(True for _ in bare.parameters()) else (torch.float32,)
    cases = [(x, weight, False) for weight in weights for x in _DTYPES]
    return [*cases, (torch.float32, torch.float32, True), (torch.bfloat16, torch.float32, True)]


@contextmanager
def _silent() -> Iterator[None]:
    """Without warnings: torch warns of pairs of dtypes that only the trial brings together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
