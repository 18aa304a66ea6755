"""Activations in FP4 with a part of their rounding error added again, itself in FP4 (QUADS, arXiv 2607.15810).

    value = DQ(Q(x)) + M * DQ(Q(x - DQ(Q(x))))        M [M, C] is 0 or 1

A rollout in W4A4 whose trainer rounds weights alone differs from it by the rounding of activations. The residual
returns most of that: it has the shape of x, so it can go through the same FP4 matmul a second time, over the channels
that M selects.

Which channels? The paper gives a share (one half) but no rule. Frozen here: **per token, the `round(share * C)`
channels with the largest residual magnitude**, and whatever ties with the last of them. Per token, because a choice
over the tensor would make a token's value depend on the others in its batch, which the trainer could never reproduce.
With the ties, because then a CPU and a GPU select alike, whatever order their top-k has.

The residual is quantised as a whole, before the selection, with block and outer scales of its own. Both terms are
summed in FP32 and rounded once to the dtype of x; two matmuls with FP32 accumulators would not round there. Their sum
is therefore not a value of the FP4 grid, and guidance, which records one code per element, cannot follow it.

Left out: a Triton kernel, and the fixed 2:4 pattern of Rollout-ResQ (arXiv 2607.26515).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_kernels.quantize import BlockFormat


def compensated(x: Tensor, fmt: BlockFormat, share: float) -> Tensor:
    """`DQ(Q(x))` plus its quantised residual at the `share` of each row's channels where that is largest.

    No host sync and no shape that depends on data, so it may be captured in a CUDA graph. Rows do not influence each
    other.

    Args:
        x: [M, C], any float dtype.
        fmt: the number format of both terms.
        share: of the C channels, in [0, 1]; at 0 the result is `DQ(Q(x))`. A share above 0 selects one channel at
            least.

    Returns:
        [M, C] in the dtype of `x`, without gradient rule (use `straight_through`).

    Raises:
        ValueError: a share outside [0, 1], or an `x` that is not [M, C].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: a share of the channels, so in [0, 1]")
    if x.ndim != 2:
        raise ValueError(f"x {tuple(x.shape)}: expected [M, C]")
    first = fmt.dequantize(fmt.quantize(x))
    if not share or not x.numel():
        return first.to(x.dtype)
    residual = x.float() - first
    second = fmt.dequantize(fmt.quantize(residual))
    return (first + torch.where(selected(residual, share), second, 0.0)).to(x.dtype)


def selected(residual: Tensor, share: float) -> Tensor:
    """Bool [M, C]: each row's `round(share * C)` largest magnitudes (one at least), and those that equal the last."""
    count = max(1, round(share * residual.shape[1]))
    magnitude = residual.abs()
    smallest = magnitude.topk(count, dim=1).values.amin(dim=1, keepdim=True)
    return ~(magnitude < smallest)  # NaN is selected: it must come through
