"""Quantiles out of fixed bins: near the sorted value, exact at zero, and mergeable."""

from __future__ import annotations

import math

import pytest
import torch

from trace_lightning.metrics.histogram import NUM_BINS, quantile, ratio_histogram

ALL = torch.ones(5000, dtype=torch.bool)


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99, 1.0])
def test_quantiles_are_within_half_a_bin(scale: float, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (scale * torch.randn(5000, generator=generator)).clamp(-20, 20)
    exact = values.sort().values[math.ceil(share * 5000) - 1].item()
    got = quantile(ratio_histogram(values, ALL), share).item()
    assert got == pytest.approx(exact, rel=0.04, abs=1e-6)
    assert got == 0 or math.copysign(1, got) == math.copysign(1, exact)


def test_counts_of_parts_add_up() -> None:
    values, mask = torch.randn(5000), torch.rand(5000) < 0.5
    whole = ratio_histogram(values, mask)
    parts = ratio_histogram(values[:7], mask[:7]) + ratio_histogram(values[7:], mask[7:])
    assert torch.equal(parts, whole)
    assert whole.sum() == mask.sum()
    assert whole.dtype == torch.int64


def test_ends_and_middle() -> None:
    values = torch.tensor([-20.0, -1e-9, 0.0, 1e-9, 20.0, float("nan"), 0.5])
    counts = ratio_histogram(values, torch.tensor([True] * 6 + [False]))
    assert counts.nonzero().flatten().tolist() == [0, NUM_BINS // 2, NUM_BINS - 1]
    assert counts[[0, NUM_BINS // 2, NUM_BINS - 1]].tolist() == [1, 3, 2]  # NaN is with the largest
    assert quantile(counts, 0.5) == 0


def test_quantile_of_nothing_is_zero() -> None:
    assert quantile(torch.zeros(NUM_BINS, dtype=torch.int64), 0.99) == 0
