"""How questions are divided into training and held-out ones: by what is asked, never by row.

A hash decides, not `random`: the same questions are divided alike on every machine and Python version. Questions with
one key (3 * 4 and 4 * 3, or a prompt that occurs twice in a file) stay together; otherwise the held-out score would
partly measure recall.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from trace_lightning.types import Problem


def split_by_question(
    problems: Iterable[Problem], heldout_size: int, key: Callable[[Problem], str]
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems, both in hash order, so that any first n of them are a fair sample.

    Args:
        problems: all problems.
        heldout_size: how many to hold out. A group of equal keys that would overshoot is left in training, so a few
            fewer may be held out when groups are large.
        key: what makes two problems the same question.
    """
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(key(problem), []).append(problem)
    train: list[Problem] = []
    heldout: list[Problem] = []
    for _, group in sorted(groups.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()):
        side = heldout if len(heldout) + len(group) <= heldout_size else train
        side.extend(group)
    return train, heldout
