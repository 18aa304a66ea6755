"""How much of an update of the weights is still there once they are in FP4.

A step of 4 bits is large beside what RL, or a low-rank adapter, moves a weight by. Most weights keep their code and a
few jump by a whole step. Two numbers say what that leaves of an update D = W' - W:

    kept     <Q(W') - Q(W), D> / <D, D>       1: along itself the update is there on average; 0: it was rounded away
    size     |Q(W') - Q(W)| / |D|             above `kept`: the rest is rounding noise that came with it

Both are sums over all weights of a linear. `changed` is the share of weights whose value differs at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.export.fp4 import quantize_group


@dataclass(frozen=True)
class Survival:
    """Sums over the weights of a linear; they add up."""

    weights: int = 0
    changed_weights: int = 0
    update: float = 0.0  # <D, D>
    rounded: float = 0.0  # the same of the quantised update
    overlap: float = 0.0

    def __add__(self, other: Survival) -> Survival:
        return Survival(
            self.weights + other.weights,
            self.changed_weights + other.changed_weights,
            self.update + other.update,
            self.rounded + other.rounded,
            self.overlap + other.overlap,
        )

    @property
    def kept(self) -> float:
        """Share of the update along its own direction; NaN without an update."""
        return self.overlap / self.update if self.update else math.nan

    @property
    def size(self) -> float:
        """Length of the quantised update in units of the update's; NaN without an update."""
        return math.sqrt(self.rounded / self.update) if self.update else math.nan

    @property
    def changed(self) -> float:
        """Share of weights with another value."""
        return self.changed_weights / self.weights if self.weights else math.nan

    def as_dict(self) -> dict[str, float]:
        """The three numbers; empty without an update."""
        return {"kept": self.kept, "size": self.size, "changed": self.changed} if self.update else {}


@torch.no_grad()
def update_survival(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    groups: Iterable[Sequence[str]],
    fmt: str,
    *,
    four_over_six: bool = False,
) -> dict[str, Survival]:
    """Compare an update with what quantisation makes of it.

    Args:
        before: weights by name, FP32 or BF16.
        after: the same, updated; of adapters, the merged weights in FP32.
        groups: linears that share one outer scale.
        fmt: `nvfp4` or `mxfp4`.
        four_over_six: see `NVFP4`.

    Returns:
        By linear.
    """
    found: dict[str, Survival] = {}
    for names in groups:
        old, new = ([weights[f"{name}.weight"].float() for name in names] for weights in (before, after))
        pairs = zip(quantize_group(old, fmt, four_over_six), quantize_group(new, fmt, four_over_six), strict=True)
        for name, w, w_new, (q, q_new) in zip(names, old, new, pairs, strict=True):
            update, rounded = w_new - w, q_new.dequantize(torch.float32) - q.dequantize(torch.float32)
            sums = ((a.double() * b).sum().item() for a, b in ((update, update), (rounded, rounded), (rounded, update)))
            found[name] = Survival(w.numel(), int((rounded != 0).sum()), *sums)
    return found
