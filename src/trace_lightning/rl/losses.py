"""Policy losses as pure functions of named tensors.

A loss sees one micro-batch of one rank, yet the update must not depend on how a batch was cut. So every loss divides by
`GlobalCounts`, the numbers of the whole optimizer step, and returns this micro-batch's *share*: shares add up to the
loss of the undivided batch, and so do their gradients. (DDP averages gradients over ranks; whoever runs it multiplies
the share by the number of ranks.) Metrics are (sum, count) pairs for the same reason.

This file is the contract, and what losses per token share. Variants are classes, never a `loss_type` string:

    clipped_losses.py     GRPO, Dr. GRPO, PPO, DAPO: the clipped ratio per token, in three means
    sequence_losses.py    GSPO, RLOO: ratios per sequence
    weighted_losses.py    CISPO, SAPO: no token loses its gradient
    baselines.py          TBPO, Score Centering: correct for the rollout themselves

Left out: resampling and length penalties of DAPO (they belong to rollout and reward), and importance weights
(corrections.py; they arrive as `weights_BT`).

    B sequences    T tokens, aligned with the token they belong to
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trace_lightning.rl.kl import K3, KLEstimator

# FP32 exp overflows at 88 (squares and sums of it earlier), and inf * 0 is NaN. e**20 is 5e8: no clip or band reaches
# that far, so whatever lies beyond is an outlier that must not move the policy; the clamp's gradient there is 0.
LOG_RATIO_LIMIT = 20.0
SumCount = tuple[Tensor, Tensor]
_K3 = K3()
_TOKEN_FIELDS = (
    *("old_logprobs_BT", "rollout_logprobs_BT", "mask_BT"),
    *("weights_BT", "ref_logprobs_BT", "entropy_BT"),
)


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
        entropy_BT: FP32, entropy of the policy in nats; carries a gradient. None unless the loss asks for it.
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
    entropy_BT: Tensor | None = None
    topk_logprobs_BTK: Tensor | None = None
    rollout_topk_logprobs_BTK: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.policy_logprobs_BT.shape
        for name in _TOKEN_FIELDS:
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

    @property
    def needs_reference(self) -> bool:
        """Whether it reads `ref_logprobs_BT`: then `model.reference` is loaded and scores every rollout."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """Whether it reads `entropy_BT`, which then carries a gradient."""
        return False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss share and metrics of one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss(PolicyLoss):
    """A policy term per token, plus KL to a reference and an entropy bonus; children bring the term and the mean.

        aggregate( term_BT * weights_BT + beta * kl_BT )  -  entropy_coef * token mean of the entropy

    Neither KL nor bonus is weighted: they pull whatever the rollout's probability was. The bonus is a token mean under
    every loss, as in TRL, so its coefficient means the same everywhere.

    Args:
        beta: weight of the KL to the reference policy (`model.reference`); 0 is off, and no reference is loaded.
        kl: its estimator; default `K3()`.
        entropy_coef: weight of the entropy bonus; its gradient costs a second softmax in the backward pass.
    """

    beta: float = 0.0
    kl: KLEstimator = _K3
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ValueError(f"loss.beta={self.beta} must be >= 0")

    @property
    def needs_reference(self) -> bool:
        """Whether `beta` is above 0."""
        return self.beta > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether there is a bonus."""
        return self.entropy_coef != 0

    @abstractmethod
    def surrogate(self, inputs: LossInputs) -> tuple[Tensor, dict[str, SumCount]]:
        """The unweighted policy term, [B, T] or [B, 1] (the same for all tokens of a sequence), and its metrics.

        Entries outside the mask may hold any finite number.
        """

    @abstractmethod
    def aggregate(self, losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
        """Scalar share of the loss from per-token losses that are 0 outside the mask."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss share of one micro-batch; 0 with zero gradient where the mask is empty.

        Raises:
            ValueError: `beta` above 0 without reference log-probs, or `entropy_coef` without entropies.
        """
        mask_BT = inputs.mask_BT
        losses_BT, metrics = self.surrogate(inputs)
        if inputs.weights_BT is not None:
            losses_BT = losses_BT * torch.where(mask_BT, inputs.weights_BT.detach(), 0.0)
        if self.needs_reference:
            kl_BT = self._kl(inputs)
            losses_BT = losses_BT + self.beta * kl_BT
            metrics["kl"] = sum_count(kl_BT.detach(), mask_BT)
        loss = self.aggregate(torch.where(mask_BT, losses_BT, 0.0), mask_BT, inputs.counts)
        if self.needs_entropy:
            if inputs.entropy_BT is None:
                raise ValueError(f"loss.entropy_coef={self.entropy_coef} needs entropy_BT with its gradient")
            entropy_BT = torch.where(mask_BT, inputs.entropy_BT, 0.0)
            loss = loss - self.entropy_coef * token_mean(entropy_BT, mask_BT, inputs.counts)
        return LossOutputs(loss, metrics)

    def _kl(self, inputs: LossInputs) -> Tensor:
        if inputs.ref_logprobs_BT is None:
            raise ValueError(f"loss.beta={self.beta} needs reference log-probs. Give a reference model, or beta=0.")
        ratio_BT = masked_log_ratio(inputs.policy_logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT).exp()
        return self.kl(masked_log_ratio(inputs.policy_logprobs_BT, inputs.ref_logprobs_BT, inputs.mask_BT), ratio_BT)


def sequence_mean(losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
    """Sum of the sequences' token means / number of sequences; losses are 0 outside the mask."""
    means_B = losses_BT.sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)
    return means_B.sum() / max(counts.num_sequences, 1)


def token_mean(losses_BT: Tensor, mask_BT: Tensor, counts: GlobalCounts) -> Tensor:
    """Token sum / number of tokens; losses are 0 outside the mask."""
    return losses_BT.sum() / max(counts.num_tokens, 1)


def masked_log_ratio(numerator_BT: Tensor, denominator_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`numerator - denominator` clamped to +-LOG_RATIO_LIMIT, and 0 with exactly zero gradient outside the mask."""
    return torch.where(mask_BT, numerator_BT - denominator_BT, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


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
