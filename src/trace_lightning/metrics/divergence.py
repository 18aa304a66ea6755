"""How far the trainer's policy and the rollout's policy are apart: the first number to look at in FP4 RL.

The formulas live in `functional.divergence_metrics`; this class only declares how their sums merge over micro-batches
and ranks. Sequence-level products are left out: they grow with length and say more about it than about the gap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric

from trace_lightning.metrics.functional import (
    DIVERGENCE_STATES,
    divergence_metrics,
    divergence_sums,
    neutral_state,
)

_MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class DivergenceMetrics(Metric):
    """Token-level mismatch of trainer and rollout, exact under any split of the tokens."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name, (reduction, _) in DIVERGENCE_STATES.items():
            self.add_state(name, neutral_state(name), dist_reduce_fx=reduction)

    def update(self, policy_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
        """Add FP32 log-probs [B, T] of both sides under a bool mask.

        Raises:
            ValueError: shapes that differ.
        """
        for name, value in divergence_sums(policy_logprobs, rollout_logprobs, mask).items():
            setattr(self, name, _MERGE[DIVERGENCE_STATES[name][0]](getattr(self, name), value))

    def compute(self) -> dict[str, Tensor]:
        """The metrics named in `functional.divergence_metrics`; empty if no token was seen."""
        return divergence_metrics({name: getattr(self, name) for name in DIVERGENCE_STATES})
