"""Rewards that ship with the library. Each is a few lines: copy one to start your own."""

from __future__ import annotations

import re

from trace_lightning.tasks.base import RewardFn
from trace_lightning.types import Problem


class ExactMatch(RewardFn):
    """1.0 if the stripped completion equals the stripped answer, else 0.0."""

    name = "exact_match"
    in_process = True

    def __call__(self, completion: str, problem: Problem) -> float:
        return float(completion.strip() == str(problem.answer).strip())


class IntegerMatch(RewardFn):
    """1.0 if the first line of the completion is one integer, equal to the answer, else 0.0.

    Only blanks may surround it. A text that merely contains the number ("20 or 21") is wrong: a model would soon learn
    to list candidates. Later lines are ignored, since a completion may run past its stop string.
    """

    name = "integer_match"
    in_process = True

    def __call__(self, completion: str, problem: Problem) -> float:
        first_line = completion.split("\n", 1)[0].strip()
        is_integer = re.fullmatch(r"[+-]?[0-9]{1,40}", first_line) is not None
        return float(is_integer and int(first_line) == int(problem.answer))
