"""Means over an evaluation that ranks share, when not every rank has something to add to every mean.

Lightning can average a logged value over ranks, but by one collective per name, which every rank has to have logged:
a rank without a prompt in the last batch, or without a scored completion, would leave the others waiting. Here sums and
counts stay on their rank until the end, and travel once, with their names.
"""

from __future__ import annotations

import torch


class RankMeans:
    """Weighted means by name, over all ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, mean: float, count: float) -> None:
        """Add a mean over `count` values; 0 of them add nothing."""
        if count:
            total, weight = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + float(mean) * count, weight + count)

    def compute(self) -> dict[str, float]:
        """The mean of each name that any rank added to, in alphabetical order. Collective where ranks talk."""
        everyone = [self.sums]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            everyone = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(everyone, self.sums)
        merged = RankMeans()
        for sums in everyone:
            for name, (total, weight) in sums.items():
                merged.add(name, total / weight, weight)
        return {name: total / weight for name, (total, weight) in sorted(merged.sums.items())}
