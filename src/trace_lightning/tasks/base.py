"""What a task and a reward are. A task is problems plus the rewards that score them; both are pure Python.

Users subclass `Task`, or bring prompts in a file and a plain function as the reward; neither needs this library's
tensors. Token ids are the truth: text is decoded for rewards and never re-encoded for training.

Rewards are other people's code: they hang, raise, and return what they should not. So they run in worker processes
unless they say that they need not (`in_process`), and one call can be cut off without harm to the run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trace_lightning.types import Problem, Turn

if TYPE_CHECKING:
    from trace_lightning.tasks.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a reward may look at: text without the special tokens, its length in tokens, and the problem.

    Of a conversation `text` is all of it, what the environment said included, `turns` are its turns, and `num_tokens`
    counts the policy's own tokens.
    """

    text: str
    problem: Problem
    num_tokens: int = 0
    finish_reason: str = "stop"
    turns: Sequence[Turn] = ()


@dataclass(frozen=True)
class Score:
    """A reward value with the reason for it, which `completions.jsonl` shows; a value of None is "not scored"."""

    value: float | None
    reason: str = ""


Value = float | None | Score


@dataclass(frozen=True)
class Failure:
    """A call that gave no score: it raised (`timed_out` False), or took too long."""

    reason: str
    traceback: str = ""
    timed_out: bool = False


class RewardFn(ABC):
    """Scores one completion. Pure in its arguments; may return None for "not scored".

    Attributes:
        name: the key under which the reward is logged (`rewards/<name>/mean`); it defaults to the class name.
        in_process: True runs it inside the training process, without a time limit. For a few lines that cannot hang or
            crash; everything else runs in a worker.
        time_limit: seconds for one call; None takes `rollout.reward_time_limit`.
        counts_turns: True says that the rewards of turns are part of this one.
    """

    name: str
    in_process: bool = False
    time_limit: float | None = None
    counts_turns: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def __call__(self, completion: str, problem: Problem) -> Value | Awaitable[Value]:
        """The reward of one completion (text without the special tokens); an `async def` is awaited."""

    def prepare(self) -> None:  # noqa: B027  most have nothing to prepare
        """Called once where the reward runs, before its first call: imports and models, which no call should pay."""

    def score(self, sample: Sample) -> Value | Awaitable[Value]:
        """The same with all there is to know. Override it, and `__call__`, where length or finish reason matter."""
        return self(sample.text, sample.problem)


class FunctionReward(RewardFn):
    """A plain or `async` function as a RewardFn, named after it. A config names the function itself.

    Args:
        function: `(completion, problem) -> float | None`.
    """

    def __init__(self, function: Callable[[str, Problem], Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, completion: str, problem: Problem) -> Any:
        return self.function(completion, problem)


class BatchReward(RewardFn):
    """Scores the completions of a whole rollout in one call: a reward model, or a function written for TRL.

    Subclass it and write `score_batch`; `BatchFunctionReward` takes a function.
    """

    @abstractmethod
    def score_batch(self, samples: Sequence[Sample]) -> Sequence[Value]:
        """One value per sample, in their order."""

    def __call__(self, completion: str, problem: Problem) -> Value:
        return self.score_batch([Sample(text=completion, problem=problem)])[0]


class BatchFunctionReward(BatchReward):
    """A function over lists under the names that TRL gives them, as a reward.

    It is called with `prompts`, `completions` and `answer`, and with a list for every key of the problems' `info`:
    `def reward(prompts, completions, **columns) -> list[float | None]`. Completions are texts.

    Args:
        function: the function, in a config by its import path.
        time_limit: seconds for the call with all completions; None takes `rollout.reward_time_limit`.
    """

    def __init__(self, function: Callable[..., Sequence[float | None]], time_limit: float | None = None) -> None:
        self.function, self.time_limit = function, time_limit
        self.name = getattr(function, "__name__", type(function).__name__)

    def score_batch(self, samples: Sequence[Sample]) -> Sequence[Value]:
        problems = [sample.problem for sample in samples]
        keys = {key for problem in problems for key in problem.info}
        columns: dict[str, Any] = {key: [problem.info.get(key) for problem in problems] for key in keys}
        columns |= {"prompts": [problem.prompt for problem in problems], "answer": [p.answer for p in problems]}
        return self.function(completions=[sample.text for sample in samples], **columns)


def checked_score(name: str, row: int, returned: Any) -> Score:
    """What a reward function returned, as a score; NaN becomes None.

    Raises:
        ValueError: neither a finite number nor None. The message names the reward and the row.
    """
    score = returned if isinstance(returned, Score) else Score(returned)
    value = score.value
    if value is None:
        return score
    where = f"reward {name!r}, row {row}: returned"
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        size = f" of {len(value)}" if hasattr(value, "__len__") else ""
        raise ValueError(f"{where} a {type(value).__name__}{size}; one number is expected, or None for not scored")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # arrays with several elements; torch raises the last
        raise ValueError(f"{where} {type(value).__name__}, which is not one number: {error}") from error
    if math.isinf(number):
        raise ValueError(f"{where} {number}; an infinite reward would make every advantage of its group NaN")
    return Score(None if math.isnan(number) else number, score.reason)


class Task(ABC):
    """A set of problems, split by question into training and held-out, and the rewards that score them.

    A task whose answers are conversations overrides `environment` as well.

    Attributes:
        environments_in_process: True runs environments inside the training process, without a time limit. For a few
            lines that cannot hang or crash; all others get a process each.
        observation_role: under chat templates, the role of the message in which an observation comes.
    """

    environments_in_process: bool = False
    observation_role: Literal["user", "tool", "system"] = "user"

    @abstractmethod
    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on, in a deterministic order."""

    @abstractmethod
    def heldout_problems(self) -> Sequence[Problem]:
        """Problems never trained on; may be empty."""

    @abstractmethod
    def rewards(self) -> Sequence[RewardFn]:
        """The reward functions of the task; their weighted sum is the reward. Names must differ."""

    def environment(self, problem: Problem) -> Environment | None:
        """The other side of a new conversation about `problem`; None: the answer is a single turn."""
        return None

    @property
    def has_environments(self) -> bool:
        """Whether answers may be conversations."""
        return type(self).environment is not Task.environment
