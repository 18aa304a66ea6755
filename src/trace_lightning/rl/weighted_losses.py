"""Policy losses that weigh every token and remove none: CISPO, in the two meanings of its clip, and SAPO.

PPO's clip takes the gradient from tokens whose probability moved far, often the rare words at which reasoning turns.
Here such tokens keep a gradient, of bounded size.

    CISPO       -sg(clamp(r, floor, cap)) A log pi                  `cap` is the largest weight itself: 5 means 5
    CISPOBand   -sg(clamp(r, 1 - eps, 1 + eps_high)) A log pi       eps as in PPO: 5 means 6
    SAPO        -A sigmoid(tau (r - 1)) 4 / tau                     a soft gate; gradient as PPO's at r = 1

The two forms of CISPO are kept apart by name because other libraries write both as `epsilon_high`: TRL and ScaleRL mean
the weight (5), verl the offset from 1.
"""

from __future__ import annotations

from abc import abstractmethod
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


class DetachedWeightLoss(TokenLoss):
    """`-sg(w) A log pi`, token mean; children say between which bounds the ratio is the weight."""

    @property
    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest weight."""

    def surrogate(self, inputs: LossInputs) -> tuple[Tensor, dict[str, SumCount]]:
        mask_BT, (low, high) = inputs.mask_BT, self.bounds
        log_ratio_BT = masked_log_ratio(inputs.policy_logprobs_BT.detach(), inputs.old_logprobs_BT, mask_BT)
        ratio_BT = log_ratio_BT.exp()
        weights_BT = ratio_BT.clamp(low, high)
        losses_BT = -weights_BT * inputs.advantages_B[:, None] * torch.where(mask_BT, inputs.policy_logprobs_BT, 0.0)
        metrics = {
            "cispo/mean_weight": sum_count(weights_BT, mask_BT),
            "cispo/capped_share": sum_count(ratio_BT > high, mask_BT),
            "cispo/raised_share": sum_count(ratio_BT < low, mask_BT),
        }
        return losses_BT, metrics

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Token sum / number of tokens."""
        return token_mean(losses_BT, mask_BT, counts)


@dataclass(frozen=True)
class CISPO(DetachedWeightLoss):
    """Weights capped at `cap` (arXiv 2506.13585 in the reading of TRL and ScaleRL, arXiv 2510.13786).

    Args:
        cap: largest weight; 5 in ScaleRL.
        floor: smallest weight; 0 is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    cap: float = 5.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor < 1 <= self.cap:
            raise ValueError(f"loss.floor={self.floor}, loss.cap={self.cap}: weights, so 0 <= floor < 1 <= cap")

    @property
    def bounds(self) -> tuple[float, float]:
        """`floor` and `cap`."""
        return self.floor, self.cap


@dataclass(frozen=True)
class CISPOBand(DetachedWeightLoss):
    """Weights inside `[1 - epsilon, 1 + epsilon_high]` (arXiv 2506.13585 as written there and in verl).

    Args:
        epsilon: 1 - epsilon is the smallest weight; 1 sets no bound, as in the paper.
        epsilon_high: 1 + epsilon_high is the largest weight.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    epsilon: float = 1.0
    epsilon_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon <= 1 or self.epsilon_high <= 0:
            raise ValueError(
                f"loss.epsilon={self.epsilon}, loss.epsilon_high={self.epsilon_high}: offsets from 1, epsilon in (0, 1]"
                " and epsilon_high above 0. For the largest weight itself use CISPO(cap=...)"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """`1 - epsilon` and `1 + epsilon_high`."""
        return 1 - self.epsilon, 1 + self.epsilon_high


@dataclass(frozen=True)
class SAPO(TokenLoss):
    """Soft gate in place of the clip (arXiv 2511.20347): sequence mean of `-A sigmoid(tau (r - 1)) 4 / tau`.

    Args:
        tau: temperature where the advantage is above 0.
        tau_negative: temperature elsewhere; larger, so that pushing down fades sooner.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    tau: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau <= 0 or self.tau_negative <= 0:
            raise ValueError(f"loss.tau={self.tau}, loss.tau_negative={self.tau_negative} must be above 0")

    def surrogate(self, inputs: LossInputs) -> tuple[Tensor, dict[str, SumCount]]:
        log_ratio_BT = masked_log_ratio(inputs.policy_logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        advantages_B1 = inputs.advantages_B[:, None]
        tau_B1 = torch.where(advantages_B1 > 0, self.tau, self.tau_negative)
        gate_BT = torch.sigmoid(tau_B1 * (log_ratio_BT.exp() - 1)) * 4 / tau_B1
        # The gradient's factor on r grad log pi, 1 at r = 1.
        slope_BT = (gate_BT * tau_B1 / 4).detach()
        return -gate_BT * advantages_B1, {"sapo/mean_gate": sum_count(4 * slope_BT * (1 - slope_BT), inputs.mask_BT)}

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Sum of the sequences' token means / number of sequences."""
        return sequence_mean(losses_BT, mask_BT, counts)
