"""Everything that one training step measures, summed over its micro-batches, its optimizer steps and the ranks.

    begin          forget the step before
    begin_update   one optimizer step more: the audit of guidance is kept for each
    add            sums and counts of a micro-batch, or of an update
    compare        trainer against rollout, while both still have the same weights
    compute        three collectives over the ranks, and the values to log

Sums and counts are kept, never means: micro-batches and ranks differ in size, and what no rank measured stays absent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trace_lightning.metrics.audit import audit_metrics, inner_step_metrics
from trace_lightning.metrics.divergence import DivergenceMetrics
from trace_lightning.metrics.positions import PositionMetrics
from trace_lightning.metrics.together import compute_together
from trace_lightning.quantization.guidance import Key, MismatchCounts
from trace_lightning.rl.losses import SumCount, merge_metrics
from trace_lightning.types import RolloutBatch


class StepMetrics(nn.Module):
    """Collects during a step; a module, so that its metrics move to the device with the one that owns it.

    `audit` (`quantization.guidance.AUDIT_SUMS` by layer and site) and `position_sums` (`metrics.positions`, [18][4])
    are those of the last step over all ranks, for whoever sums up a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.divergence, self.positions = DivergenceMetrics(), PositionMetrics()
        self.audit: dict[Key, list[float]] = {}
        self.position_sums: list[list[float]] = []
        self._collected: list[dict[str, SumCount]] = []
        self._mismatch: list[MismatchCounts] = []  # one of each optimizer step

    def begin(self) -> None:
        """Forget the step before."""
        self._collected, self._mismatch = [], []
        self.divergence.reset()
        self.positions.reset()

    def begin_update(self) -> None:
        """What is audited from here on belongs to the next optimizer step."""
        self._mismatch.append(MismatchCounts())

    def add(self, values: dict[str, SumCount]) -> None:
        """Add (sum, count) pairs by name."""
        self._collected.append(values)

    def add_audit(self, mismatch: MismatchCounts) -> None:
        """Add what a micro-batch's forward found at guided sites."""
        self._mismatch[-1].merge(mismatch)

    def compare(self, logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> None:
        """Compare the trainer's log-probs, before any update, with the rollout's where `mask_BT`."""
        for metric in (self.divergence, self.positions):
            metric.update(logprobs_BT, rollout_logprobs_BT, mask_BT)

    def compute(
        self, batch: RolloutBatch, reduce: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, Tensor | float]:
        """The values to log. Collective: `reduce` adds a tensor up over the ranks."""
        merged = dict(sorted(merge_metrics(self._collected).items()))  # in one order on every rank
        sums = reduce(torch.stack([torch.stack([total.float(), count.float()]) for total, count in merged.values()]))
        values: dict[str, Tensor | float] = {
            name: total / count for name, (total, count) in zip(merged, sums, strict=True) if count > 0
        }
        divergence, positions = compute_together([self.divergence, self.positions])
        self.position_sums = positions.tolist()
        values |= divergence
        return values | self._guidance(batch, reduce, device)

    def _guidance(
        self, batch: RolloutBatch, reduce: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, float]:
        self.audit = {}
        if batch.guidance is None:
            return {}
        keys = sorted(batch.guidance.tables)  # the same on every rank, whichever of them audited something
        sums = reduce(torch.stack([mismatch.stack(keys, device) for mismatch in self._mismatch]))
        self.audit = dict(zip(keys, sums.sum(0).tolist(), strict=True))
        values = audit_metrics(self.audit) | inner_step_metrics(sums.sum(1).tolist())
        values["guidance/bytes_per_token"] = batch.guidance.bytes_per_token
        if "guidance_seconds" in batch.stats and batch.seconds.get("rollout"):
            values["guidance/share_of_rollout_time"] = batch.stats["guidance_seconds"] / batch.seconds["rollout"]
        return values
