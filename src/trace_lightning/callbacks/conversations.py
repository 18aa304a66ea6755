"""The conversations of a run: which batch talks to which task's environments. A part of the Rollout callback."""

from __future__ import annotations

from itertools import chain
from typing import Any

import lightning.pytorch as pl

from trace_lightning.module import PolicyModule
from trace_lightning.rollout.base import RolloutEngine
from trace_lightning.rollout.conversation import Conversations
from trace_lightning.tasks.base import Task
from trace_lightning.types import RolloutBatch, TurnLimits


def task_of(trainer: pl.Trainer) -> Task | None:
    """The task of the data module; None: prompts come from elsewhere."""
    task: Task | None = getattr(getattr(trainer, "datamodule", None), "task", None)
    return task


def stop_if_all_failed(batch: RolloutBatch) -> None:
    """Called once per training rollout.

    Raises:
        ValueError: if every environment of the rollout failed.
    """
    errors = [completion.error for completion in batch.completions]
    if errors and all(errors):
        raise ValueError(f"all {len(errors)} environments of this rollout failed; the last one: {errors[-1]}")


class TaskConversations:
    """`Conversations` of the run's task and of held-out sets with tasks of their own, where they have environments.

    Args:
        limits: as the user set them; None takes the defaults.
    """

    def __init__(self, limits: TurnLimits | None) -> None:
        self.limits = limits
        self._by_task: dict[int, Conversations] = {}  # by the id of the task, which need not be hashable
        self._task: Task | None = None

    def setup(self, trainer: pl.Trainer, module: PolicyModule, engine: RolloutEngine) -> None:
        """Check what can be checked before any long work.

        Raises:
            ValueError: an engine that does not take turns, a chat template that does not append, or limits for nothing.
        """
        data: Any = getattr(trainer, "datamodule", None)
        self._task = task_of(trainer)
        tasks = [self._task, *(getattr(spec, "task", None) for spec in getattr(data, "eval_sets", []))]
        for task in tasks:
            if task is None or not task.has_environments or id(task) in self._by_task:
                continue
            if not engine.takes_turns:
                raise ValueError(
                    f"{type(task).__name__} has environments, and rollout.engine={type(engine).__name__} does not take "
                    "turns with them: use LocalEngine, or a task of single turns"
                )
            variables = getattr(data, "chat_template_kwargs", None)
            talk = Conversations(task, module.tokenizer, self.limits or TurnLimits(), variables)
            problems = chain(task.train_problems(), task.heldout_problems())
            chat = next((problem for problem in problems if not isinstance(problem.prompt, str)), None)
            if chat is not None:
                talk.encode.check(chat)
            self._by_task[id(task)] = talk
        if self.limits is not None and not self._by_task:
            raise ValueError("rollout.turns is set, but no task has environments (Task.environment): set it to null")

    def of(self, batch: RolloutBatch) -> Conversations | None:
        """Those that a batch needs, if any."""
        task = getattr(batch.evaluation, "task", None) or self._task
        return None if task is None else self._by_task.get(id(task))

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Failures of environments so far: `turns/{errors,timeouts}`; nothing without environments."""
        talk = self.of(batch)
        return {} if talk is None else {f"turns/{kind}": float(count) for kind, count in talk.failures.items()}

    def close(self) -> None:
        """End the environments."""
        for talk in self._by_task.values():
            talk.close()
