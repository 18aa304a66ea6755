"""From a scored rollout to advantages: length penalty, rewards of all ranks, estimator.

The batch keeps its rewards as they were scored, for the logs; only advantages see the penalty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trace_lightning.rl.advantages import AdvantageEstimator
from trace_lightning.rl.lengths import LengthPenalty
from trace_lightning.rl.losses import SumCount, sum_count
from trace_lightning.types import RolloutBatch


def assign_advantages(
    batch: RolloutBatch,
    estimator: AdvantageEstimator,
    penalty: LengthPenalty | None,
    *,
    gather: Callable[[Tensor], Tensor],
    rank: int,
) -> dict[str, SumCount]:
    """Fill `batch.advantages_B`, on the CPU.

    Args:
        batch: scored.
        estimator: from rewards to advantages.
        penalty: added to the rewards first; None adds nothing.
        gather: [P, G] of this rank to [ranks, P, G]; with one rank it may return its argument. Estimators that look
            over the batch must see all of it, or ranks would scale differently.
        rank: of this process.

    Returns:
        Metric `length_penalty`, the mean term over scored completions, where `gather` puts its result; nothing without
        a penalty.
    """
    assert batch.rewards_B is not None
    rewards_PG = batch.rewards_B.view(-1, batch.num_generations)
    term_PG: Tensor | None = None
    if penalty is not None:
        lengths_PG = torch.tensor([c.num_drawn for c in batch.completions]).view_as(rewards_PG)
        term_PG = penalty(lengths_PG, rewards_PG, batch.max_drawn)
        rewards_PG = rewards_PG + term_PG
    gathered = gather(rewards_PG)
    everyone = gathered.cpu()
    advantages = estimator(everyone.reshape(-1, batch.num_generations)).view_as(everyone)
    own_PG = advantages[rank] if advantages.ndim == 3 else advantages
    batch.advantages_B = own_PG.flatten()
    if term_PG is None:
        return {}
    total, count = sum_count(term_PG, ~rewards_PG.isnan())
    return {"length_penalty": (total.to(gathered.device), count.to(gathered.device))}
