"""Length penalties: terms added to the reward by the number of tokens of an answer, before advantages.

They are not reward functions: those see text, and what is logged as `reward`, or decides which groups dynamic sampling
keeps, should say how good the answers are. `length_penalty` logs what is added here.

    SoftOverlong    0 up to L - c, then down to -1 at L                              DAPO
    KimiLength      weight * lambda, lambda from .5 (shortest) to -.5 (longest)      Kimi k1.5
    LengthDiscount  -alpha * sigmoid(z of the length among correct answers)          Arora and Zanette

Answers that were cut at the limit may instead be left out of learning: `rollout.mask_truncated_completions`.

    P prompts    G answers per prompt
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class LengthPenalty(ABC):
    """One term added to rewards. A plain ABC so that configs can name any subclass."""

    @abstractmethod
    def __call__(self, lengths_PG: Tensor, rewards_PG: Tensor, limit: int) -> Tensor:
        """The term.

        Args:
            lengths_PG: int64, tokens of each answer that the policy drew, EOS included.
            rewards_PG: FP32, NaN where not scored.
            limit: the most there can be: `sampling.max_new_tokens`, in conversations that of all turns.

        Returns:
            FP32 [P, G], finite.
        """


@dataclass(frozen=True)
class SoftOverlong(LengthPenalty):
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): `(L - c - n) / c` between L - c and L tokens, -1 beyond.

    Args:
        cache: c, tokens before the limit at which it begins; DAPO has 4096 of 20480.
        max_length: L; None takes the rollout's limit. Below that, answers between L and the limit get -1.
        weight: factor on the term.
    """

    cache: int
    max_length: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.cache < 1:
            raise ValueError(f"length_penalty.cache={self.cache} must be at least 1 token")
        if self.max_length is not None and self.max_length < self.cache:
            raise ValueError(f"length_penalty.cache={self.cache} exceeds max_length={self.max_length}")

    def __call__(self, lengths_PG: Tensor, rewards_PG: Tensor, limit: int) -> Tensor:
        """As the class says.

        Raises:
            ValueError: `cache` above the limit.
        """
        end = limit if self.max_length is None else self.max_length
        if end < self.cache:
            raise ValueError(
                f"length_penalty.cache={self.cache} exceeds the {end} tokens that an answer may have "
                "(rollout.sampling.max_new_tokens, in conversations those of all turns): every answer would be punished"
            )
        return self.weight * ((end - self.cache - lengths_PG) / self.cache).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class KimiLength(LengthPenalty):
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), within a group.

    `lambda = .5 - (n - n_min) / (n_max - n_min)`; answers below `correct` get `min(lambda, 0)`. Groups of equal lengths
    get 0.

    Args:
        weight: factor on lambda; the paper raises it from 0 after a warm-up.
        correct: rewards of at least this much are correct answers.
    """

    weight: float = 0.1
    correct: float = 1.0

    def __call__(self, lengths_PG: Tensor, rewards_PG: Tensor, limit: int) -> Tensor:
        lengths = lengths_PG.float()
        low, high = lengths.amin(dim=-1, keepdim=True), lengths.amax(dim=-1, keepdim=True)
        term = 0.5 - (lengths - low) / (high - low).clamp(min=1)
        term = torch.where(rewards_PG >= self.correct, term, term.clamp(max=0.0))  # NaN compares false
        return self.weight * torch.where(high > low, term, 0.0)


@dataclass(frozen=True)
class LengthDiscount(LengthPenalty):
    """Shorter correct answers are worth more (arXiv 2502.04463): `R (1 - alpha sigmoid(z))` for correct answers.

    z is the length less the mean over the correct answers of the group, over their population std (0 where their
    lengths are equal).

    Args:
        alpha: largest share of the reward that length can cost, in [0, 1).
        correct: rewards of at least this much are correct answers.
    """

    alpha: float = 0.1
    correct: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ValueError(f"length_penalty.alpha={self.alpha}: a share of the reward, so in [0, 1)")

    def __call__(self, lengths_PG: Tensor, rewards_PG: Tensor, limit: int) -> Tensor:
        correct_PG = rewards_PG >= self.correct
        count_P1 = correct_PG.sum(dim=-1, keepdim=True).clamp(min=1)
        mean_P1 = (lengths_PG * correct_PG).sum(dim=-1, keepdim=True) / count_P1
        deviations_PG = (lengths_PG - mean_P1) * correct_PG
        std_P1 = (deviations_PG.square().sum(dim=-1, keepdim=True) / count_P1).sqrt()
        z_PG = torch.where(std_P1 > 0, deviations_PG / std_P1.clamp(min=1e-6), 0.0)
        return torch.where(correct_PG, -self.alpha * rewards_PG * torch.sigmoid(z_PG), 0.0)
