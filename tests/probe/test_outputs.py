"""Rewards with intervals, loops, garble: on numbers small enough to check by hand."""

from __future__ import annotations

import math

import pytest

from trace_lightning.probe import outputs


def test_an_interval_is_over_questions_and_leaves_out_what_was_not_scored():
    found = outputs.interval([0.0, 1.0, None, 1.0, 0.0])
    half = 1.959964 * math.sqrt((4 * 0.25 / 3) / 4)
    assert found == pytest.approx({"mean": 0.5, "low": 0.5 - half, "high": 0.5 + half})
    assert outputs.interval([1.0]) == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert outputs.interval([None]) is None


def test_a_share_has_a_wilson_interval():
    """8 of 10: .8 and .2 at ten draws (tables give .490 to .943)."""
    found = outputs.share([1.0] * 8 + [0.0] * 2)
    assert (round(found["low"], 3), round(found["high"], 3)) == (0.490, 0.943)
    assert outputs.share([1.0] * 4)["high"] == pytest.approx(1.0)
    assert outputs.share([]) is None


def test_samples_of_a_question_are_one_observation():
    means = outputs.per_question([1.0, 0.0, math.nan, 1.0, math.nan, math.nan], 2)
    assert means == [0.5, 1.0, None]
    assert outputs.differences(means, [0.25, None, 1.0]) == [0.25, None, None]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 24, True),
        ([7] * 23, False),
        ([1, 2, 3] * 8, True),
        ([9, 9, 9, *[1, 2, 3] * 8], True),
        ([*[1, 2, 3] * 8, 4], False),
        (list(range(200)), False),
        (list(range(40)) * 3, True),
        (list(range(40)) * 2, False),
    ],
)
def test_a_loop_is_a_period_three_times_over(ids, expected):
    assert outputs.loops(ids) is expected


def test_distinct_ngrams():
    assert outputs.distinct_share([1, 1, 1, 1, 1]) == 0.5
    assert outputs.distinct_share([1, 2, 3]) == 1.0


@pytest.mark.parametrize(
    ("text", "broken"), [("fine\n\ttext", False), ("caf\u00e9", False), ("a\ufffd", True), ("\x07", True)]
)
def test_broken_text(text, broken):
    assert outputs.broken_text(text) is broken


def test_unlikely_windows_are_judged_by_the_reference():
    assert outputs.window_means([-1.0] * 32 + [-3.0] * 32 + [-9.0] * 31) == [-1.0, -3.0]
    reference = [-float(i) for i in range(100)]  # the least likely but one is -98
    assert outputs.unlikely_share([-98.0, -98.5, -200.0, 0.0], reference) == 0.5
    assert outputs.unlikely_share([], reference) is None
