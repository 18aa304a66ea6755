"""Does the gap between trainer and rollout grow along an answer? |delta| by position, and the slope of it.

An error that lives on (a KV cache in FP4 is read again at every later token) would make late tokens differ more than
early ones. Positions are buckets whose width doubles, so short and very long answers fit into states of one size:

    bucket    0  1  2     3     ...  17                position 1 is the first drawn token
    position  1  2-3  4-7  8-15  ...  131072 and beyond

    sums FP64 [18, 4] per bucket:  tokens   sum of log2(position)   sum of |delta|   sum of |delta|**2

The slope is a weighted least-squares line through the buckets' means, over log2 of the position: nats per doubling.
Each bucket weighs as its tokens do, and its own variance enters the interval, so neither a long tail of |delta| nor
buckets of unequal spread are assumed away. What is assumed is that tokens are independent; those of one answer are not
quite, so the interval is rather too narrow. A bucket of one token has no variance and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

NUM_BUCKETS = 18  # 2**17 = 128k
NUM_SUMS = 4
_NORMAL_95 = 1.959964  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class PositionSlope:
    """Nats of mean |delta| per doubling of the position, and the ends of its 95 % interval."""

    per_doubling: float
    low: float
    high: float


def position_sums(policy_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sums FP64 [18, 4] as at the top of this file; no host sync.

    Args:
        policy_logprobs: FP32 [B, T], the trainer's log-probs of the drawn tokens.
        rollout_logprobs: FP32 [B, T], as the rollout reported them.
        mask: bool [B, T], the drawn tokens; positions count these alone.

    Raises:
        ValueError: shapes that differ.
    """
    if not policy_logprobs.shape == rollout_logprobs.shape == mask.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (policy_logprobs, rollout_logprobs, mask))
        raise ValueError(f"policy, rollout and mask have shapes {shapes}: one log-prob per token on both sides")
    position = mask.cumsum(-1).clamp(min=1).flatten()
    position = position.double()
    bucket = position.frexp().exponent.long() - 1  # log2 rounded down: exact on every device, which log2 is not
    gap = torch.where(mask, policy_logprobs.float() - rollout_logprobs.float(), 0.0).abs().double().flatten()
    counted = mask.double().flatten()
    new = torch.stack([counted, position.log2() * counted, gap, gap.square()], dim=-1)
    sums = torch.zeros(NUM_BUCKETS, NUM_SUMS, dtype=torch.float64, device=mask.device)
    return sums.index_add_(0, bucket.clamp(max=NUM_BUCKETS - 1), new)


class PositionMetrics(Metric):
    """|delta| by position, exact under any split of the sequences."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(NUM_BUCKETS, NUM_SUMS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, policy_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
        """Add FP32 log-probs [B, T] of both sides under a bool mask.

        Raises:
            ValueError: shapes that differ.
        """
        self.sums = self.sums + position_sums(policy_logprobs, rollout_logprobs, mask)

    def compute(self) -> Tensor:
        """The merged sums, FP64 [18, 4]; `position_curve` and `position_slope` read them."""
        return self.sums


def position_curve(sums: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """One entry per bucket with a token: `first` position, `tokens`, `mean_abs_dlogp`."""
    return [
        {"first": float(2**bucket), "tokens": count, "mean_abs_dlogp": gap / count}
        for bucket, (count, _, gap, _) in enumerate(sums)
        if count
    ]


def position_slope(sums: Sequence[Sequence[float]]) -> PositionSlope | None:
    """Weighted least squares of the buckets' mean |delta| over their mean log2(position); None below two buckets.

    With n tokens, mean x, mean y and variance s**2 (n - 1) of each bucket, X the weighted mean of x, and
    S = sum n (x - X)**2, the slope is `sum n (x - X) y / S` and, as a sum of independent means, has the variance
    `sum n (x - X)**2 s**2 / S**2`. The interval is the slope +- 1.96 standard errors.

    Args:
        sums: [18][4] as `PositionMetrics.compute` gives them.
    """
    used = [row for row in sums if row[0] > 1]
    if len(used) < 2:
        return None
    total = sum(row[0] for row in used)
    centre = sum(row[1] for row in used) / total
    spread = slope = variance = 0.0
    for count, exponents, gaps, squares in used:
        x = exponents / count - centre
        spread += count * x * x
        slope += x * gaps
        variance += count * x * x * max(0.0, squares - gaps * gaps / count) / (count - 1)
    slope, error = slope / spread, math.sqrt(variance) / spread
    return PositionSlope(slope, slope - _NORMAL_95 * error, slope + _NORMAL_95 * error)
