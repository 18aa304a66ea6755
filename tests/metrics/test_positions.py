"""|delta| by position: buckets by hand, exact merging, and a slope whose interval holds what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trace_lightning.metrics.positions import (
    NUM_BUCKETS,
    PositionMetrics,
    position_curve,
    position_slope,
    position_sums,
)


def test_buckets_by_hand() -> None:
    """Two answers of 5 and 1 tokens after prompts of unequal length; positions count drawn tokens only."""
    gaps = torch.tensor([[9.0, 1, 2, 3, 4, 5], [9.0, 9, 7, 9, 9, math.nan]])
    mask = torch.tensor([[False, True, True, True, True, True], [False, False, True, False, False, False]])
    sums = position_sums(gaps, torch.zeros_like(gaps), mask)
    expected = torch.zeros(NUM_BUCKETS, 4).double()
    expected[0] = torch.tensor([2, 0, 1 + 7, 1 + 49])
    expected[1] = torch.tensor([2, 1 + math.log2(3), 2 + 3, 4 + 9]).double()
    expected[2] = torch.tensor([2, 2 + math.log2(5), 4 + 5, 16 + 25]).double()
    torch.testing.assert_close(sums, expected)
    assert position_curve(sums.tolist()) == [
        {"first": 1.0, "tokens": 2.0, "mean_abs_dlogp": 4.0},
        {"first": 2.0, "tokens": 2.0, "mean_abs_dlogp": 2.5},
        {"first": 4.0, "tokens": 2.0, "mean_abs_dlogp": 4.5},
    ]


def test_every_power_of_two_opens_a_bucket_and_the_last_one_stays_open() -> None:
    length = 2**18 + 3
    ones = torch.ones(1, length)
    counts = position_sums(ones, 0 * ones, ones.bool())[:, 0].tolist()
    assert counts[:17] == [2**k for k in range(17)]
    assert sum(counts) == length


def test_parts_merge_exactly() -> None:
    policy, rollout, mask = torch.randn(9, 70), torch.randn(9, 70), torch.rand(9, 70) < 0.8
    parts = [PositionMetrics(), PositionMetrics()]
    parts[0].update(policy[:2], rollout[:2], mask[:2])
    parts[1].update(policy[2:5], rollout[2:5], mask[2:5])
    parts[1].update(policy[5:], rollout[5:], mask[5:])
    parts[0].merge_state(parts[1])
    torch.testing.assert_close(parts[0].compute(), position_sums(policy, rollout, mask), rtol=1e-12, atol=0)
    parts[0].reset()
    assert parts[0].sums.abs().sum() == 0


def test_a_logprob_on_both_sides_is_needed() -> None:
    with pytest.raises(ValueError, match=r"shapes \(1, 3\), \(1, 2\), \(1, 3\)"):
        PositionMetrics().update(torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))


def of_line(slope: float, noise: float, generator: torch.Generator, answers: int = 60, length: int = 200) -> Tensor:
    """Sums of |delta| that grow by `slope` per doubling, with a noise that grows with the position."""
    x = torch.arange(1, length + 1).double().log2().expand(answers, length)
    gap = 1 + slope * x + noise * (0.3 + 0.3 * x) * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return position_sums(gap, torch.zeros_like(gap), torch.ones(x.shape, dtype=torch.bool))


@pytest.mark.parametrize("slope", [-0.1, 0.0, 0.25])
def test_slope_of_a_straight_line_is_exact(slope: float) -> None:
    fitted = position_slope(of_line(slope, 0.0, torch.Generator()).tolist())
    assert fitted is not None
    assert fitted.per_doubling == pytest.approx(slope, abs=1e-6)
    assert fitted.low <= fitted.per_doubling <= fitted.high


def test_slope_is_the_weighted_least_squares_of_the_buckets() -> None:
    sums = of_line(0.05, 1.0, torch.Generator().manual_seed(1))
    used = sums[sums[:, 0] > 1]
    weight, x, y = used[:, 0], used[:, 1] / used[:, 0], used[:, 2] / used[:, 0]
    design = torch.stack([torch.ones_like(x), x], dim=1)
    root = weight.sqrt().unsqueeze(1)
    solution = torch.linalg.lstsq(design * root, y.unsqueeze(1) * root).solution
    fitted = position_slope(sums.tolist())
    assert fitted is not None
    assert fitted.per_doubling == pytest.approx(solution[1].item(), rel=1e-9)


def test_the_interval_holds_the_slope_in_95_percent_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    fits = [position_slope(of_line(0.02, 0.2, generator, answers=8).tolist()) for _ in range(600)]
    held = sum(fit is not None and fit.low <= 0.02 <= fit.high for fit in fits) / len(fits)
    assert 0.92 <= held <= 0.98  # 600 draws at .95: standard deviation .009


@pytest.mark.parametrize("lengths", [[], [1], [1, 1, 1], [2]])
def test_fewer_than_two_buckets_with_a_variance_have_no_slope(lengths: list[int]) -> None:
    mask = torch.zeros(len(lengths), 4, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = True
    assert position_slope(position_sums(torch.ones(mask.shape), torch.zeros(mask.shape), mask).tolist()) is None
    assert position_slope([]) is None
