"""The scorers of a run: its own, and those of held-out sets with tasks of their own. A part of the Rollout callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trace_lightning.rollout.rewarding import Scorer
from trace_lightning.tasks.base import FunctionReward, RewardFn, Task
from trace_lightning.tasks.rewards import with_turn_rewards
from trace_lightning.types import Problem, RolloutBatch

Reward = RewardFn | Callable[[str, Problem], float | None]


class Scorers:
    """Made when the task is known; every `Scorer` has worker processes of its own.

    Args:
        rewards: classes or functions; None takes the task's.
        weights: one per reward; None weighs all alike.
        workers: processes for the functions, see `Rollout`.
        time_limit: seconds per call.
    """

    def __init__(
        self, rewards: Sequence[Reward] | None, weights: list[float] | None, workers: int | None, time_limit: float
    ) -> None:
        self.rewards, self.weights, self.workers, self.time_limit = rewards, weights, workers, time_limit
        self._own: Scorer | None = None
        self._others: dict[str, Scorer] = {}  # by the name of their held-out set

    @property
    def own(self) -> Scorer:
        """That of the run."""
        assert self._own is not None, "call setup first"
        return self._own

    def setup(self, task: Task | None) -> None:
        """Make the run's scorer, once.

        Raises:
            ValueError: neither rewards nor a task.
        """
        if self._own is not None:
            return
        given: Sequence[Reward] | None = self.rewards
        if given is None:
            if task is None:
                raise ValueError("no reward function: pass rollout.rewards, or a data module with a task")
            given = task.rewards()
        functions = [reward if isinstance(reward, RewardFn) else FunctionReward(reward) for reward in given]
        self._own = self._make(functions, self.weights, task)

    def of(self, batch: RolloutBatch) -> Scorer:
        """The scorer that judges a batch."""
        task = getattr(batch.evaluation, "task", None)
        if batch.evaluation is None or task is None:
            return self.own
        name = batch.evaluation.name
        if name not in self._others:
            self._others[name] = self._make(task.rewards(), None, task)
        return self._others[name]

    def _make(self, rewards: Sequence[RewardFn], weights: list[float] | None, task: Task | None) -> Scorer:
        everything = with_turn_rewards(rewards, task)
        if weights is not None and len(weights) == len(rewards):
            weights = weights + [1.0] * (len(everything) - len(rewards))
        return Scorer(everything, weights, self.workers, self.time_limit)

    def close(self) -> None:
        """End the workers."""
        for scorer in (self._own, *self._others.values()):
            if scorer is not None:
                scorer.close()
