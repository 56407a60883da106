"""Makes a failing case smaller than its few choices can: fewer rows, then plainer numbers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contract.base import OpContract
from contract.case import Case, change
from contract.rules import Violation

ATTEMPTS = 400


def simplify(contract: OpContract, params: Any, violation: Violation, api: Any) -> Violation:
    """A violation of the same rule by a simpler case, if one is found among a few hundred."""
    rule = violation.text.split(":")[0]
    case, best = contract.build(params), violation

    def fails(candidate: Case) -> bool:
        nonlocal best
        try:
            contract.try_case(candidate, params, api)
        except Violation as found:
            if found.text.split(":")[0] == rule:
                best = found
                return True
        except ValueError:  # no longer a call that the op takes
            return False
        return False

    if not fails(case):
        return violation
    attempts, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in _candidates(contract, case):
            attempts += 1
            if attempts > ATTEMPTS:
                return best
            if fails(candidate):
                case, smaller = candidate, True
                break
    return best


def _candidates(contract: OpContract, case: Case) -> Iterator[Case]:
    """Cases a step simpler: one row only, or one tensor's numbers all 1, all powers of two, or one of them 0 or 1."""
    if contract.parts is not None:
        yield from contract.parts(case)
    for group, key in ((case.inputs, "inputs"), (case.incoming, "incoming")):
        for name, t in group.items():
            if isinstance(t, Tensor) and t.is_floating_point():
                for plainer in _plainer(t):
                    yield change(case, **{key: {name: plainer}})


def _plainer(t: Tensor) -> Iterator[Tensor]:
    """Contiguous copies with simpler numbers."""
    t = t.detach()
    plain = t.clone(memory_format=torch.contiguous_format)
    options = [torch.ones_like(plain), torch.ldexp(*[torch.frexp(plain)[0].sign(), torch.frexp(plain)[1] - 1])]
    if t.numel() <= 16:
        for i in range(t.numel()):
            for value in (0.0, 1.0):
                one = plain.clone()
                one.view(-1)[i] = value
                options.append(one)
    weight = _weight(plain)
    yield from (option.to(t.dtype) for option in options if _weight(option) < weight)


def _weight(t: Tensor) -> int:
    """How many digits it takes to write down: what simplification reduces."""
    return sum(len(repr(x)) for x in t.flatten().tolist())
