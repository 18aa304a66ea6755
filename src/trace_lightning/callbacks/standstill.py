"""`Standstill`: says once that the rewards of a run teach hardly anything, unless it is because all answers are right.

Where answers are compared within their group, a group whose answers all have the same reward gives no gradient. A
policy that does the same thing every time fills a run with such groups, long before it does the right thing: a reward
that can be had in part without the task, or answers that are all wrong alike. Every other number looks healthy then,
the gap of trainer and rollout most of all. Nothing is said of other advantages, nor, of the last 50 rollouts,

    below 90 % of groups alike                   there is something to learn from
    second half .02 above the first              it is being learned
    mean reward within .05 of 1                  where most rewards end: it has been learned

What was left out: a threshold for the entropy, since answers that differ and are all worth 0 teach as little; and the
window in the checkpoint: a resumed run says it again after 50 rollouts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import fmean

from torch import Tensor

log = logging.getLogger(__name__)
_ROLLOUTS = 50
_ALIKE, _RISE = 0.9, 0.02
_LEARNED, _MARGIN = 1.0, 0.05


class Standstill:
    """Watches the metrics of one rollout after the other."""

    def __init__(self) -> None:
        self._alike: deque[float] = deque(maxlen=_ROLLOUTS)
        self._rewards: deque[float] = deque(maxlen=_ROLLOUTS)
        self._said = False

    def observe(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Take note of a rollout's `frac_reward_zero_std` and `reward`; without any score there is no reward."""
        if self._said or "reward" not in metrics:
            return
        self._alike.append(float(metrics["frac_reward_zero_std"]))
        self._rewards.append(float(metrics["reward"]))
        if not self._stands_still():
            return
        self._said = True
        log.warning(
            "hardly anything to learn from: in %.0f %% of the groups of the last %d rollouts all answers had the same "
            "reward, and the mean reward stays at %.3f. If it goes no higher, the run is done. If it does, read the "
            "answers (completions.jsonl): the reward may be had without doing the task, or all answers are wrong "
            "alike. Then take a reward that tells them apart, easier prompts or rollout.dynamic_sampling, or start "
            "again with a lower model.learning_rate or a higher rollout.sampling.temperature.",
            *(100 * fmean(self._alike), _ROLLOUTS, fmean(self._rewards)),
        )

    def _stands_still(self) -> bool:
        if len(self._rewards) < _ROLLOUTS or fmean(self._alike) < _ALIKE:
            return False
        rewards, half = list(self._rewards), _ROLLOUTS // 2
        rising = fmean(rewards[half:]) - fmean(rewards[:half]) >= _RISE
        return not rising and abs(fmean(rewards) - _LEARNED) >= _MARGIN
