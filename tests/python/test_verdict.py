"""Verdicts follow from measurements alone."""

import dataclasses
import math

import pytest

from allfinite.train.verdict import Measured, compare, judge

HEALTHY = Measured(
    recipe="any",
    dtype="fp16",
    lr=0.003,
    steps=100,
    planned_steps=100,
    limit=65504.0,
    first_nonfinite_step=None,
    died_at_step=None,
    nonfinite_steps=0,
    skipped_steps=0,
    final_scale=65536.0,
    logits=[10.0 + step for step in range(100)],
    lrs=[0.003] * 60 + [0.001] * 40,
    logit_limit_step=None,
    loss=0.5,
    accuracy=0.98,
    underflow=0.01,
    finished=True,
)
# Grows by 2000 a step at the full rate and stands still in the decay.
OVERGROWN = dataclasses.replace(
    HEALTHY,
    lr=0.03,
    lrs=[0.03] * 60 + [0.01] * 40,
    logits=[2000.0 * min(step, 60) for step in range(1, 101)],
    logit_limit_step=33,
    accuracy=0.9,
)
DEAD = dataclasses.replace(
    OVERGROWN,
    steps=70,
    first_nonfinite_step=40,
    died_at_step=70,
    nonfinite_steps=25,
    skipped_steps=28,
    final_scale=2.0**-12,
    loss=math.nan,
)


def test_healthy_run_gets_no_advice() -> None:
    judged = judge(HEALTHY, [HEALTHY])
    assert judged.verdict.startswith("Finite to the end, accuracy 98.0 %")
    assert judged.advice == ""


def test_death_after_the_limit_names_the_logits() -> None:
    judged = judge(DEAD, [DEAD])
    assert "Died of NaN at step 70: first non-finite loss at step 40, 40.0 % of its steps lost" in judged.verdict
    assert "attention logits passed 65504 at step 33" in judged.verdict
    assert "0.003" in judged.advice
    assert "allfinite.convert(model)" in judged.advice


def test_death_with_logits_in_range_does_not_blame_them() -> None:
    """A verdict that always blames attention would send the user to the wrong place."""
    dead = dataclasses.replace(DEAD, logits=[100.0] * 70, logit_limit_step=None)
    judged = judge(dead, [dead])
    assert "were in range (largest 100)" in judged.verdict
    assert "convert" not in judged.advice


def test_death_before_the_limit_does_not_blame_the_logits() -> None:
    dead = dataclasses.replace(DEAD, first_nonfinite_step=20)
    assert "the overflow is elsewhere" in judge(dead, [dead]).verdict


def test_limping_run_is_not_called_finite() -> None:
    limping = dataclasses.replace(OVERGROWN, first_nonfinite_step=50, nonfinite_steps=7, skipped_steps=9)
    verdict = judge(limping, [limping]).verdict
    assert verdict.startswith("Limped to the end with 7 non-finite losses, the first at step 50; 9.0 %")
    assert "passed 65504 at step 33" in verdict


def test_overgrown_run_says_when_how_far_and_why() -> None:
    judged = judge(OVERGROWN, [OVERGROWN])
    assert "passed 65504 at step 33 and still grow from there, to 120000 at step 60" in judged.verdict
    assert "learning rate of 0.03 is the cause" in judged.verdict
    assert "grew by 2000 a step while it was at its peak, and by 0 a step while it decayed" in judged.verdict
    assert "0.003" in judged.advice


def test_logits_that_stay_near_the_limit_are_not_said_to_grow() -> None:
    near = dataclasses.replace(OVERGROWN, logits=[66000.0] * 100)
    verdict = judge(near, [near]).verdict
    assert "still grow" not in verdict
    assert "stayed near it" in verdict


def test_a_slower_run_confirms_the_cause() -> None:
    verdict = judge(OVERGROWN, [OVERGROWN, HEALTHY]).verdict
    assert "The learning rate of 0.03 is the cause: at 0.003 they stay at 109 or below." in verdict


def test_growth_that_does_not_follow_the_rate_is_not_pinned_on_it() -> None:
    """The logits grow just as fast while the rate decays: the run itself proves no cause."""
    steady = dataclasses.replace(OVERGROWN, logits=[2000.0 * step for step in range(1, 101)])
    assert "likely cause" in judge(steady, [steady]).verdict


def test_a_slower_run_that_overflows_too_does_not_confirm_the_cause() -> None:
    slow = dataclasses.replace(OVERGROWN, lr=0.003)
    assert "stay at" not in judge(OVERGROWN, [OVERGROWN, slow]).verdict


def test_many_lost_steps_are_named() -> None:
    lossy = dataclasses.replace(HEALTHY, skipped_steps=20)
    judged = judge(lossy, [lossy])
    assert "20.0 % of its steps were lost" in judged.verdict
    assert judged.advice


def test_bf16_run_with_huge_logits_is_not_called_sound() -> None:
    huge = dataclasses.replace(OVERGROWN, dtype="bf16", limit=3.4e38, logit_limit_step=None)
    judged = judge(huge, [huge])
    assert "bf16 can store them, fp16 could not" in judged.verdict
    assert judged.advice


def test_unfinished_run_has_no_verdict_yet() -> None:
    stopped = dataclasses.replace(DEAD, finished=False, died_at_step=None)
    assert judge(stopped, [stopped]).verdict == "Stopped at step 70 of 100."


@pytest.mark.parametrize("survives", [True, False])
def test_comparison_says_whether_torchs_own_op_survives(survives: bool) -> None:
    sdpa = dataclasses.replace(OVERGROWN, recipe="sdpa", final_scale=16384.0, underflow=0.125, skipped_steps=2)
    if not survives:
        sdpa = dataclasses.replace(sdpa, first_nonfinite_step=44, nonfinite_steps=30, died_at_step=80)
    text = " ".join(compare([sdpa, dataclasses.replace(OVERGROWN, recipe="allfinite")]))
    assert ("survives here as well" in text) == survives
    assert ("goes non-finite at step 44" in text) != survives
    assert "kept loss scale 16384 and 65536, gradient elements that underflowed 12.5 % and 1.0 %" in text


def test_comparison_does_not_credit_torchs_op_with_logits_that_stayed_in_range() -> None:
    text = " ".join(compare([dataclasses.replace(HEALTHY, recipe="sdpa")]))
    assert "survives" not in text
    assert "its logits stayed in range, at most 109" in text


def test_comparison_of_one_run_is_empty() -> None:
    assert compare([HEALTHY]) == []
