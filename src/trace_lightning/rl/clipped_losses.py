"""Policy losses around PPO's clip of the ratio, per token; they differ in the mean.

    per token   l = -min(r A, clip(r, 1 - eps, 1 + eps_high) A) * w + beta * kl        r = pi_policy / pi_old

    GRPO        mean over sequences of each sequence's token mean     favours short answers, arXiv 2402.03300
    DrGRPO      token sum / (sequences * max length)                  no length in the weight, arXiv 2503.20783
    PPO, DAPO   token sum / tokens                                    long answers weigh more, arXiv 2503.14476

With one optimizer step per rollout r is 1 and nothing is clipped: the gradient is REINFORCE's, in these means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.rl.losses import (
    GlobalCounts,
    LossInputs,
    SumCount,
    TokenLoss,
    masked_log_ratio,
    sequence_mean,
    sum_count,
    token_mean,
)


@dataclass(frozen=True)
class ClippedLoss(TokenLoss):
    """PPO's clipped surrogate; children differ in the ratio and in how they average over tokens."""

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"loss.epsilon={self.epsilon}: 1 - epsilon bounds a ratio of probabilities, so (0, 1]")
        if self.epsilon_high is not None and self.epsilon_high <= 0:
            raise ValueError(f"loss.epsilon_high={self.epsilon_high} must be above 0")
        if self.delta is not None and self.delta <= 1 + self._high:
            raise ValueError(f"loss.delta={self.delta} must exceed 1 + epsilon_high = {1 + self._high}")

    @property
    def _high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def ratio(self, inputs: LossInputs) -> Tensor:
        """What is clipped: pi_policy / pi_old per token [B, T]; children may return one per sequence [B, 1]."""
        return masked_log_ratio(inputs.policy_logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT).exp()

    def surrogate(self, inputs: LossInputs) -> tuple[Tensor, dict[str, SumCount]]:
        ratio, advantages_B1 = self.ratio(inputs), inputs.advantages_B[:, None]
        losses = clipped_surrogate(ratio, advantages_B1, self.epsilon, self._high, self.delta)
        units = inputs.mask_BT if ratio.shape == inputs.mask_BT.shape else inputs.mask_BT.any(dim=-1, keepdim=True)
        return losses, clip_metrics(ratio.detach(), advantages_B1, units, self.epsilon, self._high)


@dataclass(frozen=True)
class GRPO(ClippedLoss):
    """Token mean per sequence, then mean over sequences (arXiv 2402.03300; defaults as in TRL).

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative, for which the clip has none: the dual clip of arXiv
            1912.09729 (its c, 3 there), which is the two-sided clip of arXiv 2505.07291. None is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Sum of the sequences' token means / number of sequences."""
        return sequence_mean(losses_BT, mask_BT, counts)


@dataclass(frozen=True)
class DrGRPO(ClippedLoss):
    """Token sum over a constant, so that length does not weigh (arXiv 2503.20783); use `GroupAdvantage(scale=none)`.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative (dual clip); None is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Token sum / (number of sequences x maximal completion length)."""
        return losses_BT.sum() / max(counts.num_sequences * counts.max_completion_length, 1)


@dataclass(frozen=True)
class PPO(ClippedLoss):
    """Token mean over the whole batch, the clipped loss of PPO (arXiv 1707.06347) without a critic.

    The old policy is the trainer's before the first update on a rollout; the gap between it and the rollout is left to
    `model.corrections` (decoupled PPO, arXiv 2110.00641). With `model.bypass_mode` it is the rollout's itself.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative (dual clip); None is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Token sum / number of tokens."""
        return token_mean(losses_BT, mask_BT, counts)


@dataclass(frozen=True)
class DAPO(PPO):
    """`PPO` with the raised upper clip of arXiv 2503.14476; its sampling and length rules are settings of their own.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative (dual clip); None is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    epsilon_high: float | None = 0.28


def clipped_surrogate(
    ratio_BT: Tensor, advantages_B1: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """PPO's pessimistic loss `-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, per token."""
    clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        ratio_BT = ratio_BT.clamp(max=delta)
    return -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)


def clip_metrics(
    ratio_BT: Tensor, advantages_B1: Tensor, mask_BT: Tensor, epsilon: float, epsilon_high: float
) -> dict[str, SumCount]:
    """Shares of tokens whose gradient the clip removed: below, above, either. Names and definition are TRL's."""
    low_BT = (ratio_BT < 1 - epsilon) & (advantages_B1 < 0)
    high_BT = (ratio_BT > 1 + epsilon_high) & (advantages_B1 > 0)
    return {
        "clip_ratio/low_mean": sum_count(low_BT, mask_BT),
        "clip_ratio/high_mean": sum_count(high_BT, mask_BT),
        "clip_ratio/region_mean": sum_count(low_BT | high_BT, mask_BT),
    }
