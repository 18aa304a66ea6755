"""K and V on their way into attention: rotation, and the FP32 outer scale per KV head.

The outer scale must be known before a token is generated and must not depend on data that only one side sees. It is
therefore derived from the weights: a normalised input of width H has length at most sqrt(H), so a row w of W_k or W_v
yields at most |w * g| sqrt(H) + |b| (Cauchy-Schwarz, g the norm's gain), and RoPE and rotations preserve length. The
bound is loose by a factor of about sqrt(H) / 4, which a block scale with 15 octaves of range absorbs. It is rounded up
to a power of two, so a change of it never changes a value: only the exponents of the block scales move.

Nothing is calibrated, it follows the weights at every sync (weights x 8, scales x 8), and both sides compute the same.
What was left out: running maxima of K and V, which would have to be sent to the trainer and go stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trace_kernels import BlockFormat
from trace_kernels.hadamard import ROTATION_BLOCK

FALLBACK_OUTER = 2.0**-3  # for attention modules that we cannot read: blocks from .012 to 336 are represented
_HEADROOM = 1.25  # inputs rounded to FP4 can be a little longer than the bound


@dataclass(frozen=True)
class KVWeights:
    """The weights that K and V of one layer come from: the live ones, or those of a snapshot."""

    k: Tensor
    v: Tensor
    k_bias: Tensor | None
    v_bias: Tensor | None
    input_gain: Tensor | None
    k_gain: Tensor | None
    input_bias: Tensor | None = None

    @classmethod
    def of(cls, attention: nn.Module, input_norm: nn.Module | None) -> KVWeights | None:
        """From modules; None without separate `k_proj` and `v_proj`, or if the norm before them is not known."""
        k, v = getattr(attention, "k_proj", None), getattr(attention, "v_proj", None)
        if input_norm is None or not isinstance(k, nn.Linear) or not isinstance(v, nn.Linear):
            return None
        gains = _gain(input_norm), _gain(getattr(attention, "k_norm", None))
        return cls(_weight(k), _weight(v), k.bias, v.bias, *gains, getattr(input_norm, "bias", None))


@torch.no_grad()
def _weight(linear: nn.Linear) -> Tensor:
    """The weight that K or V come from; that of a `QATLinear` may have an adapter beside it."""
    merged = getattr(linear, "merged", None)
    return linear.weight if merged is None else merged()


@torch.no_grad()
def _gain(norm: nn.Module | None) -> Tensor | None:
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return None
    # Gemma's norms multiply by 1 + weight: a vector of ones shows it. For a plain RMSNorm the weight itself stays.
    return torch.maximum(weight.abs(), norm(torch.ones_like(weight)).abs())


@torch.no_grad()
def kv_outer_scales(
    weights: KVWeights | None, num_kv_heads: int, fmt: BlockFormat, *, rotated: bool, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """FP32 outer scales (K, V), each [num_kv_heads, 1]; (None, None) for formats without one.

    Args:
        weights: of the layer; None falls back to `FALLBACK_OUTER`.
        num_kv_heads: KV heads.
        fmt: the cache's format.
        rotated: whether K goes through `rotate`.
        device: of the fallback.
    """
    if not fmt.has_outer:
        return None, None
    if weights is None:
        fallback = torch.full((num_kv_heads, 1), FALLBACK_OUTER, device=device)
        return fallback, fallback
    bounds = (_k_bound(weights, num_kv_heads, rotated), _bound(weights, weights.v, weights.v_bias))
    outers = []
    for bound in bounds:
        outer = fmt.outer_from_amax(bound.view(num_kv_heads, -1).amax(-1, keepdim=True) * _HEADROOM)
        assert outer is not None
        outers.append(outer)
    return outers[0], outers[1]


def _k_bound(weights: KVWeights, num_kv_heads: int, rotated: bool) -> Tensor:
    bound = _bound(weights, weights.k, weights.k_bias).view(num_kv_heads, -1)
    head_dim, gain = bound.shape[1], weights.k_gain
    if gain is not None:  # K is normalised, per head or (OLMo) over all heads: its length is known
        assert gain.numel() in (head_dim, bound.numel()), "an RMSNorm over neither one head nor all of them"
        bound = (gain.abs().float() * gain.numel() ** 0.5).view(-1, head_dim).expand_as(bound)
    first, second = bound.chunk(2, dim=-1)
    bound = (first.square() + second.square()).sqrt().repeat(1, 2)  # RoPE mixes channel i with i + D / 2
    return bound.unflatten(-1, (-1, ROTATION_BLOCK)).norm(dim=-1) if rotated else bound


def _bound(weights: KVWeights, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight.float()
    scaled = weight if weights.input_gain is None else weight * weights.input_gain.float()
    bound = scaled.norm(dim=1) * weight.shape[1] ** 0.5
    for offset in (bias, None if weights.input_bias is None else weight @ weights.input_bias.float()):
        bound = bound if offset is None else bound + offset.float().abs()
    return bound
