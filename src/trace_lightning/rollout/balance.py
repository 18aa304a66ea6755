"""Which rank rolls out which prompts of a batch: all ranks wait for the slowest, so each gets the same work.

What is known before a rollout is the length of the prompts: it is prefilled, and read again with every drawn token. A
guess at the length of the answers is left out: a rank would have to know those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal items out so that each rank has as many as any other (give or take one) and the costs add up alike.

    The costliest item goes first, always to the rank with the least so far that has room (Graham's LPT rule). Every
    rank comes to the same result from the same costs.

    Args:
        costs: of each item, 0 or more.
        num_ranks: 1 or more.

    Returns:
        Indices of each rank's items, in ascending order.
    """
    room = [len(costs) // num_ranks + (rank < len(costs) % num_ranks) for rank in range(num_ranks)]
    total, shares = [0.0] * num_ranks, [[] for _ in range(num_ranks)]  # type: tuple[list[float], list[list[int]]]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(num_ranks) if len(shares[r]) < room[r]), key=lambda r: (total[r], r))
        total[rank] += costs[item]
        shares[rank].append(item)
    return [sorted(share) for share in shares]
