r"""A game of several turns: find a number, hearing after each guess whether it is higher or lower.

    prompt    0-99?\n           a new line for each guess: sample with stop=["\n"]
    policy    50\n
    game      >\n               the number is higher; "<" lower, "?" for what is no number
    policy    75\n
    game      =\n               found

A wrong guess gets 0, the right one `1 - .5 * (guesses before it) / (max_guesses - 1)`: halving finds every number in
time, and luck is worth little. All characters are in the vocabulary of the embedded policies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.environment import Environment, Step
from trace_lightning.tasks.rewards import TurnRewards
from trace_lightning.tasks.split import split_by_question
from trace_lightning.types import Problem


class GuessGame(Environment):
    """One round.

    Args:
        secret: the number.
        max_guesses: guesses, malformed ones included, after which the round is lost.
    """

    def __init__(self, secret: int, max_guesses: int) -> None:
        self.secret, self.max_guesses, self.guesses = secret, max_guesses, 0

    def step(self, text: str) -> Step:
        """Higher, lower, found or lost."""
        self.guesses += 1
        guess = text.strip()
        if re.fullmatch(r"[0-9]{1,9}", guess) is None:
            said = "?\n"
        elif int(guess) == self.secret:
            return Step("=\n", done=True, reward=1.0 - 0.5 * (self.guesses - 1) / max(1, self.max_guesses - 1))
        else:
            said = ">\n" if self.secret > int(guess) else "<\n"
        return Step(said, done=self.guesses == self.max_guesses, reward=0.0)


class GuessNumber(Task):
    """Numbers from 0 to `largest`, one a problem, held out by number.

    Args:
        largest: largest number.
        max_guesses: guesses per round; `rollout.turns.max_turns` should allow as many.
        heldout_size: numbers held out.

    Raises:
        ValueError: an argument that leaves no game.
    """

    environments_in_process = True

    def __init__(self, largest: int = 99, max_guesses: int = 7, heldout_size: int = 20) -> None:
        if largest < 1 or max_guesses < 1 or not 0 <= heldout_size <= largest:
            raise ValueError(
                f"GuessNumber: largest={largest} and max_guesses={max_guesses} must be at least 1, and "
                f"heldout_size={heldout_size} at most largest"
            )
        self.max_guesses = max_guesses
        problems = [Problem(prompt=f"0-{largest}?\n", answer=secret) for secret in range(largest + 1)]
        self._train, self._heldout = split_by_question(problems, heldout_size, key=lambda problem: str(problem.answer))

    def train_problems(self) -> Sequence[Problem]:
        """All other numbers, in hash order."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Numbers that are never played for in training."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """What the game gives."""
        return [TurnRewards()]

    def environment(self, problem: Problem) -> GuessGame:
        """A round for the problem's number."""
        return GuessGame(problem.answer, self.max_guesses)
