"""Quantiles of probability ratios that merge exactly: counts in fixed bins, which add up over batches and ranks.

A quantile of quantiles means nothing, and keeping every ratio would make states of unequal size. The log-ratio `d`
spans decades on both sides of zero (1e-5 where both sides round alike, 1 where they do not), so bins are
logarithmic in |d|, one half axis per sign, around one bin for what is as good as zero:

    bin    0 ... 233 | 234 ... 467 | 468 |  469 ... 702 | ...        |d| < 1e-6 is the bin in the middle
           d = -20 ........... -1e-6  0  1e-6 ........... 20         32 bins per decade, each 7.5 % wide

A quantile is the centre of the bin that holds it: |log rho| within 4 % of the sorted value. NaN counts as the largest
ratio, so that a trainer that diverged shows it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trace_lightning.rl.losses import LOG_RATIO_LIMIT

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
_SMALLEST = 1e-6
_PER_DECADE = 32
_HALF = math.ceil(_PER_DECADE * math.log10(LOG_RATIO_LIMIT / _SMALLEST))  # bins per sign
NUM_BINS = 2 * _HALF + 1


def ratio_histogram(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Counts int64 [NUM_BINS] of the masked log-ratios (any shape, within +-LOG_RATIO_LIMIT); no host sync."""
    value = torch.nan_to_num(log_ratio.float(), nan=LOG_RATIO_LIMIT).flatten()
    decades = (value.abs() / _SMALLEST).clamp(min=1).log10()
    steps = (decades * _PER_DECADE).long().clamp(max=_HALF - 1) + 1
    bins = _HALF + torch.where(value.abs() < _SMALLEST, 0, steps * value.sign().long())
    return torch.zeros(NUM_BINS, dtype=torch.int64, device=value.device).index_add_(0, bins, mask.flatten().long())


def quantile(counts: Tensor, share: float) -> Tensor:
    """The log-ratio (FP32 scalar) that at least `share` of the counted values do not exceed; of no values, 0."""
    rank = (counts.sum().double() * share).ceil().clamp(min=1)
    position = torch.searchsorted(counts.cumsum(0).double(), rank).clamp(max=NUM_BINS - 1) - _HALF
    centre = _SMALLEST * torch.pow(10.0, (position.abs() - 0.5) / _PER_DECADE)
    return torch.where(position == 0, 0.0, centre * position.sign()).float() * (counts.sum() > 0)
