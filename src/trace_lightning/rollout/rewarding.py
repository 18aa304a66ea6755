"""Scoring completions: several reward functions, weighted; an exception is counted and shown, never a silent zero."""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from trace_lightning.tasks.base import RewardFn
from trace_lightning.types import Problem

log = logging.getLogger(__name__)


class Scorer:
    """Applies reward functions to a batch of completions.

    Args:
        rewards: functions with different names.
        weights: one per function; default 1 each.

    Raises:
        ValueError: no function, equal names, or a different number of weights.
    """

    def __init__(self, rewards: Sequence[RewardFn], weights: Sequence[float] | None = None) -> None:
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
        self._failed_calls = self._calls = 0
        self._last_error = ""

    def __call__(
        self, completions: Sequence[str], problems: Sequence[Problem]
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """Weighted rewards FP32 [B] and the raw values by name; NaN where a function gave none or raised."""
        self._failed_calls = self._calls = 0
        by_name = {
            reward.name: [
                self._call(reward, text, problem) for text, problem in zip(completions, problems, strict=True)
            ]
            for reward in self.rewards
        }
        columns = torch.tensor([by_name[name] for name in self.names], dtype=torch.float32)
        return (columns * torch.tensor(self.weights).unsqueeze(1)).sum(0), by_name

    def _call(self, reward: RewardFn, completion: str, problem: Problem) -> float:
        self._calls += 1
        try:
            value = reward(completion, problem)
        except Exception as error:
            self._failed_calls += 1
            self.errors[reward.name] += 1
            self._last_error = f"{reward.name} raised {type(error).__name__}: {error}"
            if self.errors[reward.name] == 1:
                log.warning(
                    "%s on %r; the completion is not scored\n%s",
                    self._last_error,
                    completion[:80],
                    traceback.format_exc(),
                )
            return math.nan
        return math.nan if value is None else float(value)

    def stop_if_all_failed(self) -> None:
        """Called once per training rollout.

        Raises:
            ValueError: if every reward call of the rollout raised.
        """
        if self._calls and self._failed_calls == self._calls:
            raise ValueError(f"all {self._calls} reward calls of this rollout failed; the last one: {self._last_error}")
