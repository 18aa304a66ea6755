"""Prompts dealt over ranks: as many each, costs alike, and the same deal on every rank."""

from __future__ import annotations

import pytest

from trace_lightning.rollout.balance import deal


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 16])
def test_every_item_is_dealt_once_and_counts_differ_by_one_at_most(num_ranks: int, count: int) -> None:
    shares = deal([float(i * i % 11) for i in range(count)], num_ranks)
    assert sorted(item for share in shares for item in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the last ranks are those without a prompt


def test_long_and_short_are_mixed() -> None:
    """In order of arrival rank zero would have all long ones: 400 against 40."""
    costs = [100.0] * 4 + [10.0] * 4
    loads = [sum(costs[i] for i in share) for share in deal(costs, 2)]
    assert loads == [220, 220]


def test_one_very_long_item_is_paid_for_by_its_rank() -> None:
    costs = [90.0, 10, 20, 30, 40, 50]
    shares = deal(costs, 2)
    assert [sum(costs[i] for i in share) for share in shares] == [130, 110]
    assert 0 in shares[0]


def test_equal_costs_keep_the_order() -> None:
    assert deal([5.0] * 5, 2) == [[0, 2, 4], [1, 3]]
