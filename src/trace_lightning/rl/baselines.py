"""Two published policy losses that correct for a quantised rollout themselves: TBPO and Score Centering.

Both weigh by the ratio of trainer and rollout inside the loss, so a correction that estimates the same ratio may not
be added (`corrects_rollout`); rules that only drop may. Neither has a KL term to a reference policy.

    TBPO             per sequence    s = exp(mean_t log(pi_policy / pi_old)), clipped, times
                                     m = min(exp(mean_t log(pi_old / pi_rollout)), 2)
    ScoreCentering   per token       weighted score of the drawn token minus the score's mean under the rollout

What was left out: their papers' batch construction, and TBPO's low-bit GEMM in the trainer (here the trainer rounds as
`recipe.trainer` says).

    B sequences    T tokens    K recorded tokens per position
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trace_lightning.rl.corrections import level_ratio
from trace_lightning.rl.losses import LossInputs, LossOutputs, PolicyLoss, SumCount, masked_log_ratio, sum_count

# Mass outside the recorded tokens below which FP32 cannot tell it from 0: sums of K probabilities err by about 1e-7.
_MIN_TAIL = 1e-6


@dataclass(frozen=True)
class TBPO(PolicyLoss):
    """The sequence-level loss of QaRL (arXiv 2604.07853), for a rollout on the trainer's own low-bit weights.

    With A the advantage, s and m as at the top of this file, m detached, and the mean over sequences:

        A >= 0    -m min(s A, (1 + positive_high) A)
        A < 0     -m s A   while s is in [1 - negative_low, 1 + negative_high]; beyond, the sequence is dropped

    The formula is known second hand. That m is a geometric mean, as s is, is an inference: a product over tokens would
    reach its cap of 2 on every long answer. Where one optimizer step follows a rollout, s is 1 and the gradient is
    `-m A mean_t grad log pi`.

    Args:
        positive_high: clip of s where A >= 0.
        negative_low: how far s may fall where A < 0.
        negative_high: how far s may rise where A < 0.
        cap: largest m.
    """

    corrects_rollout: ClassVar[bool] = True

    positive_high: float = 4e-4
    negative_low: float = 3e-4
    negative_high: float = 7e-4
    cap: float = 2.0

    def __post_init__(self) -> None:
        for name in ("positive_high", "negative_low", "negative_high", "cap"):
            if getattr(self, name) <= 0:
                raise ValueError(f"loss.{name}={getattr(self, name)} must be above 0")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Mean over sequences; metrics `clip_ratio/*` and `rollout_corr/tbpo/*`, all over sequences."""
        mask_BT, advantages_B1 = inputs.mask_BT, inputs.advantages_B[:, None]
        present_B1 = mask_BT.any(dim=-1, keepdim=True)
        step_B1 = self._ratio(inputs.policy_logprobs_BT, inputs.old_logprobs_BT, mask_BT)
        gap_B1 = self._ratio(inputs.old_logprobs_BT, inputs.rollout_logprobs_BT, mask_BT).detach()
        weight_B1 = gap_B1.clamp(max=self.cap)
        rises_B1, falls_B1 = step_B1 > 1 + self.positive_high, step_B1 < 1 - self.negative_low
        dropped_B1 = (advantages_B1 < 0) & (falls_B1 | (step_B1 > 1 + self.negative_high))
        capped_B1 = torch.where(advantages_B1 < 0, step_B1, step_B1.clamp(max=1 + self.positive_high))
        losses_B1 = torch.where(present_B1 & ~dropped_B1, -weight_B1 * capped_B1 * advantages_B1, 0.0)
        loss = (losses_B1 * _sequence_weight(inputs)).sum() / max(inputs.counts.num_sequences, 1)
        clipped_B1 = (advantages_B1 > 0) & rises_B1
        metrics = {
            "clip_ratio/low_mean": sum_count(dropped_B1, present_B1),
            "clip_ratio/high_mean": sum_count(clipped_B1, present_B1),
            "clip_ratio/region_mean": sum_count(dropped_B1 | clipped_B1, present_B1),
            "rollout_corr/tbpo/mean_weight": sum_count(weight_B1, present_B1),
            "rollout_corr/tbpo/capped_share": sum_count(gap_B1 > self.cap, present_B1),
        }
        return LossOutputs(loss, metrics)

    @staticmethod
    def _ratio(numerator_BT: Tensor, denominator_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return level_ratio(masked_log_ratio(numerator_BT, denominator_BT, mask_BT), mask_BT, "geometric")


def _sequence_weight(inputs: LossInputs) -> Tensor:
    """[B, 1]: the mean of the corrections' weights over a sequence's tokens; 0 or 1 where they drop sequences."""
    if inputs.weights_BT is None:
        return torch.ones_like(inputs.advantages_B[:, None])
    total_B1 = torch.where(inputs.mask_BT, inputs.weights_BT.detach(), 0.0).sum(dim=-1, keepdim=True)
    return total_B1 / inputs.mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class ScoreCentering(PolicyLoss):
    """Policy gradient less the drift of a mismatched rollout (arXiv 2609.20807); token mean over the batch.

    With tokens drawn from the rollout's q, the mean of `A grad log p` is A times the drift `mu = sum_v q_v w_v grad log
    p_v` plus the covariance that learning is about. Over the K recorded tokens H the drift is known; outside, q is
    taken to have the shape of p, `q_v = rho p_v`, and `sum_v p_v grad log p_v = 0` turns that tail into a sum over H:

        rho   = (1 - sum_H q) / (1 - sum_H p)      w(r) = min(r, cap)      alpha = rho w(1 / rho)
        loss  = -(A / N) [ sg(w_y) log p_y - sum_H sg(q_v w_v - alpha p_v) log p_v ],   w_v = w(p_v / q_v)

    p is the policy being trained, so this is the bypass form: nothing depends on `old_logprobs_BT`, and there is no
    clip. With `cap=None` no token is weighted (w = 1, alpha = rho). An infinite cap would be plain importance sampling,
    where the drift is 0 by itself.

    Needs `sampling.record_logprobs` (128 covers more than 99.9 % of the mass in the paper).

    Args:
        cap: largest weight w; None weighs nothing and only centres.
    """

    needs_topk: ClassVar[bool] = True
    corrects_rollout: ClassVar[bool] = True

    cap: float | None = 2.0

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap <= 0:
            raise ValueError(f"loss.cap={self.cap} must be above 0, or null for no weights")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metrics over tokens: `rollout_corr/scorecentering/{mean_weight,capped_share,recorded_mass}`.

        Raises:
            ValueError: if the rollout recorded no log-probs of its most likely tokens.
        """
        if inputs.topk_logprobs_BTK is None or inputs.rollout_topk_logprobs_BTK is None:
            raise ValueError(
                "ScoreCentering needs the rollout's most likely tokens: set rollout.sampling.record_logprobs (e.g. "
                "128), without top_k, top_p and min_p"
            )
        mask_BT = inputs.mask_BT
        drawn_BT = torch.where(mask_BT, inputs.policy_logprobs_BT, 0.0)
        ratio_BT = masked_log_ratio(inputs.policy_logprobs_BT.detach(), inputs.rollout_logprobs_BT, mask_BT).exp()
        weights_BT = self._weight(ratio_BT)
        drift_BT, mass_BT = self._drift(inputs.topk_logprobs_BTK, inputs.rollout_topk_logprobs_BTK, mask_BT)
        losses_BT = -inputs.advantages_B[:, None] * (weights_BT * drawn_BT - drift_BT)
        if inputs.weights_BT is not None:
            losses_BT = losses_BT * inputs.weights_BT.detach()
        loss = torch.where(mask_BT, losses_BT, 0.0).sum() / max(inputs.counts.num_tokens, 1)
        return LossOutputs(loss, self._metrics(ratio_BT, weights_BT, mass_BT, mask_BT))

    def _weight(self, ratio: Tensor) -> Tensor:
        return torch.ones_like(ratio) if self.cap is None else ratio.clamp(max=self.cap)

    def _drift(self, policy_BTK: Tensor, rollout_BTK: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """`sum_H sg(q w - alpha p) log p` [B, T], and the rollout's mass on H."""
        known_BTK = mask_BT.unsqueeze(-1) & (rollout_BTK > -torch.inf)
        policy_BTK = torch.where(known_BTK, policy_BTK, 0.0)
        with torch.no_grad():
            p_BTK, q_BTK = (torch.where(known_BTK, side.exp(), 0.0) for side in (policy_BTK, rollout_BTK))
            weight_BTK = self._weight(masked_log_ratio(policy_BTK, rollout_BTK, known_BTK).exp())
            tail_q, tail_p = ((1 - side.sum(dim=-1)).clamp(min=_MIN_TAIL) for side in (q_BTK, p_BTK))
            alpha_BT = tail_q / tail_p * self._weight(tail_p / tail_q)
            factor_BTK = q_BTK * weight_BTK - alpha_BT.unsqueeze(-1) * p_BTK
        return (factor_BTK * policy_BTK).sum(dim=-1), q_BTK.sum(dim=-1)

    def _metrics(self, ratio_BT: Tensor, weights_BT: Tensor, mass_BT: Tensor, mask_BT: Tensor) -> dict[str, SumCount]:
        name = "rollout_corr/scorecentering"
        metrics = {
            f"{name}/mean_weight": sum_count(weights_BT, mask_BT),
            f"{name}/recorded_mass": sum_count(mass_BT, mask_BT),
        }
        if self.cap is not None:
            metrics[f"{name}/capped_share"] = sum_count(ratio_BT > self.cap, mask_BT)
        return metrics
