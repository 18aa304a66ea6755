"""Rewards that compare texts. Each is a few lines: copy one to start your own.

They run inside the training process: comparing costs less than sending. `RegexMatch` and `Format` take patterns of the
user's, which can run for hours on an unlucky text, and so run in a worker.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from trace_lightning.tasks.base import BatchReward, RewardFn, Sample, Score, Task, Value
from trace_lightning.tasks.calls import is_async
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


class RegexMatch(RewardFn):
    r"""1.0 if what the pattern finds last in the completion equals the answer, else 0.0.

    Args:
        pattern: regular expression with one group, e.g. `####\s*(-?[0-9]+)`; `.` matches line ends too.
        ignore_case: compare without regard to case, and match the pattern likewise.

    Raises:
        ValueError: not a regular expression, or not with exactly one group.
    """

    name = "regex_match"

    def __init__(self, pattern: str, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case
        self.pattern = _compiled("RegexMatch", pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        if self.pattern.groups != 1:
            raise ValueError(f"RegexMatch: pattern={pattern!r} has {self.pattern.groups} groups, exactly one is needed")

    def __call__(self, completion: str, problem: Problem) -> Score:
        found = self.pattern.findall(completion)
        if not found:
            return Score(0.0, "the pattern is not found")
        given, wanted = found[-1].strip(), str(problem.answer).strip()
        if self.ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        return Score(float(given == wanted), f"found {given[:80]!r}")


class Format(RewardFn):
    r"""1.0 if the whole completion has a given form, else 0.0. It says nothing about the answer.

    Args:
        pattern: regular expression for the stripped completion; `.` matches line ends too. The default asks for one
            block of thought and one answer, each exactly once.

    Raises:
        ValueError: not a regular expression.
    """

    name = "format"
    THINK_ANSWER = r"<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>"

    def __init__(self, pattern: str = THINK_ANSWER) -> None:
        self.pattern = _compiled("Format", pattern, re.DOTALL)

    def __call__(self, completion: str, problem: Problem) -> float:
        return float(self.pattern.fullmatch(completion.strip()) is not None)


class LastTurn(RewardFn):
    """Another reward, of the policy's last turn alone: the answer at the end of a conversation.

    Args:
        reward: a reward for one completion, not an asynchronous one or one for whole batches.

    Raises:
        ValueError: one of those.
    """

    def __init__(self, reward: RewardFn) -> None:
        if isinstance(reward, BatchReward) or is_async(reward):
            raise ValueError(f"LastTurn: reward {reward.name!r} is asynchronous or takes whole batches")
        self.reward, self.name = reward, reward.name
        self.in_process, self.time_limit = reward.in_process, reward.time_limit

    def prepare(self) -> None:
        """Prepare the other reward."""
        self.reward.prepare()

    def __call__(self, completion: str, problem: Problem) -> Value:
        return self.reward(completion, problem)  # type: ignore[return-value]

    def score(self, sample: Sample) -> Value:
        """The other reward, with the last turn as its text; of an answer without turns, all of it."""
        own = [turn.text for turn in sample.turns if turn.source == "policy"]
        last = dataclasses.replace(sample, text=own[-1], turns=()) if own else sample
        return self.reward.score(last)  # type: ignore[return-value]


class TurnRewards(RewardFn):
    """The sum of what the environment gave for the turns of a conversation.

    It is added to the rewards of a task that has environments, unless one of them counts turns already.
    """

    name = "turns"
    in_process = True
    counts_turns = True

    def __call__(self, completion: str, problem: Problem) -> Value:
        return 0.0

    def score(self, sample: Sample) -> Value:
        """0 where no turn got a reward."""
        return sum(turn.reward for turn in sample.turns if turn.reward is not None)


def with_turn_rewards(rewards: Sequence[RewardFn], task: Task | None) -> list[RewardFn]:
    """The rewards for answers to `task`: those given, and the rewards of turns where there may be any."""
    wanted = task is not None and task.has_environments and not any(reward.counts_turns for reward in rewards)
    return [*rewards, TurnRewards()] if wanted else list(rewards)


def _compiled(who: str, pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{who}: pattern={pattern!r} is not a regular expression: {error}") from error
