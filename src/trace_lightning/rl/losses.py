"""Policy losses as pure functions of named tensors.

A loss sees one micro-batch of one rank, yet the update must not depend on how a batch was cut. So every loss divides by
`GlobalCounts`, the numbers of the whole optimizer step, and returns this micro-batch's *share*: shares add up to the
loss of the undivided batch, and so do their gradients. (DDP averages gradients over ranks; whoever runs it multiplies
the share by the number of ranks.) Metrics are (sum, count) pairs for the same reason.

    per token   l = -min(r A, clip(r, 1 - eps, 1 + eps_high) A) * w + beta * k3        r = pi_policy / pi_old
    GRPO        mean over sequences of each sequence's token mean     favours short answers, arXiv 2402.03300
    DrGRPO      token sum / (sequences * max length)                  no length in the weight, arXiv 2503.20783
    DAPO        token sum / tokens                                    long answers weigh more, arXiv 2503.14476

Variants are classes, never a `loss_type` string; baselines.py has two more that correct for the rollout themselves.
Left out: resampling and length penalties of DAPO (they belong to
rollout and reward), and importance weights (corrections.py; they arrive as `weights_BT`).

    B sequences    T tokens, aligned with the token they belong to
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# FP32 exp overflows at 88 (squares and sums of it earlier), and inf * 0 is NaN. e**20 is 5e8: no clip or band reaches
# that far, so whatever lies beyond is an outlier that must not move the policy; the clamp's gradient there is 0.
LOG_RATIO_LIMIT = 20.0
# k3 grows as exp(-d) where the reference finds a token likelier. Beyond this value (d = -2.5) one token would outweigh
# the batch, so it stops pulling.
K3_LIMIT = 10.0

SumCount = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of one optimizer step over all micro-batches and ranks: the denominators of every loss.

    Args:
        num_tokens: tokens to learn from.
        num_sequences: sequences with at least one such token.
        max_completion_length: the constant L of Dr. GRPO (`sampling.max_new_tokens`), not the longest seen.
    """

    num_tokens: int
    num_sequences: int
    max_completion_length: int

    @classmethod
    def from_mask(cls, mask_BT: Tensor, max_completion_length: int) -> GlobalCounts:
        """The counts of one batch; sum the first two over micro-batches and ranks."""
        return cls(int(mask_BT.sum()), int(mask_BT.any(dim=-1).sum()), max_completion_length)


@dataclass(kw_only=True)
class LossInputs:
    """Everything a policy loss may look at. Entries outside the mask may hold anything, NaN included.

    Args:
        policy_logprobs_BT: FP32 log-probs of the policy being trained; carries the gradient.
        old_logprobs_BT: FP32, the trainer's policy before the first update on this rollout (PPO's denominator).
        rollout_logprobs_BT: FP32, as the rollout engine reported them.
        advantages_B: FP32, one per sequence.
        mask_BT: bool, completion tokens to learn from.
        weights_BT: FP32 detached factors of the policy term from `corrections.py`; None means 1.
        ref_logprobs_BT: FP32, the reference policy's; needed if the loss has a KL term.
        topk_logprobs_BTK: FP32, the policy's log-probs of the rollout's K most likely tokens; carries the gradient.
            None unless the rollout recorded them (`sampling.record_logprobs`).
        rollout_topk_logprobs_BTK: FP32, the rollout's of the same tokens; -inf where there are fewer than K.
        counts: denominators of the optimizer step.

    Raises:
        ValueError: shapes that differ, or a mask that is not bool.
    """

    policy_logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    advantages_B: Tensor
    mask_BT: Tensor
    counts: GlobalCounts
    weights_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    topk_logprobs_BTK: Tensor | None = None
    rollout_topk_logprobs_BTK: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.policy_logprobs_BT.shape
        for name in ("old_logprobs_BT", "rollout_logprobs_BT", "mask_BT", "weights_BT", "ref_logprobs_BT"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, policy_logprobs_BT has {tuple(shape)}")
        for name in ("topk_logprobs_BTK", "rollout_topk_logprobs_BTK"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[:-1] != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {(*shape, 'K')}")
        if self.advantages_B.shape != shape[:1]:
            raise ValueError(f"advantages_B has shape {tuple(self.advantages_B.shape)}, expected ({shape[0]},)")
        if self.mask_BT.dtype != torch.bool:
            raise ValueError(f"mask_BT is {self.mask_BT.dtype}; a mask is bool, factors go into weights_BT")


@dataclass(frozen=True)
class LossOutputs:
    """`loss`: FP32 scalar, this micro-batch's share. `metrics`: detached (sum, count) per name; see `merge_metrics`."""

    loss: Tensor
    metrics: dict[str, SumCount]


class PolicyLoss(ABC):
    """One policy loss. A plain ABC, not a dataclass: jsonargparse refuses subclasses of a dataclass as `class_path`."""

    needs_topk: ClassVar[bool] = False  # whether it reads the fields that `sampling.record_logprobs` fills
    corrects_rollout: ClassVar[bool] = False  # whether it weighs by the rollout's ratio itself: no other weight then

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss share and metrics of one micro-batch."""


class ClippedLoss(PolicyLoss):
    """The clipped surrogate with optional KL; children differ in how they average it over tokens."""

    epsilon: float
    epsilon_high: float | None
    delta: float | None
    beta: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"loss.epsilon={self.epsilon}: 1 - epsilon bounds a ratio of probabilities, so (0, 1]")
        if self.epsilon_high is not None and self.epsilon_high <= 0:
            raise ValueError(f"loss.epsilon_high={self.epsilon_high} must be above 0")
        if self.delta is not None and self.delta <= 1 + self._high:
            raise ValueError(f"loss.delta={self.delta} must exceed 1 + epsilon_high = {1 + self._high}")
        if self.beta < 0:
            raise ValueError(f"loss.beta={self.beta} must be >= 0")

    @property
    def _high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @abstractmethod
    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Scalar share of the loss from per-token losses that are 0 outside the mask."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss share of one micro-batch; 0 with zero gradient where the mask is empty.

        Raises:
            ValueError: `beta` > 0 without reference log-probs.
        """
        mask_BT, advantages_B1 = inputs.mask_BT, inputs.advantages_B[:, None]
        ratio_BT = masked_log_ratio(inputs.policy_logprobs_BT, inputs.old_logprobs_BT, mask_BT).exp()
        losses_BT = clipped_surrogate(ratio_BT, advantages_B1, self.epsilon, self._high, self.delta)
        if inputs.weights_BT is not None:
            losses_BT = losses_BT * inputs.weights_BT.detach()
        metrics = clip_metrics(ratio_BT.detach(), advantages_B1, mask_BT, self.epsilon, self._high)
        if self.beta:
            if inputs.ref_logprobs_BT is None:
                raise ValueError(f"loss.beta={self.beta} needs reference log-probs. Give a reference model, or beta=0.")
            # The KL term is not weighted: it pulls towards the reference whatever the rollout's probability was.
            kl_BT = k3(masked_log_ratio(inputs.policy_logprobs_BT, inputs.ref_logprobs_BT, mask_BT))
            losses_BT = losses_BT + self.beta * kl_BT.clamp(max=K3_LIMIT)
            metrics["kl"] = sum_count(kl_BT.detach(), mask_BT)
        loss = self.aggregate(torch.where(mask_BT, losses_BT, 0.0), mask_BT, inputs.counts)
        return LossOutputs(loss, metrics)


@dataclass(frozen=True)
class GRPO(ClippedLoss):
    """Token mean per sequence, then mean over sequences (arXiv 2402.03300; defaults as in TRL).

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio also where the advantage is negative (two-sided clip, arXiv 2505.07291); None is off.
        beta: weight of the KL to the reference policy (k3 estimator).
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Sum of the sequences' token means / number of sequences."""
        means_B = losses_BT.sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)
        return means_B.sum() / max(counts.num_sequences, 1)


@dataclass(frozen=True)
class DrGRPO(ClippedLoss):
    """Token sum over a constant, so that length does not weigh (arXiv 2503.20783); use `GroupAdvantage(scale=none)`.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio also where the advantage is negative; None is off.
        beta: weight of the KL to the reference policy (k3 estimator).
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Token sum / (number of sequences x maximal completion length)."""
        return losses_BT.sum() / max(counts.num_sequences * counts.max_completion_length, 1)


@dataclass(frozen=True)
class DAPO(ClippedLoss):
    """Token mean over the whole batch with the raised upper clip (arXiv 2503.14476, only its loss).

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio also where the advantage is negative; None is off.
        beta: weight of the KL to the reference policy (k3 estimator).
    """

    epsilon: float = 0.2
    epsilon_high: float | None = 0.28
    delta: float | None = None
    beta: float = 0.0

    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Token sum / number of tokens."""
        return losses_BT.sum() / max(counts.num_tokens, 1)


def masked_log_ratio(numerator_BT: Tensor, denominator_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`numerator - denominator` clamped to +-LOG_RATIO_LIMIT, and 0 with exactly zero gradient outside the mask."""
    return torch.where(mask_BT, numerator_BT - denominator_BT, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    ratio_BT: Tensor, advantages_B1: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """PPO's pessimistic loss `-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, per token."""
    clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        ratio_BT = ratio_BT.clamp(max=delta)
    return -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)


def k3(log_ratio: Tensor) -> Tensor:
    """KL(p, ref) estimate `exp(-d) + d - 1`, d = log p - log ref, at samples of p: unbiased and never negative."""
    return torch.expm1(-log_ratio) + log_ratio


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


def sum_count(values: Tensor, mask: Tensor) -> SumCount:
    """FP32 sum of the values where the mask is True, and how many there are: a mean that can still be merged."""
    return torch.where(mask, values.float(), 0.0).sum(), mask.sum()


def merge_metrics(parts: Iterable[dict[str, SumCount]]) -> dict[str, SumCount]:
    """The metrics of several micro-batches as if computed over their union."""
    merged: dict[str, SumCount] = {}
    for part in parts:
        for name, (total, count) in part.items():
            old_total, old_count = merged.get(name, (0, 0))
            merged[name] = (old_total + total, old_count + count)
    return merged
