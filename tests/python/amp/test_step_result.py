"""``StepResult``: its words are those of C++, and it reads as a sentence."""

import pickle
from typing import get_args

from allfinite import _C
from allfinite.amp import StepResult, _step_result


def test_the_words_are_those_of_cpp() -> None:
    """A log written by a C++ trainer and one by Python are read alike; ranks exist in Python only."""
    assert get_args(_step_result.Status) == _C.STEP_STATUSES
    assert get_args(_step_result.Reason) == (*_C.SKIP_REASONS, "other_rank")


def test_reads_as_a_sentence() -> None:
    assert str(StepResult("stepped")) == "stepped"
    assert str(StepResult("no_gradients")) == "no gradients"
    assert str(StepResult("skipped", "nan", 0, 3, scale=8.0)) == (
        "skipped: nan in the gradient of parameter 3 of group 0, at scale 8"
    )
    assert str(StepResult("skipped", "after_unscale", 1, 3, "w", scale=0.5)) == (
        "skipped: overflow by unscaling in the gradient of parameter 3 (w) of group 1, at scale 0.5"
    )
    assert str(StepResult("skipped", "other_rank", scale=8.0)) == "skipped: not finite on another rank, at scale 8"
    assert "has changed since" in str(StepResult("skipped", scale=8.0))


def test_pickles() -> None:
    made = StepResult("skipped", "inf", 0, 3, "w", 1.5, 8.0, True)
    assert pickle.loads(pickle.dumps(made)) == made
