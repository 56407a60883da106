"""Every public op, module and scaler refuses bad input by name and type, before anything is written.

test_bad_calls.cpp is the same for C++. What tracing, forward mode and autograd refuse is in test_<op>_errors.py.
"""

import re
from collections import Counter

import pytest

from bad_calls import attention, cross_entropy, gradients, modules, norms, scaler, softmax
from bad_calls.case import BadCall, snapshot

FAMILIES = (norms, softmax, cross_entropy, attention, gradients, modules, scaler)
CASES = [case for family in FAMILIES for case in family.CASES]


def test_there_is_no_case_twice() -> None:
    """Guards the count below, and the name that a failure is reported by."""
    names = Counter(str(case) for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused(case: BadCall) -> None:
    """Guards the type, the text (op, argument, what was expected, what came), and that not a byte was written."""
    owner = getattr(case.function, "__self__", None)
    before = snapshot(owner, case.arguments, case.keywords)
    with pytest.raises(case.error) as raised:
        case.function(*case.arguments, **case.keywords)
    message = str(raised.value).splitlines()[0]
    assert message == f"{case.op}: {case.message}"
    assert re.search(r"expected .+, but got .+", message)
    assert type(raised.value) is case.error
    assert snapshot(owner, case.arguments, case.keywords) == before
