"""What a task and a reward are. A task is problems plus the rewards that score them; both are pure Python.

Users subclass `Task`, or bring prompts in a file and a plain function as the reward; neither needs this library's
tensors. Token ids are the truth: text is decoded for rewards and never re-encoded for training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from trace_lightning.types import Problem


class RewardFn(ABC):
    """Scores one completion. Pure in `completion` and `problem`; may return None for "not scored".

    `name` is the key under which the reward is logged (`rewards/<name>/mean`); it defaults to the class name.
    """

    name: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def __call__(self, completion: str, problem: Problem) -> float | None:
        """The reward of one completion (text without the special tokens)."""


class FunctionReward(RewardFn):
    """A plain function `(completion, problem) -> float | None` as a RewardFn, named after the function."""

    def __init__(self, function: Callable[[str, Problem], float | None]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, completion: str, problem: Problem) -> float | None:
        return self.function(completion, problem)


class Task(ABC):
    """A set of problems, split by question into training and held-out, and the rewards that score them."""

    @abstractmethod
    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on, in a deterministic order."""

    @abstractmethod
    def heldout_problems(self) -> Sequence[Problem]:
        """Problems never trained on; may be empty."""

    @abstractmethod
    def rewards(self) -> Sequence[RewardFn]:
        """The reward functions of the task; their weighted sum is the reward. Names must differ."""
