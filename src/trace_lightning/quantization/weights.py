"""Weights as the rollout holds them, and the outer scale that weights have in common which it holds as one.

    q, k, v (or gate, up)  ->  largest value of all of them  ->  outer scale [1, 1]  ->  DQ(Q(W)) of each

Only formats that are guidable share an outer scale; the others scale each weight by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trace_kernels import BlockFormat
from trace_kernels.round_values import round_values


def peaks(weights: Sequence[Tensor]) -> Tensor:
    """FP32 [n]: the largest absolute value of each weight. A collective if they are cut over ranks."""
    mesh = next((weight.device_mesh for weight in weights if isinstance(weight, DTensor)), None)
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    parts = [part if part.numel() else part.new_zeros(1) for part in parts]  # more ranks than rows
    found = torch.stack(torch._foreach_norm(parts, torch.inf)).float()
    if mesh is not None:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    return found


def shared_outer(weights: Sequence[Tensor], fmt: BlockFormat) -> Tensor | None:
    """FP32 [1, 1]: the outer scale of weights that are rounded as one; None for formats that share none."""
    return fmt.outer_from_amax(peaks(weights).amax().reshape(1, 1)) if fmt.guidable else None


def quantized_weight(
    weight: Tensor, fmt: BlockFormat, outer: Tensor | None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """`DQ(Q(W))` in `dtype`, that of the weight by default; `outer` as `shared_outer` gives it."""
    return round_values(weight, fmt, outer, dtype=dtype)
