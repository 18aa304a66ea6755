"""Corrections under the names that other libraries give them: a token band, and three rules that drop whole sequences.

    IcePop               token       rho_t inside [low, high], else 0               arXiv 2510.18855, verl, NeMo-RL
    GeometricRejection   sequence    keep if low <= exp(mean log rho) <= high       verl, NeMo-RL, Miles
    Veto                 sequence    keep if min rho_t >= floor                     slime, Miles
    K3Rejection          sequence    keep if mean(rho - log rho - 1) <= limit       verl

with rho = pi_old / pi_rollout, log-ratios clamped to +-20, and weights detached. A rule that drops has weights 0 and 1,
so it combines with one that estimates rho; a list of corrections is their product::

    corrections: [{class_path: Veto}, {class_path: TIS, init_args: {cap: 2.0}}]

The denominators of the loss do not follow: a dropped sequence counts as one with loss 0, so that what remains is not
scaled up. What was left out: bands that adapt to the width of the gap, whose formulas are not public, and dividing the
weights by their batch mean, which would make a micro-batch depend on the others.

How wide a band? Under NVFP4 a mean log gap of -2.8e-3 has been reported for one format on both sides (TitanRL), and
short sequences scatter more: tokens that differ by .01 average to .01 / sqrt(T). BF16 bands of [.999, 1.001] therefore
drop nearly every FP4 sequence. The defaults here are ten times wider; `masked_share` says what they do.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.rl.corrections import Correction, CorrectionOutputs, level_ratio
from trace_lightning.rl.kl import k3
from trace_lightning.rl.losses import LOG_RATIO_LIMIT, masked_log_ratio, sum_count


@dataclass(frozen=True)
class IcePop(Correction):
    """Raw ratios inside a band, dropped tokens outside (arXiv 2510.18855); `MIS(level=token)` with its own defaults.

    Args:
        low: lower end of the band, included.
        high: upper end, included.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_band("IcePop", self.low, self.high)

    @torch.no_grad()
    def __call__(self, old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> CorrectionOutputs:
        """Masked ratios; metrics `mean_weight` and `masked_share` over tokens."""
        ratio_BT = masked_log_ratio(old_logprobs_BT, rollout_logprobs_BT, mask_BT).exp()
        inside_BT = (ratio_BT >= self.low) & (ratio_BT <= self.high)
        weights_BT = torch.where(mask_BT & inside_BT, ratio_BT, 0.0)
        return CorrectionOutputs(
            weights_BT,
            {
                f"rollout_corr/{self.label}/mean_weight": sum_count(weights_BT, mask_BT),
                f"rollout_corr/{self.label}/masked_share": sum_count(~inside_BT, mask_BT),
            },
        )


class Rejection(Correction):
    """A rule that keeps a sequence with weight 1 or drops it; children say which. Own rules need only `keep`."""

    @property
    def reweights(self) -> bool:
        """False: weights are 0 and 1."""
        return False

    @abstractmethod
    def keep(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Bool [B, 1] from log rho, FP32, clamped and 0 outside the mask."""

    @torch.no_grad()
    def __call__(self, old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> CorrectionOutputs:
        """Weights 0 and 1; metrics `mean_weight` over tokens and `masked_share` over sequences."""
        keep_B1 = self.keep(masked_log_ratio(old_logprobs_BT, rollout_logprobs_BT, mask_BT), mask_BT)
        weights_BT = (mask_BT & keep_B1).float()
        return CorrectionOutputs(
            weights_BT,
            {
                f"rollout_corr/{self.label}/mean_weight": sum_count(weights_BT, mask_BT),
                f"rollout_corr/{self.label}/masked_share": sum_count(~keep_B1, mask_BT.any(dim=-1, keepdim=True)),
            },
        )


@dataclass(frozen=True)
class GeometricRejection(Rejection):
    """Drop sequences whose geometric mean ratio leaves the band; that mean does not grow with length.

    The same rule as `MIS(level=geometric)`, with a band for mean gaps.

    Args:
        low: lower end, included. For BF16 rollouts .999 is usual, with high 1.001 (verl) or 1.002 (NeMo-RL).
        high: upper end, included.
    """

    low: float = 0.99
    high: float = 1.01

    def __post_init__(self) -> None:
        _check_band("GeometricRejection", self.low, self.high)

    @property
    def label(self) -> str:
        """`geometric_rejection`."""
        return "geometric_rejection"

    def keep(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """`low <= exp(mean log rho) <= high`."""
        mean_B1 = level_ratio(log_ratio_BT, mask_BT, "geometric")
        return (mean_B1 >= self.low) & (mean_B1 <= self.high)


@dataclass(frozen=True)
class Veto(Rejection):
    """Drop a sequence if the trainer finds any of its tokens nearly impossible.

    Args:
        floor: smallest ratio that a token may have; 1e-4 to 1e-6 are in use.
    """

    floor: float = 1e-4

    def __post_init__(self) -> None:
        if not math.exp(-LOG_RATIO_LIMIT) < self.floor < 1:
            raise ValueError(
                f"Veto.floor={self.floor}: expected a ratio below 1 and above {math.exp(-LOG_RATIO_LIMIT):.1e}, where "
                "ratios are clamped"
            )

    def keep(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """`min rho_t >= floor`; entries outside the mask are 1."""
        return (log_ratio_BT >= math.log(self.floor)).all(dim=-1, keepdim=True)


@dataclass(frozen=True)
class K3Rejection(Rejection):
    """Drop a sequence whose mean `rho - log rho - 1`, an estimate of KL(rollout, trainer), exceeds a limit.

    Args:
        limit: .001 to .01 are in use.
    """

    limit: float = 0.01

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(f"K3Rejection.limit={self.limit} must be above 0")

    @property
    def label(self) -> str:
        """`k3_rejection`."""
        return "k3_rejection"

    def keep(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """`mean k3 <= limit`."""
        total_B1 = k3(-log_ratio_BT).sum(dim=-1, keepdim=True)  # 0 outside the mask
        return total_B1 <= self.limit * mask_BT.sum(dim=-1, keepdim=True)


def _check_band(name: str, low: float, high: float) -> None:
    if not 0 <= low < 1 < high:
        raise ValueError(f"{name} band [{low}, {high}]: expected 0 <= low < 1 < high")
