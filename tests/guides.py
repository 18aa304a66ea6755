"""Inputs of a rollout and of a trainer, and what the rollout would have recorded of its rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trace_kernels import pack_bits, pack_codes
from trace_kernels.round_values import Guide


def inputs(shape: tuple[int, ...], device: str) -> Tensor:
    """Rows over six decades, a zero among the elements, and a row of zeros."""
    x = torch.randn(shape, device=device) * torch.logspace(-3, 3, shape[0], device=device).view(
        -1, *[1] * (len(shape) - 1)
    )
    x[0, ..., 1] = 0.0
    x[-1] = 0.0
    return x


def given(shape: tuple[int, ...], fmt: Any, device: str) -> Tensor | None:
    """Outer scales [H, 1] of heads; None for rows, which have their own."""
    if len(shape) == 2 or not fmt.has_outer:
        return None
    return 2.0 ** -torch.arange(shape[1], device=device).float().unsqueeze(-1)


def recorded(rollout: Tensor, fmt: Any, outer: Tensor | None, *, full: bool, bits: bool, row: Tensor) -> Guide:
    """What a rollout that rounded `rollout` to the nearest would have written, as columns of one wider matrix."""
    q = fmt.quantize(rollout, outer)
    scale = pack_bits(q.scale & 1) if bits else q.scale
    codes = pack_codes(q.codes) if full else pack_bits(q.codes & 1)
    wide = torch.cat([part.flatten(1) for part in (scale, codes)], 1)
    width = scale.flatten(1).shape[1]
    per_token = rollout.dim() == 2
    return Guide(
        row=row,
        scale=wide[:, :width].view(len(wide), *scale.shape[1:]),
        codes=wide[:, width:].view(len(wide), *codes.shape[1:]),
        outer=None if q.outer is None else q.outer.squeeze(-1),
        per_token=per_token,
        full=full,
        scale_bits=bits,
    )
