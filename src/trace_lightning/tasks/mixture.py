"""Several tasks as one: their problems side by side, each scored by the rewards of its own task.

A problem knows where it comes from (`problem.info["source"]`), which is what `data.order` weighs and what a curriculum
counts. A question that one task holds out is not trained on in another: levels of difficulty share questions.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from itertools import chain, zip_longest

from trace_lightning.tasks.base import BatchReward, RewardFn, Sample, Score, Task
from trace_lightning.tasks.calls import is_async
from trace_lightning.tasks.environment import Environment
from trace_lightning.tasks.rewards import with_turn_rewards
from trace_lightning.types import Problem

log = logging.getLogger(__name__)
SOURCE = "source"


class SourceReward(RewardFn):
    """The sum of the rewards of the task that a problem comes from; not scored if one of them gives none.

    Args:
        rewards: rewards by source.

    Raises:
        ValueError: an asynchronous reward or one for whole batches, which a sum per completion cannot take.
    """

    name = "source_reward"
    counts_turns = True  # `Mixture` gives each source those of its turns

    def __init__(self, rewards: dict[str, Sequence[RewardFn]]) -> None:
        self.rewards = {source: list(own) for source, own in rewards.items()}
        every = list(chain(*self.rewards.values()))
        for reward in every:
            if is_async(reward) or isinstance(reward, BatchReward):
                raise ValueError(
                    f"Mixture: reward {reward.name!r} is asynchronous or takes whole batches; give it in "
                    "rollout.rewards instead"
                )
        self.in_process = all(reward.in_process for reward in every)
        limits = [reward.time_limit for reward in every if reward.time_limit is not None]
        self.time_limit = sum(limits) if limits else None

    def prepare(self) -> None:
        """Prepare the rewards of all sources."""
        for reward in chain(*self.rewards.values()):
            reward.prepare()

    def __call__(self, completion: str, problem: Problem) -> Score:
        return self.score(Sample(text=completion, problem=problem))

    def score(self, sample: Sample) -> Score:
        total, reasons = 0.0, []
        for reward in self.rewards[sample.problem.info[SOURCE]]:
            returned = reward.score(sample)
            score = returned if isinstance(returned, Score) else Score(returned)  # type: ignore[arg-type]
            if score.reason:
                reasons.append(score.reason)
            if score.value is None:
                return Score(None, "; ".join(reasons))
            total += score.value
        return Score(total, "; ".join(reasons))


class Mixture(Task):
    """Problems of several tasks.

    Args:
        tasks: tasks by the name under which they are counted and logged.

    Raises:
        ValueError: no task, one whose training questions are all held out by others, or different observation roles.
    """

    def __init__(self, tasks: dict[str, Task]) -> None:
        if not tasks:
            raise ValueError("Mixture: tasks is empty")
        self._tasks = tasks
        self._reward = SourceReward({name: with_turn_rewards(task.rewards(), task) for name, task in tasks.items()})
        talking = [task for task in tasks.values() if task.has_environments]
        self.environments_in_process = all(task.environments_in_process for task in talking)
        roles = {task.observation_role for task in talking}
        if len(roles) > 1:
            raise ValueError(
                f"Mixture: observations come in different roles ({', '.join(sorted(roles))}), one is needed"
            )
        self.observation_role = roles.pop() if roles else "user"
        heldout = {name: _marked(name, task.heldout_problems()) for name, task in tasks.items()}
        asked = {str(problem.prompt) for own in heldout.values() for problem in own}
        self._train: list[Problem] = []
        for name, task in tasks.items():
            own = _marked(name, task.train_problems())
            kept = [problem for problem in own if str(problem.prompt) not in asked]
            if not kept:
                raise ValueError(f"Mixture: all {len(own)} training questions of {name!r} are held out by other tasks")
            if len(kept) < len(own):
                log.info("Mixture: %d of %d questions of %s are held out", len(own) - len(kept), len(own), name)
            self._train += kept
        turns = zip_longest(*heldout.values())  # so that the first n are a fair sample of all tasks
        self._heldout = [problem for turn in turns for problem in turn if problem is not None]

    def train_problems(self) -> Sequence[Problem]:
        """Problems of all tasks, task by task."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Held-out problems of all tasks, in turn."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """One reward, which asks those of the problem's task."""
        return [self._reward]

    def environment(self, problem: Problem) -> Environment | None:
        """That of the problem's task, if it has any."""
        return self._tasks[problem.info[SOURCE]].environment(problem)

    @property
    def has_environments(self) -> bool:
        """Whether any of the tasks has."""
        return any(task.has_environments for task in self._tasks.values())


def _marked(source: str, problems: Sequence[Problem]) -> list[Problem]:
    return [dataclasses.replace(problem, info=problem.info | {SOURCE: source}) for problem in problems]
