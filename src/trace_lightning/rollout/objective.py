"""What a micro-batch is trained on: the policy loss over its scores, weighed for the gap between rollout and trainer.

    policy    scores with a gradient, of the weights as they are now
    old       log-probs of the weights before the first update on this rollout: PPO's denominator
    rollout   log-probs under which the tokens were drawn: the denominator instead, with `bypass_mode`
    ref       log-probs of the frozen reference, where the loss has a KL term

Pure: nothing here knows a trainer, an optimizer or another rank. What makes the shares of micro-batches add up to one
loss is in `counts`, which are those of the whole optimizer step over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trace_lightning.rl.corrections import Correction, apply_corrections
from trace_lightning.rl.losses import GlobalCounts, LossInputs, LossOutputs, PolicyLoss, sum_count
from trace_lightning.rollout.microbatch import MicroBatch
from trace_lightning.rollout.scoring import Scores, spread


@dataclass(frozen=True)
class Objective:
    """A loss with its corrections; see `PolicyModule` for the arguments."""

    loss: PolicyLoss
    corrections: Sequence[Correction]
    bypass_mode: bool

    def __call__(
        self, scores: Scores, micro: MicroBatch, old_BT: Tensor, ref_BT: Tensor | None, counts: GlobalCounts
    ) -> LossOutputs:
        """This micro-batch's share of the loss, and sums and counts of what loss and corrections measured."""
        corrected = apply_corrections(self.corrections, old_BT, micro.rollout_logprobs_BT, micro.mask_BT)
        recorded = micro.topk_logprobs_NK
        outputs = self.loss(
            LossInputs(
                policy_logprobs_BT=scores.logprobs_BT,
                old_logprobs_BT=micro.rollout_logprobs_BT if self.bypass_mode else old_BT,
                ref_logprobs_BT=ref_BT,
                entropy_BT=scores.entropy_BT if self.loss.needs_entropy else None,
                rollout_logprobs_BT=micro.rollout_logprobs_BT,
                advantages_B=micro.advantages_B,
                mask_BT=micro.mask_BT,
                weights_BT=corrected.weights_BT,
                counts=counts,
                topk_logprobs_BTK=scores.topk_logprobs_BTK,
                rollout_topk_logprobs_BTK=None if recorded is None else spread(recorded, micro.mask_BT),
            )
        )
        entropy = sum_count(scores.entropy_BT.detach(), micro.mask_BT)
        return LossOutputs(outputs.loss, {**outputs.metrics, **corrected.metrics, "entropy": entropy})
