"""What completions look like: rewards with intervals, repetition, garble, length. Pure functions over plain numbers.

* Intervals are 95 %, normal, over *questions*: completions of one question are no independent draws, so the mean of
  each question is one observation. Two formats answer the same questions, and their difference is taken per question.
  Shares of trajectories have Wilson intervals.
* A completion *repeats* if it ends in a loop: its last tokens are one period of up to 64 tokens, three times or more
  and over at least 24 tokens.
* Garble is measured by the unquantised policy: a window of 32 tokens is *unlikely* if its mean log-prob there is below
  that of 99 % of the windows that BF16 draws itself. So 1 % is what BF16 has by definition. Beside it the share of
  completions with characters that no text should have (U+FFFD, control characters).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

_NORMAL_95 = 1.959964
WINDOW, UNLIKELY = 32, 0.01
_LONGEST_PERIOD, _LEAST_LOOP = 64, 24


def interval(values: Sequence[float | None]) -> dict[str, float] | None:
    """`mean`, `low`, `high` of independent values, None left out; no interval below two, None for none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    if len(known) < 2:
        return {"mean": mean, "low": mean, "high": mean}
    half = _NORMAL_95 * math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1) / len(known))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def share(flags: Sequence[float]) -> dict[str, float] | None:
    """`mean`, `low`, `high` (Wilson) of independent yes-or-no values 1 and 0; None for none."""
    n, z2 = len(flags), _NORMAL_95**2
    if not n:
        return None
    mean = sum(flags) / n
    centre, half = (mean + z2 / (2 * n)) / (1 + z2 / n), math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    half *= _NORMAL_95 / (1 + z2 / n)
    return {"mean": mean, "low": max(0.0, centre - half), "high": min(1.0, centre + half)}


def differences(after: Sequence[float | None], before: Sequence[float | None]) -> list[float | None]:
    """`after - before` of each question, None where one side was not scored."""
    pairs = zip(after, before, strict=True)
    return [None if new is None or old is None else new - old for new, old in pairs]


def per_question(rewards: Sequence[float], samples: int) -> list[float | None]:
    """Mean reward of each question, None where nothing was scored (rewards of NaN)."""
    means: list[float | None] = []
    for start in range(0, len(rewards), samples):
        known = [value for value in rewards[start : start + samples] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else None)
    return means


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the completion ends in a loop."""
    ids = list(token_ids)
    for period in range(1, _LONGEST_PERIOD + 1):
        least = max(3 * period, _LEAST_LOOP)
        if len(ids) >= least and ids[-least + period :] == ids[-least:-period]:
            return True
    return False


def distinct_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams over all n-grams; 1 for a completion shorter than n."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def broken_text(text: str) -> bool:
    """Whether a text holds U+FFFD or a control character other than line breaks and tabs."""
    return any(c == "\ufffd" or (unicodedata.category(c) == "Cc" and c not in "\n\r\t") for c in text)


def window_means(logprobs: Sequence[float]) -> list[float]:
    """Mean log-prob of each whole window of 32 tokens of one completion."""
    starts = range(0, len(logprobs) - WINDOW + 1, WINDOW)
    return [sum(logprobs[start : start + WINDOW]) / WINDOW for start in starts]


def unlikely_share(windows: Sequence[float], reference: Sequence[float]) -> float | None:
    """Share of windows less likely than 99 % of the `reference` windows; None without windows on both sides."""
    if not windows or not reference:
        return None
    bar = sorted(reference)[int(UNLIKELY * len(reference))]
    return sum(value < bar for value in windows) / len(windows)


def describe(completions: Sequence[Any]) -> dict[str, Any]:
    """Lengths and health of `Completion`s: shares that repeat, are broken or were cut, and lengths in tokens."""
    count, lengths = len(completions), [len(c.token_ids) for c in completions]
    return {
        "completions": count,
        "repeats": [float(loops(c.token_ids)) for c in completions],
        "broken": [float(broken_text(c.text)) for c in completions if c.text],
        "distinct_4grams": sum(distinct_share(c.token_ids) for c in completions) / count,
        "clipped": [float(c.finish_reason == "length") for c in completions],
        "lengths": lengths,
    }
