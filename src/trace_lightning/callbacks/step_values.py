"""What a training step logs of its rollout: rewards, completions, throughput, turns, and counts over all ranks.

The metrics are attributes of the module, or Lightning would refuse to log them; their states stay out of its
`state_dict`. Counts are summed over the ranks; of refills the mean is taken, for a rank may have had none to draw. A
part of the Rollout callback; what the optimizer steps measure is `metrics.StepMetrics`.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from trace_lightning.metrics import CompletionMetrics, RewardMetrics, ThroughputMetrics, TurnMetrics
from trace_lightning.metrics.tally import RankMeans
from trace_lightning.metrics.together import compute_together
from trace_lightning.module import PolicyModule
from trace_lightning.types import RolloutBatch

_NAMES = ("reward_metrics", "completion_metrics", "throughput_metrics", "turn_metrics")


class StepValues:
    """The values of one step after the other.

    Args:
        ahead: whether batches are drawn ahead, so that the phases of a step overlap.
        refills: whether groups are drawn again (dynamic sampling).
    """

    def __init__(self, *, ahead: bool, refills: bool) -> None:
        self.ahead, self.refills = ahead, refills

    def attach(self, module: PolicyModule, reward_names: list[str]) -> None:
        """Put the metrics on the module."""
        module.reward_metrics = RewardMetrics(reward_names)
        module.completion_metrics, module.throughput_metrics = CompletionMetrics(), ThroughputMetrics()
        module.turn_metrics = TurnMetrics()

    def of(
        self, trainer: pl.Trainer, module: PolicyModule, batch: RolloutBatch, failures: dict[str, float]
    ) -> dict[str, Any]:
        """What to log of a batch that was trained on; `failures` are those of rewards and environments so far."""
        assert batch.rewards_B is not None
        metrics: list[Any] = [getattr(module, name) for name in _NAMES]
        metrics[0].update(batch.rewards_B.view(-1, batch.num_generations).to(module.device), batch.rewards_by_name)
        lengths = torch.tensor([c.num_drawn for c in batch.completions], device=module.device)
        ended = torch.tensor([c.finish_reason == "stop" for c in batch.completions], device=module.device)
        metrics[1].update(lengths, ended)
        metrics[3].update(batch.completions, batch.stats)
        drawn = int(lengths.sum()) + int(batch.stats.get("dynamic_sampling/dropped_tokens", 0))
        metrics[2].update(drawn, **self._seconds(batch))
        values: dict[str, Any] = {}
        for metric, found in zip(metrics, compute_together(metrics), strict=True):
            values |= found
            metric.reset()
        values |= self._counts(trainer, batch, drawn, failures)
        observe = getattr(getattr(trainer, "datamodule", None), "observe", None)  # of a PromptDataModule
        if observe is not None:
            values |= observe(batch)
        values["policy_version"] = float(batch.policy_version)
        if self.ahead:
            values["rollout/version_diff"] = batch.stats["version_diff"]
        return values

    def _seconds(self, batch: RolloutBatch) -> dict[str, float]:
        seconds = {f"{name}_seconds": batch.seconds[name] for name in ("rollout", "reward", "train", "sync")}
        if self.ahead:  # the phases overlap
            seconds["rollout_wait_seconds"] = batch.seconds["rollout_wait"]
            seconds["step_seconds"] = sum(batch.seconds[name] for name in ("rollout_wait", "sync", "train"))
        return seconds

    def _counts(
        self, trainer: pl.Trainer, batch: RolloutBatch, num_tokens: int, failures: dict[str, float]
    ) -> dict[str, float]:
        """Counts of this step, and of the run for failed rewards, over all ranks; of refills the mean over ranks."""
        own = {"num_tokens": float(num_tokens), "rollout/preempted": float(batch.stats.get("preempted", 0))}
        own |= failures
        mine = torch.tensor(list(own.values()), dtype=torch.float64, device=trainer.strategy.root_device)
        total = trainer.strategy.reduce(mine, reduce_op="sum")
        counts = dict(zip(own, map(float, total.tolist()), strict=True))
        if "preempted" not in batch.stats:
            del counts["rollout/preempted"]
        if self.refills:
            refills = RankMeans()
            for name, value in batch.stats.items():
                refills.add(name, value, name.startswith("dynamic_sampling/"))
            counts |= refills.compute()
        return {name: count for name, count in counts.items() if count or not name.startswith("rewards/")}
