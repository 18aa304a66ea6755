"""Reward statistics per rollout, under TRL's names.

`reward_std` is the mean of the groups' stds, not the std of all rewards: it says how much there is to compare within a
prompt, whereas the overall std mostly says how unlike the prompts are. Rewards of NaN (not scored) count nowhere but in
`rewards/unscored_share`. Names of the reward functions are fixed at construction, because ranks merge their states by
position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from trace_lightning.metrics.functional import masked_sum, merge_moments, moments
from trace_lightning.rl.advantages import group_statistics, zero_variance_groups


class RewardMetrics(Metric):
    """Mean reward, spread within groups, and mean and std of each reward function.

    Args:
        names: the reward functions whose values `update` will bring, in any fixed order.

    Raises:
        ValueError: a name that occurs twice.
    """

    full_state_update = False
    reward_sum: Tensor
    num_scored: Tensor
    num_rewards: Tensor
    std_sum: Tensor
    num_stds: Tensor
    num_flat: Tensor
    num_groups: Tensor
    moments_by_name: Tensor

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__()
        if len(set(names)) < len(names):
            raise ValueError(f"reward names must differ, got {', '.join(names)}")
        self.names = tuple(names)
        for state in ("reward_sum", "std_sum"):
            self.add_state(state, torch.tensor(0.0), dist_reduce_fx="sum")
        for state in ("num_scored", "num_rewards", "num_stds", "num_flat", "num_groups"):
            self.add_state(state, torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("moments_by_name", torch.zeros(len(names), 3), dist_reduce_fx=merge_moments)

    def update(self, rewards_PG: Tensor, rewards_by_name: Mapping[str, Sequence[float] | Tensor] | None = None) -> None:
        """Add the rewards of one rollout.

        Args:
            rewards_PG: [prompts, group], NaN where not scored.
            rewards_by_name: unweighted values of each reward function, one per completion, NaN where not scored.

        Raises:
            ValueError: names other than those of the constructor.
        """
        _, std_P, count_P = group_statistics(rewards_PG)
        scored_PG = ~rewards_PG.isnan()
        self.reward_sum += masked_sum(rewards_PG, scored_PG)
        self.num_scored += scored_PG.sum()
        self.num_rewards += scored_PG.numel()
        self.std_sum += masked_sum(std_P, count_P > 1)
        self.num_stds += (count_P > 1).sum()
        self.num_flat += zero_variance_groups(rewards_PG).sum()
        self.num_groups += len(count_P)
        self._update_names(rewards_by_name or {})

    def _update_names(self, rewards_by_name: Mapping[str, Sequence[float] | Tensor]) -> None:
        if set(rewards_by_name) != set(self.names):
            raise ValueError(f"rewards named {sorted(rewards_by_name)}, but RewardMetrics expects {list(self.names)}")
        if self.names:
            values = [torch.as_tensor(rewards_by_name[name], dtype=torch.float32) for name in self.names]
            new = torch.stack([moments(value.to(self.moments_by_name.device)) for value in values])
            self.moments_by_name = merge_moments(torch.stack([self.moments_by_name, new]))

    def compute(self) -> dict[str, Tensor]:
        """Whatever of these was measured.

        * `reward`: mean over scored completions
        * `reward_std`: mean over groups (two scores or more) of the std within the group, n - 1
        * `frac_reward_zero_std`: share of groups that teach nothing (`rl.zero_variance_groups`)
        * `rewards/unscored_share`: share of completions without a reward
        * `rewards/<name>/mean`, `rewards/<name>/std`: over all scored completions, n - 1
        """
        result: dict[str, Tensor] = {}
        if self.num_scored:
            result["reward"] = self.reward_sum / self.num_scored
        if self.num_stds:
            result["reward_std"] = self.std_sum / self.num_stds
        if self.num_groups:
            result["frac_reward_zero_std"] = self.num_flat / self.num_groups
            result["rewards/unscored_share"] = 1 - self.num_scored / self.num_rewards
        for name, (count, mean, squares) in zip(self.names, self.moments_by_name, strict=True):
            if count > 0:
                result[f"rewards/{name}/mean"] = mean
            if count > 1:
                result[f"rewards/{name}/std"] = (squares / (count - 1)).sqrt()
        return result
