"""Means over ranks that bring unlike names and counts. (With two ranks: tests/ranks/test_equality.py.)"""

from __future__ import annotations

from trace_lightning.metrics.tally import RankMeans


def test_means_weigh_by_their_counts() -> None:
    means = RankMeans()
    means.add("b", 1.0, 3)
    means.add("b", 5.0, 1)
    means.add("a", 2.0, 2)
    assert means.compute() == {"a": 2.0, "b": 2.0}


def test_nothing_adds_nothing() -> None:
    means = RankMeans()
    means.add("reward", float("nan"), 0)
    assert means.compute() == {}
