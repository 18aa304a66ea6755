"""From rewards to advantages: how much better an answer is than its siblings of the same prompt.

Two readings of "std" and three kinds of bad reward cause most surprises here, so they are settled once:

  * A reward of NaN means "not scored". It counts neither in the mean nor in the std, and its advantage is 0.
  * A group with fewer than two scored answers, or with all scores equal, has nothing to compare: advantages are 0.
  * Whether a group has zero variance is a property of that group, also where the scale is the batch's std.

    GroupAdvantage    (R - mean of the group) / std of the group, of the batch, or 1      GRPO, Dr. GRPO
    LeaveOneOut       R - mean of the others in the group                                 RLOO
    BatchAdvantage    (R - mean of the batch, or of the group) / std of what is left      REINFORCE++ (-baseline)

A batch is the rollout of all ranks. With token-level means in the loss, REINFORCE++ may also be read as statistics over
tokens, in which long answers count more; here every answer counts once.

    P prompts    G answers per prompt (`rollout.num_generations`)
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class AdvantageEstimator(ABC):
    """Maps rewards to advantages of the same shape. A plain ABC so that configs can name any subclass."""

    @property
    def within_groups(self) -> bool:
        """Whether answers are compared within their group alone, so that groups of equal rewards teach nothing."""
        return True

    @abstractmethod
    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages [prompts, group] FP32 from rewards [prompts, group]; NaN rewards get advantage 0."""


@dataclass(frozen=True)
class GroupAdvantage(AdvantageEstimator):
    """`(R - mean of the group) / (std + eps)`, the advantage of GRPO (arXiv 2402.03300), with TRL's n - 1 std.

    Args:
        scale: `group`, the std of each group (GRPO); `batch`, the std of all scored rewards in the call (arXiv
            2508.08221); `none`, no division (Dr. GRPO, arXiv 2503.20783). With `batch` and several ranks, pass the
            gathered rewards, or the scale differs between ranks.
        eps: added to the std; TRL's value.
    """

    scale: Literal["group", "batch", "none"] = "group"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if self.scale not in ("group", "batch", "none"):
            raise ValueError(f"advantages.scale={self.scale!r}: expected group, batch or none")
        if self.eps < 0:
            raise ValueError(f"advantages.eps={self.eps} must be >= 0")

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages [P, G] FP32.

        Raises:
            ValueError: rewards that are not [prompts, group], a group of one, or an infinite reward.
        """
        _check(rewards_PG)
        rewards_PG = rewards_PG.float()
        _warn_unscored(rewards_PG)
        mean_P, std_P, _ = group_statistics(rewards_PG)
        advantages_PG = rewards_PG - mean_P[:, None]
        if self.scale == "group":
            advantages_PG = advantages_PG / (std_P[:, None] + self.eps)
        elif self.scale == "batch":
            _, std_1, _ = group_statistics(rewards_PG.reshape(1, -1))
            advantages_PG = advantages_PG / (std_1 + self.eps)
        silent_PG = rewards_PG.isnan() | zero_variance_groups(rewards_PG)[:, None]
        return advantages_PG.masked_fill(silent_PG, 0.0)


@dataclass(frozen=True)
class LeaveOneOut(AdvantageEstimator):
    """`R - mean of the other scored answers to the same prompt` (RLOO, arXiv 2402.14740): an unbiased baseline.

    Equal to `GroupAdvantage(scale=none)` times n / (n - 1), n the scored answers of the group.
    """

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages [P, G] FP32.

        Raises:
            ValueError: as `GroupAdvantage`.
        """
        centred_PG = GroupAdvantage(scale="none")(rewards_PG)
        _, _, count_P = group_statistics(rewards_PG)
        return centred_PG * (count_P / (count_P - 1).clamp(min=1))[:, None]


@dataclass(frozen=True)
class BatchAdvantage(AdvantageEstimator):
    """Normalised over the batch: the advantage of REINFORCE++ (arXiv 2501.03262).

    Args:
        center: what is subtracted: the mean of the `batch` (REINFORCE++; works with one answer per prompt, and
            rewards easy prompts over hard ones) or of the `group` (REINFORCE++-baseline; groups of equal rewards then
            teach nothing).
        eps: added to the std of what is left, against a division by 0.
    """

    center: Literal["batch", "group"] = "batch"
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.center not in ("batch", "group"):
            raise ValueError(f"advantages.center={self.center!r}: expected batch or group")
        if self.eps < 0:
            raise ValueError(f"advantages.eps={self.eps} must be >= 0")

    @property
    def within_groups(self) -> bool:
        """Not where the mean of the batch is subtracted."""
        return self.center == "group"

    def __call__(self, rewards_PG: Tensor) -> Tensor:
        """Advantages [P, G] FP32; all 0 where fewer than two rewards of the batch are scored, or all are equal.

        Raises:
            ValueError: as `GroupAdvantage`, but for a group of one with `center=batch`.
        """
        _check(rewards_PG, smallest_group=1 if self.center == "batch" else 2)
        rewards_PG = rewards_PG.float()
        _warn_unscored(rewards_PG)
        groups = rewards_PG.reshape(1, -1) if self.center == "batch" else rewards_PG
        mean, _, _ = group_statistics(groups)
        silent = groups.isnan() | zero_variance_groups(groups)[:, None]
        # A lone score would be centred on itself: it is left out of the std as well.
        centred = (groups - mean[:, None]).masked_fill(groups.isnan() | (_scores(groups) < 2), torch.nan)
        _, std_1, _ = group_statistics(centred.reshape(1, -1))
        return (centred / (std_1 + self.eps)).masked_fill(silent, 0.0).view_as(rewards_PG)


def group_statistics(rewards_PG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std (n - 1) and number of the scored (not NaN) rewards of each group.

    Returns:
        `mean_P` FP32, NaN without scores; `std_P` FP32, NaN below two scores; `count_P` int64.
    """
    scored_PG = ~rewards_PG.isnan()
    count_P = scored_PG.sum(dim=-1)
    mean_P = rewards_PG.float().nanmean(dim=-1)
    squares_PG = (rewards_PG.float() - mean_P[:, None]).square()
    variance_P = squares_PG.nansum(dim=-1) / (count_P - 1)
    return mean_P, torch.where(count_P > 1, variance_P, torch.nan).sqrt(), count_P


def zero_variance_groups(rewards_PG: Tensor) -> Tensor:
    """Which groups teach nothing: all scored rewards equal, or fewer than two scored. Bool [P].

    Compared by range, not by std: the std of n equal rewards may come out as 1e-8 instead of 0.
    """
    unscored_PG = rewards_PG.isnan()
    highest_P = rewards_PG.masked_fill(unscored_PG, -torch.inf).amax(dim=-1)
    lowest_P = rewards_PG.masked_fill(unscored_PG, torch.inf).amin(dim=-1)
    return highest_P <= lowest_P  # without any score: -inf <= inf


def _scores(rewards_PG: Tensor) -> Tensor:
    """Scored rewards of each group [P, 1]."""
    return (~rewards_PG.isnan()).sum(dim=-1, keepdim=True)


def _warn_unscored(rewards_PG: Tensor) -> None:
    if rewards_PG.isnan().any():
        warnings.warn("some completions were not scored (NaN reward) and are left out of learning", stacklevel=3)


def _check(rewards_PG: Tensor, smallest_group: int = 2) -> None:
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards of shape {tuple(rewards_PG.shape)}: expected [prompts, group]")
    if rewards_PG.shape[1] < smallest_group:
        raise ValueError(
            f"groups of {rewards_PG.shape[1]}: this advantage compares answers to the same prompt. Set "
            "rollout.num_generations to 2 or more, or take BatchAdvantage, which compares over the batch."
        )
    if rewards_PG.isinf().any():
        raise ValueError("a reward is infinite; return a finite number, or None for a completion that was not scored")
