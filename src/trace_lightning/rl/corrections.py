"""Corrections for tokens drawn from a policy that is not quite the trainer's: weights from rho = pi_old / pi_rollout.

An FP4 rollout draws from another distribution than the one that is trained. Importance weights repair the expectation;
bounds keep their variance in hand, by capping (TIS) or by dropping (MIS). They treat the symptom: a rollout whose
rounding the trainer follows has rho close to 1 and needs neither.

Which level? A product over a sequence grows as exp(length * mean gap): a gap of 0.012 on each of 100 tokens gives
3.3, so product bounds throw long answers away. The geometric mean (1.012) does not grow, which is why it only *decides*
(weight 1 or 0) and can be combined with token weights.

    level        ratio per token or sequence    weight of TIS      weight of MIS
    token        rho_t                          min(rho_t, cap)    rho_t inside [low, high], else 0
    sequence     prod rho_t                     min(prod, cap)     prod inside the band, else 0
    geometric    exp(mean log rho_t)            -                  1 inside the band, else 0

The named rules of other libraries are in rejections.py. A list of rules composes: their weights multiply.

Weights are detached. Where the rollout's log-probs stand in for the old policy (bypass), the PPO ratio corrects already
and a weight on top would count the gap twice: leave the list empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trace_lightning.rl.losses import LOG_RATIO_LIMIT, PolicyLoss, SumCount, masked_log_ratio, sum_count


@dataclass(frozen=True)
class CorrectionOutputs:
    """`weights_BT`: FP32, detached, 0 outside the mask. `metrics`: (sum, count) per name, see `merge_metrics`."""

    weights_BT: Tensor
    metrics: dict[str, SumCount]


class Correction(ABC):
    """One rule that weighs or drops tokens. A plain ABC so that configs can name any subclass."""

    @property
    def label(self) -> str:
        """Name in the metric keys `rollout_corr/<label>/*`."""
        return type(self).__name__.lower()

    @property
    def reweights(self) -> bool:
        """Whether the weights estimate rho (then at most one such correction may be used) or are only 0 and 1."""
        return True

    @abstractmethod
    def __call__(self, old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> CorrectionOutputs:
        """Weights from FP32 log-probs [B, T] of the trainer's old policy and of the rollout, and a bool mask."""


@dataclass(frozen=True)
class TIS(Correction):
    """Truncated importance sampling: `min(rho, cap)`.

    Args:
        cap: largest weight; 1.5 to 5 is usual for tokens, 2 to 10 for sequences.
        level: ratio per `token` (low variance, slightly biased) or product over the `sequence` (the reverse).
    """

    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence"):
            raise ValueError(f"TIS.level={self.level!r}: expected token or sequence")
        if self.cap <= 0:
            raise ValueError(f"TIS.cap={self.cap} must be above 0")

    @property
    def label(self) -> str:
        """`tis_<level>`."""
        return f"tis_{self.level}"

    @torch.no_grad()
    def __call__(self, old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> CorrectionOutputs:
        """Capped ratios; metrics `mean_weight` over tokens and `capped_share` over tokens or sequences."""
        ratio = level_ratio(masked_log_ratio(old_logprobs_BT, rollout_logprobs_BT, mask_BT), mask_BT, self.level)
        units = mask_BT if self.level == "token" else mask_BT.any(dim=-1, keepdim=True)
        weights_BT = torch.where(mask_BT, ratio.clamp(max=self.cap), 0.0)
        return CorrectionOutputs(
            weights_BT,
            {
                f"rollout_corr/{self.label}/mean_weight": sum_count(weights_BT, mask_BT),
                f"rollout_corr/{self.label}/capped_share": sum_count(ratio > self.cap, units),
            },
        )


@dataclass(frozen=True)
class MIS(Correction):
    """Masked importance sampling: rho inside `[low, high]`, dropped outside.

    Args:
        low: lower end of the band; 0 means none.
        high: upper end. FP4 gaps are wider than BF16's: bands such as [.999, 1.001] drop nearly every sequence.
        level: `token`; `sequence`, the product, which grows with length; `geometric`, the mean, which only drops.
    """

    low: float = 0.5
    high: float = 2.0
    level: Literal["token", "sequence", "geometric"] = "token"

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric"):
            raise ValueError(f"MIS.level={self.level!r}: expected token, sequence or geometric")
        if not 0 <= self.low < 1 < self.high:
            raise ValueError(f"MIS band [{self.low}, {self.high}]: expected 0 <= low < 1 < high")

    @property
    def label(self) -> str:
        """`mis_<level>`."""
        return f"mis_{self.level}"

    @property
    def reweights(self) -> bool:
        """False at the geometric level, where weights are 0 and 1."""
        return self.level != "geometric"

    @torch.no_grad()
    def __call__(self, old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> CorrectionOutputs:
        """Masked ratios; metrics `mean_weight` over tokens and `masked_share` over tokens or sequences."""
        ratio = level_ratio(masked_log_ratio(old_logprobs_BT, rollout_logprobs_BT, mask_BT), mask_BT, self.level)
        units = mask_BT if self.level == "token" else mask_BT.any(dim=-1, keepdim=True)
        inside = (ratio >= self.low) & (ratio <= self.high)
        weight = ratio if self.reweights else torch.ones_like(ratio)
        weights_BT = torch.where(mask_BT & inside, weight, 0.0)
        return CorrectionOutputs(
            weights_BT,
            {
                f"rollout_corr/{self.label}/mean_weight": sum_count(weights_BT, mask_BT),
                f"rollout_corr/{self.label}/masked_share": sum_count(~inside, units),
            },
        )


def level_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """The ratio that a level compares: [B, T] for tokens; [B, 1] product or geometric mean for sequences.

    Args:
        log_ratio_BT: FP32, 0 outside the mask (`losses.masked_log_ratio`).
        mask_BT: bool.
        level: `token`, `sequence` or `geometric`.
    """
    if level == "token":
        return log_ratio_BT.exp()
    total_B1 = log_ratio_BT.sum(dim=-1, keepdim=True)
    if level == "geometric":
        total_B1 = total_B1 / mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    return total_B1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def check_corrections(corrections: Sequence[Correction], loss: PolicyLoss, *, bypass_mode: bool) -> None:
    """Refuse weights beside a loss that holds the same ratio already.

    Raises:
        ValueError: naming both, and the way out.
    """
    twice = ", ".join(correction.label for correction in corrections if correction.reweights)
    if twice and loss.corrects_rollout:
        raise ValueError(
            f"model.loss={type(loss).__name__} weighs by the ratio of trainer and rollout itself, and "
            f"model.corrections={twice} would count it twice. Set model.corrections=[]; rules that only drop "
            "(GeometricRejection, Veto) may stay."
        )
    if twice and bypass_mode:
        raise ValueError(
            f"model.bypass_mode=true puts the ratio of trainer and rollout into the loss, and model.corrections={twice}"
            " would count it twice. Set model.corrections=[], or bypass_mode=false; rules that only drop "
            "(GeometricRejection, Veto) may stay."
        )


def apply_corrections(
    corrections: Sequence[Correction], old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor
) -> CorrectionOutputs:
    """The product of several corrections; an empty list gives weight 1 inside the mask.

    Raises:
        ValueError: two corrections that both estimate rho (their product would be rho squared), or the same one twice.
    """
    reweighting = [correction.label for correction in corrections if correction.reweights]
    if len(reweighting) > 1:
        raise ValueError(
            f"corrections {', '.join(reweighting)} each multiply by the importance ratio, which would count it "
            f"{len(reweighting)} times. Keep one; rules that only drop (GeometricRejection, Veto) may be added."
        )
    if len({correction.label for correction in corrections}) < len(corrections):
        raise ValueError("the same correction is listed twice; narrow the band of one instead")
    weights_BT = mask_BT.float()
    metrics: dict[str, SumCount] = {}
    for correction in corrections:
        outputs = correction(old_logprobs_BT, rollout_logprobs_BT, mask_BT)
        weights_BT = weights_BT * outputs.weights_BT
        metrics.update(outputs.metrics)
    return CorrectionOutputs(weights_BT, metrics)
