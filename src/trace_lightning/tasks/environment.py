"""What an environment is: the other side of a conversation, a tool or a game. Pure Python, one object per conversation.

    reset(problem)          once
    step(text) -> Step      after every turn of the policy: what it reads next, whether that is all, the turn's reward

A task with conversations makes one for each (`Task.environment`). The policy begins: what it should know first stands
in the problem's prompt, so that all samples of a prompt start from the same state and share its prefill.

Environments are other people's code, like rewards: each runs in a process of its own, which can be stopped, unless the
task says that it need not (`Task.environments_in_process`). One that raises, hangs or returns something else ends its
own conversation, which is then not scored.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from trace_lightning.tasks.base import Failure, checked_score
from trace_lightning.types import Problem


@dataclass(frozen=True)
class Step:
    """What an environment answers to a turn.

    Args:
        observation: what the policy reads next. With `done` nobody reads it; it is shown in the logs alone.
        done: the conversation ends here.
        reward: of the turn; the rewards of all turns are added up (`TurnRewards`).
    """

    observation: str = ""
    done: bool = False
    reward: float | None = None


class Environment(ABC):
    """The other side of one conversation; see the top of this file."""

    def reset(self, problem: Problem) -> None:  # noqa: B027  many have nothing to prepare
        """Begin the conversation about `problem`."""

    @abstractmethod
    def step(self, text: str) -> Step:
        """Answer one turn of the policy.

        Args:
            text: what the policy wrote in this turn, without the special tokens; a stop string is part of it.
        """

    def close(self) -> None:  # noqa: B027
        """Called once at the end of the conversation, if the environment still runs."""


class Playing:
    """One environment in use: whatever it does wrong comes back as a `Failure`, which no later step mends.

    Args:
        make: the task's factory; None from it is a conversation of one turn.
        problem: what it is about.
    """

    def __init__(self, make: Any, problem: Problem) -> None:
        self._failure: Failure | None = None
        self._environment: Environment | None = None
        try:
            self._environment = make(problem)
            self._failure = self._not_an_environment() or self._reset(problem)
        except Exception as error:
            self._failure = _raised(error)

    def _not_an_environment(self) -> Failure | None:
        if self._environment is None or isinstance(self._environment, Environment):
            return None
        return Failure(f"Task.environment returned a {type(self._environment).__name__}, no Environment")

    def _reset(self, problem: Problem) -> Failure | None:
        told: Any = None if self._environment is None else self._environment.reset(problem)  # type: ignore[func-returns-value]
        if told is None:
            return None
        return Failure(f"reset returned a {type(told).__name__}: what the policy reads first belongs in the prompt")

    def step(self, text: str) -> Step | Failure:
        """The environment's answer, checked."""
        if self._failure is None and self._environment is None:
            return Step("", done=True)
        if self._failure is None:
            assert self._environment is not None
            try:
                return _checked(self._environment.step(text))
            except Exception as error:
                self._failure = _raised(error)
        return self._failure

    def close(self) -> None:
        """Let the environment clean up; what it raises then is nobody's answer."""
        if self._environment is not None and self._failure is None:
            try:
                self._environment.close()
            except Exception as error:
                self._failure = _raised(error)


def _checked(returned: Any) -> Step:
    """A step with text, a flag and a finite number in it.

    Raises:
        TypeError: something else; the message says where.
        ValueError: a reward that is no finite number, or text with half a surrogate pair, which no tokenizer takes.
    """
    if not isinstance(returned, Step):
        raise TypeError(f"step returned a {type(returned).__name__}; a Step is expected")
    if not isinstance(returned.observation, str):
        raise TypeError(
            f"step returned an observation of type {type(returned.observation).__name__}; a str is expected"
        )
    returned.observation.encode()
    return Step(str(returned.observation), bool(returned.done), checked_score("step", 0, returned.reward).value)


def _raised(error: Exception) -> Failure:
    return Failure(f"raised {type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
