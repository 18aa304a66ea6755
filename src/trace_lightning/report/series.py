"""Curves of a bounded number of points, and the rules by which points are left out.

A run of 10,000 steps has more points than a screen has columns. What must survive is the outlier: one step of a huge
mismatch is what the curve is looked at for. So equal stretches of the curve are reduced to their minimum and maximum,
each where it was measured. Stacked areas need all their layers at the same steps, so they show means of stretches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_POINTS = 1000
THINNING_RULE = (
    f"Curves of more than {MAX_POINTS:,} points show the minimum and the maximum of {MAX_POINTS // 2 - 1} equal "
    "stretches, and their first and last point; stacked areas show the means of stretches."
)


@dataclass
class Series:
    """One metric over the column `step` of metrics.csv, the rollouts learned from before; finite values only."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float) -> None:
        """Append one value."""
        self.steps.append(step)
        self.values.append(value)

    def thinned(self, limit: int = MAX_POINTS) -> Series:
        """At most `limit` points: first, last, and the minimum and maximum of equal stretches between."""
        count = len(self)
        if count <= limit:
            return self
        kept = {0, count - 1}
        for stretch in _stretches(count, limit // 2 - 1):
            kept.add(min(stretch, key=self.values.__getitem__))
            kept.add(max(stretch, key=self.values.__getitem__))
        order = sorted(kept)
        return Series([self.steps[i] for i in order], [self.values[i] for i in order])

    def averaged(self, limit: int = MAX_POINTS) -> Series:
        """At most `limit` points: the means of equal stretches, each at its first step."""
        if len(self) <= limit:
            return self
        parts = _stretches(len(self), limit)
        means = [math.fsum(self.values[i] for i in part) / len(part) for part in parts]
        return Series([self.steps[part[0]] for part in parts], means)

    def smoothed(self, window: int) -> Series:
        """Running mean over the last `window` values."""
        return Series(self.steps, running_mean(self.values, window))


def _stretches(count: int, number: int) -> list[range]:
    return [range(i * count // number, (i + 1) * count // number) for i in range(number)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values up to each, NaN left out."""
    means, total, number = [], 0.0, 0
    for i, value in enumerate(values):
        if not math.isnan(value):
            total, number = total + value, number + 1
        if i >= window and not math.isnan(values[i - window]):
            total, number = total - values[i - window], number - 1
        means.append(total / number if number else math.nan)
    return means
