"""Rewards at or below zero for how a completion reads, whatever it says: its length, and repetition.

They are added to a correctness reward by their weights (`rollout.reward_weights`). What was left out: lengths relative
to the other completions of the group, which is a matter of advantages.
"""

from __future__ import annotations

from trace_lightning.tasks.base import RewardFn, Sample
from trace_lightning.types import Problem


class Overlong(RewardFn):
    """DAPO's soft punishment of long completions (arXiv 2503.14476, equation 13), in tokens.

    0 up to `max_tokens - buffer`, falling linearly to -1 at `max_tokens`, and -1 beyond.

    Args:
        max_tokens: length at which the punishment is complete, usually `rollout.sampling.max_new_tokens`.
        buffer: tokens over which it grows.

    Raises:
        ValueError: not 0 < buffer <= max_tokens.
    """

    name = "overlong"
    in_process = True

    def __init__(self, max_tokens: int, buffer: int) -> None:
        if not 0 < buffer <= max_tokens:
            raise ValueError(f"Overlong: buffer={buffer} must be above 0 and at most max_tokens={max_tokens}")
        self.max_tokens, self.buffer = max_tokens, buffer

    def __call__(self, completion: str, problem: Problem) -> float:
        raise ValueError("Overlong counts tokens, which a text alone does not have: call score(sample)")

    def score(self, sample: Sample) -> float:
        beyond = sample.num_tokens - (self.max_tokens - self.buffer)
        return -min(1.0, max(0.0, beyond / self.buffer))


class CutOff(RewardFn):
    """-1.0 for a completion that was cut by the length limit, else 0.0."""

    name = "cut_off"
    in_process = True

    def __call__(self, completion: str, problem: Problem) -> float:
        raise ValueError("CutOff reads the finish reason, which a text alone does not have: call score(sample)")

    def score(self, sample: Sample) -> float:
        return -float(sample.finish_reason == "length")


class Repetition(RewardFn):
    """Minus the share of n-grams of words that occurred before: 0 for a text without repetition, towards -1 for a loop.

    The repetition penalty of Yeo et al. (arXiv 2502.03373), scaled to -1. A text with fewer than `n` words scores 0.

    Args:
        n: words in an n-gram.

    Raises:
        ValueError: `n` below 1.
    """

    name = "repetition"
    in_process = True

    def __init__(self, n: int = 4) -> None:
        if n < 1:
            raise ValueError(f"Repetition: n={n} must be at least 1")
        self.n = n

    def __call__(self, completion: str, problem: Problem) -> float:
        words = completion.split()
        grams = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0
