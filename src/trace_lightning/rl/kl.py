"""KL between the policy and a frozen reference, estimated at the policy's own tokens (d = log p - log ref).

    K1   d                  unbiased; of either sign, high variance
    K2   d^2 / 2            biased, but its gradient is the right one
    K3   exp(-d) + d - 1    unbiased, never negative; its gradient is that of the reverse direction, KL(ref, p)

A good *value* is not a good *loss*: only the tokens are drawn from p, and differentiating an estimate by them leaves
out that the draw depends on the policy too. The gradient of K1 has mean 0 (it pushes nowhere), that of K3 belongs to
another divergence. Two ways to the gradient of KL(p, ref), `gradient`:

    k2       value as named, gradient of K2 (d grad log p): exact where the tokens come from the policy as it is now
    ratio    estimate times pi_policy / pi_old, differentiated as a whole (DeepSeek-V3.2): exact for tokens of the old
             policy as well, with the variance of a ratio

What was left out: KL inside the reward (RLOO and REINFORCE++ papers), which makes advantages depend on the reference
and is the K2 gradient again where the policy has not moved (arXiv 2510.01555).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# k3 grows as exp(-d) where the reference finds a token likelier. Beyond this value (d = -2.5) one token would outweigh
# the batch, so it stops pulling.
K3_LIMIT = 10.0

Gradient = Literal["value", "k2", "ratio"]


class KLEstimator(ABC):
    """An estimate per token, and which gradient it has in a loss. A plain ABC so that configs can name any subclass."""

    gradient: Gradient

    def __post_init__(self) -> None:
        if self.gradient not in _GRADIENTS:
            raise ValueError(f"loss.kl.gradient={self.gradient!r}: expected {', '.join(_GRADIENTS)}")

    @abstractmethod
    def value(self, log_ratio_BT: Tensor) -> Tensor:
        """The estimate from d = log p - log ref, FP32 [B, T]."""

    def __call__(self, log_ratio_BT: Tensor, ratio_BT: Tensor) -> Tensor:
        """What a loss adds.

        Args:
            log_ratio_BT: log p - log ref, FP32, finite; carries the gradient.
            ratio_BT: pi_policy / pi_old, FP32; carries the gradient. Only `ratio` reads it.

        Returns:
            FP32 [B, T]; its value is `value`, times the ratio under `gradient=ratio`.
        """
        return _GRADIENTS[self.gradient](self.value(log_ratio_BT), log_ratio_BT, ratio_BT)


@dataclass(frozen=True)
class K1(KLEstimator):
    """`d`. With `gradient=value` it does not pull at all on average; choose `k2` or `ratio`.

    Args:
        gradient: `value`, that of the formula; `k2` or `ratio`, that of KL(p, ref), see `rl/kl.py`.
    """

    gradient: Gradient = "k2"

    def value(self, log_ratio_BT: Tensor) -> Tensor:
        return log_ratio_BT


@dataclass(frozen=True)
class K2(KLEstimator):
    """`d^2 / 2`.

    Args:
        gradient: `value` and `k2` are the same here; `ratio` weighs by pi_policy / pi_old.
    """

    gradient: Gradient = "value"

    def value(self, log_ratio_BT: Tensor) -> Tensor:
        return log_ratio_BT.square() / 2


@dataclass(frozen=True)
class K3(KLEstimator):
    """`exp(-d) + d - 1`, what GRPO and TRL use, up to a value of 10 per token.

    Args:
        gradient: `value`, that of the formula (GRPO); `k2` or `ratio` (DeepSeek-V3.2), that of KL(p, ref).
    """

    gradient: Gradient = "value"

    def value(self, log_ratio_BT: Tensor) -> Tensor:
        return k3(log_ratio_BT).clamp(max=K3_LIMIT)


def k3(log_ratio: Tensor) -> Tensor:
    """KL(p, ref) estimate `exp(-d) + d - 1`, d = log p - log ref, at samples of p: unbiased and never negative."""
    return torch.expm1(-log_ratio) + log_ratio


def _own(value: Tensor, log_ratio: Tensor, ratio: Tensor) -> Tensor:
    return value


def _of_k2(value: Tensor, log_ratio: Tensor, ratio: Tensor) -> Tensor:
    pull = log_ratio.square() / 2
    return pull + (value - pull).detach()


def _with_ratio(value: Tensor, log_ratio: Tensor, ratio: Tensor) -> Tensor:
    return value * ratio


_GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "value": _own,
    "k2": _of_k2,
    "ratio": _with_ratio,
}
