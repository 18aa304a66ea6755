"""Scoring completions: several reward functions, weighted; an exception is counted and shown, never a silent zero.

Rewards that say so (`in_process`: comparing two strings costs less than sending them) run here, all others in
`tasks.pool`. Without a single one of the latter no process is ever started. A completion that one function could not
score is not scored at all: what the others gave would rank it by less than the completions it is compared with. Nor is
a conversation whose environment failed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trace_lightning.tasks.base import BatchReward, Failure, RewardFn, Sample
from trace_lightning.tasks.calls import Outcome, call, is_async
from trace_lightning.tasks.pool import Call, RewardPool
from trace_lightning.types import Completion, Problem

log = logging.getLogger(__name__)


class Scorer:
    """Applies reward functions to a batch of completions.

    Args:
        rewards: functions with different names.
        weights: one per function; default 1 each.
        num_workers: worker processes; None chooses by the cores there are, 0 runs everything in this process, where
            nothing can be cut off.
        time_limit: seconds per call in a worker, for rewards without a limit of their own.

    Raises:
        ValueError: no function, equal names, a different number of weights, or an argument out of range.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFn],
        weights: Sequence[float] | None = None,
        num_workers: int | None = None,
        time_limit: float = 10.0,
    ) -> None:
        self.names = [reward.name for reward in rewards]
        if not rewards:
            raise ValueError("no reward function was given: a policy cannot learn from nothing")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"reward names must differ, got {', '.join(self.names)}")
        if weights is not None and len(weights) != len(rewards):
            raise ValueError(
                f"{len(weights)} reward_weights for {len(rewards)} reward functions ({', '.join(self.names)})"
            )
        self.rewards, self.weights = list(rewards), list(weights or [1.0] * len(rewards))
        self.errors: Counter[str] = Counter()  # by reward name, over the whole run
        self.timeouts: Counter[str] = Counter()
        here = [reward.in_process or num_workers == 0 for reward in rewards]
        for reward, inside in zip(rewards, here, strict=True):
            if inside and is_async(reward):
                raise ValueError(
                    f"reward {reward.name!r} is asynchronous and needs a worker: set rollout.reward_workers above 0, "
                    "and not in_process"
                )
        self._here = [reward for reward, inside in zip(rewards, here, strict=True) if inside]
        apart = [reward for reward, inside in zip(rewards, here, strict=True) if not inside]
        self.pool = RewardPool(apart, num_workers or None, time_limit) if apart else None
        self._prepared = False
        self._failed_calls = self._calls = 0
        self._last_error = ""

    def __call__(
        self,
        completions: Sequence[Completion],
        problems: Sequence[Problem],
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, dict[str, list[float]], dict[str, list[str]]]:
        """Score a rollout. `check` is called between the calls, at least once per second; what it raises ends them.

        Returns:
            Weighted rewards FP32 [B], NaN where a function gave none or failed; the raw values and the reasons by name.

        Raises:
            ValueError: a function returned something that is no reward.
        """
        samples = [
            Sample(text=c.text, problem=p, num_tokens=c.num_drawn, finish_reason=c.finish_reason, turns=c.turns)
            for c, p in zip(completions, problems, strict=True)
            if not c.error
        ]
        outcomes = {reward.name: self._run_here(reward, samples, check) for reward in self._here}
        if self.pool is not None:
            outcomes |= self._run_apart(self.pool, samples, check)
        self._failed_calls = self._calls = 0
        by_name, reasons = {}, {}
        for name in self.names:
            values = [self._value(name, *pair) for pair in zip(samples, outcomes[name], strict=True)]
            found = iter(zip(values, [outcome.reason for outcome in outcomes[name]], strict=True))
            pairs = [(math.nan, c.error) if c.error else next(found) for c in completions]
            by_name[name], reasons[name] = [value for value, _ in pairs], [reason for _, reason in pairs]
        columns = torch.tensor([by_name[name] for name in self.names], dtype=torch.float32)
        return (columns * torch.tensor(self.weights).unsqueeze(1)).sum(0), by_name, reasons

    def _run_here(self, reward: RewardFn, samples: Sequence[Sample], check: Callable[[], None]) -> list[Outcome]:
        if not self._prepared:
            for own in self._here:
                own.prepare()
            self._prepared = True
        outcomes: list[Outcome] = []
        for first, part in _parts(reward, samples):
            check()
            outcomes += call(reward, part, first)
        return outcomes

    def _run_apart(
        self, pool: RewardPool, samples: Sequence[Sample], check: Callable[[], None]
    ) -> dict[str, list[Outcome]]:
        calls = [
            Call(index, part, first)
            for index, reward in enumerate(pool.rewards)
            for first, part in _parts(reward, samples)
        ]
        found: dict[str, list[Outcome]] = {reward.name: [] for reward in pool.rewards}
        for made, outcomes in zip(calls, pool.run(calls, check), strict=True):
            found[pool.rewards[made.reward].name] += outcomes
        return found

    def _value(self, name: str, sample: Sample, outcome: Outcome) -> float:
        self._calls += 1
        if not isinstance(outcome, Failure):
            return math.nan if outcome.value is None else float(outcome.value)
        self._failed_calls += 1
        counter = self.timeouts if outcome.timed_out else self.errors
        counter[name] += 1
        self._last_error = f"{name} {outcome.reason}"
        if counter[name] == 1:
            log.warning(
                "%s on %r; the completion is not scored\n%s", self._last_error, sample.text[:80], outcome.traceback
            )
        return math.nan

    def metrics(self) -> dict[str, float]:
        """Failures so far, of every reward, so that ranks can add them up: `rewards/<name>/{errors,timeouts}`."""
        kinds = {"errors": self.errors, "timeouts": self.timeouts}
        return {f"rewards/{name}/{kind}": float(counts[name]) for kind, counts in kinds.items() for name in self.names}

    def close(self) -> None:
        """End the worker processes; scoring again starts new ones."""
        if self.pool is not None:
            self.pool.close()

    def stop_if_all_failed(self) -> None:
        """Called once per training rollout.

        Raises:
            ValueError: if every reward call of the rollout failed.
        """
        if self._calls and self._failed_calls == self._calls:
            raise ValueError(f"all {self._calls} reward calls of this rollout failed; the last one: {self._last_error}")


def _parts(reward: RewardFn, samples: Sequence[Sample]) -> list[tuple[int, list[Sample]]]:
    """First row and samples of each call: one at a time, or all at once for a `BatchReward`."""
    if isinstance(reward, BatchReward):
        return [(0, list(samples))] if samples else []
    return [(row, [sample]) for row, sample in enumerate(samples)]
