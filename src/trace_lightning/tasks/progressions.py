r"""`ArithmeticProgressions`: long answers that a small pretrained model can learn, with a reward for every step.

A gap between trainer and rollout adds up along an answer, so a study of it needs answers of a hundred tokens or more.
SmolLM2-135M gets no such answer wholly right, and a reward of 0 for all of them teaches nothing. Here each step is
judged from the term before it, as it was written: a wrong term costs its own step and the next.

    3, 7, 11, 15, 19, 23, 27\n                     worked example: as many terms as are asked for
    9, 12, 15,            " 18, 21, 24, 27\n"      reward 4 / 4; " 18, 21, 25, 28": 2 / 4; " 18, 22": 1 / 4
                          " 9, 12, 15, 9"         0: only what lies beyond every number before it counts
                          " 17, 20, 22, 25"       0: a right step after a wrong one does not count

Both rules are against answers that are worth much and lead nowhere: where every right step counted, repeating the
three given terms earned two thirds and every second step half, and policies that found this stayed there
(docs/results/stability.md).

What was left out: answers of free length. `terms` bounds them, so nothing is gained by writing on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.split import split_by_question
from trace_lightning.types import Problem

_GIVEN = 3  # terms that a prompt shows
_EXAMPLE = (3, 4)  # start and step of the worked example; it is asked in training only


class RightSteps(RewardFn):
    """Share of `info["terms"]` steps that are right and follow no wrong one.

    A step is right if its term minus the one before it equals `info["step"]`, and no number before it, given or
    written, is as large. The first line counts, up to its first part that is no integer. Terms beyond `info["terms"]`
    count for nothing.
    """

    name = "right_steps"
    in_process = True

    def __call__(self, completion: str, problem: Problem) -> float:
        previous, step, terms = (int(problem.info[name]) for name in ("last", "step", "terms"))
        counted, largest, was_right = 0, previous, True
        for part in completion.split("\n", 1)[0].split(",")[:terms]:
            if re.fullmatch(r"[+-]?[0-9]{1,18}", part.strip()) is None:
                break
            term = int(part)
            right = term - previous == step and term > largest
            counted += right and was_right
            previous, largest, was_right = term, max(largest, term), right
        return counted / terms


class ArithmeticProgressions(Task):
    r"""Continue a progression by `terms` terms; sample with `stop=["\n"]`, about 4 new tokens a term for SmolLM2.

    Questions are all pairs of a start from 1 to `largest_start` and a step from 2 to `largest_step`.

    Args:
        terms: how many terms are asked for and shown in the worked example.
        largest_start: at least 3.
        largest_step: at least 4.
        heldout_size: questions held out.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self, terms: int = 24, largest_start: int = 50, largest_step: int = 12, heldout_size: int = 64
    ) -> None:
        questions = largest_start * (largest_step - 1)
        if terms < 1 or largest_start < _EXAMPLE[0] or largest_step < _EXAMPLE[1]:
            raise ValueError(
                f"ArithmeticProgressions: terms={terms}, largest_start={largest_start}, largest_step={largest_step} "
                f"must be at least 1, {_EXAMPLE[0]} and {_EXAMPLE[1]}"
            )
        if not 0 <= heldout_size < questions:
            raise ValueError(
                f"ArithmeticProgressions: heldout_size={heldout_size} must be 0 to {questions - 1}, of the "
                f"{questions} questions there are"
            )
        pairs = [(a, k) for a in range(1, largest_start + 1) for k in range(2, largest_step + 1) if (a, k) != _EXAMPLE]
        problems = [self._problem(start, step, terms) for start, step in pairs]
        self._train, self._heldout = split_by_question(problems, heldout_size, key=lambda problem: str(problem.prompt))
        self._train.append(self._problem(*_EXAMPLE, terms))

    @staticmethod
    def _problem(start: int, step: int, terms: int) -> Problem:
        example = ", ".join(str(_EXAMPLE[0] + i * _EXAMPLE[1]) for i in range(_GIVEN + terms))
        given = [start + i * step for i in range(_GIVEN)]
        answer = ", ".join(str(given[-1] + i * step) for i in range(1, terms + 1))
        info = {"last": given[-1], "step": step, "terms": terms}
        return Problem(prompt=f"{example}\n{', '.join(map(str, given))},", answer=answer, info=info)

    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on, in hash order."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Problems whose start and step are never trained on together."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """One reward from 0 to 1."""
        return [RightSteps()]
