"""Progressions: steps count one by one, nothing is gained by other text, and held-out questions stay out."""

from __future__ import annotations

import pytest

from trace_lightning.tasks import ArithmeticProgressions
from trace_lightning.types import Problem

PROBLEM = Problem(prompt="", answer="18, 21, 24, 27", info={"last": 15, "step": 3, "terms": 4})
(REWARD,) = ArithmeticProgressions().rewards()


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (" 18, 21, 24, 27\n", 4),
        ("18,21,24,27", 4),
        (" 18, 21, 25, 28", 2),  # a wrong term costs its step and the next
        (" 18, 22", 1),
        (" 18, 22, 25, 28", 2),  # judged from what was written
        (" 9, 12, 15, 9", 0),  # the given terms again
        (" 12, 15, 12, 15", 0),
        (" 17, 20, 22, 25", 0),  # every second step is right
        (" 15, 18, 21, 24", 2),  # from the last given term on
        (" 18, 21, 18, 21", 2),  # loops later
        (" 18, 15, 18, 21", 1),
        (" 19, 22, 25, 28", 2),
        (" 18, 21, 24, 27, 30, 33", 4),  # more than was asked for
        (" 18, 21\n24, 27", 2),  # only the first line
        (" 18, 21, x, 24, 27", 2),
        (" 18 21 24 27", 0),
        (" 18, , 21", 1),
        (" 18.0, 21", 0),
        ("", 0),
        (" 1" + "0" * 5000, 0),  # longer than Python converts
    ],
)
def test_reward(completion, right):
    assert REWARD(completion, PROBLEM) == right / 4


def test_problems_answer_themselves_and_hold_out_by_question():
    task = ArithmeticProgressions(terms=6)
    train, heldout = task.train_problems(), task.heldout_problems()
    assert (len(train), len(heldout)) == (50 * 11 - 64, 64)
    assert not {p.prompt for p in train} & {p.prompt for p in heldout}
    assert all(REWARD(p.answer, p) == 1.0 for p in [*train, *heldout])
    worked = ", ".join(str(3 + 4 * i) for i in range(9))
    assert all(p.prompt.startswith(f"{worked}\n") for p in [*train, *heldout])
    assert not any(p.prompt.endswith("\n3, 7, 11,") for p in heldout)


@pytest.mark.parametrize(
    "arguments", [{"terms": 0}, {"largest_start": 2}, {"largest_step": 3}, {"heldout_size": 550}, {"heldout_size": -1}]
)
def test_bad_arguments_are_named(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ArithmeticProgressions(**arguments)
