"""From the partial sums of the qkv linear to queries for attention and K/V in their pages, in one launch.

    parts [S, N, (H + 2 K) D]  ->  q [N, H, D]     and, at slots[n] of the pages, K and V of token n: packed codes and
                                                   block scales (FP4), bytes (FP8) or values (none)

As torch operators this is QK-norm, RoPE, rotation, quantisation, packing and two scatters: about forty launches over
tensors of a few hundred KB. Here one program, one warp, takes one head of one token: D elements in registers, one
load of the row and of cos/sin, one store. Heads do not meet, so programs need nothing from each other.

RoPE pairs element d with d + D / 2. The partner is not shuffled over but loaded and normalised a second time: it comes
from L1, and any even D works, also those whose half is no power of two.

Casts are torch's: the linear's output in the compute dtype, the norm's result in the wider of it and the gain's, RoPE's
in the wider of that and cos's, each product and sum rounded.

What was left out: partial rotary embeddings (cos narrower than D), which no family of the fused decoder has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.hadamard import ROTATION_BLOCK, butterflies, rotate_reference
from trace_kernels.kv_pages import KVPages
from trace_kernels.quantize import get_format
from trace_kernels.rms_norm import rms_norm_reference
from trace_kernels.rotary import rotary_reference
from trace_kernels.rows import TRITON_DTYPE, e4m3_byte, format_words, load_sum, round_to, sum_parts


def _store(pages: KVPages, slots_N: Tensor, x_NHD: Tensor) -> None:
    if pages.fmt is None:
        pages.store_values(slots_N, x_NHD)
    else:
        pages.store(slots_N, pages.fmt.quantize(x_NHD, pages.outer))


def _norm_dtype(gain: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    return dtype if gain is None else torch.promote_types(dtype, gain.dtype)


def kv_append_reference(
    parts: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_data: Tensor,
    k_scale: Tensor | None,
    k_outer: Tensor | None,
    v_data: Tensor,
    v_scale: Tensor | None,
    v_outer: Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
    rotated: bool,
    fmt: str,
    four_over_six: bool,
) -> Tensor:
    """Torch reference of `kv_append`; pages are their tensors here, a format its name."""
    num_kv_heads, head_dim = k_data.shape[1], cos.shape[1]
    qkv = sum_parts(parts, dtype).unflatten(-1, (-1, head_dim))
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q = q if q_gain is None else rms_norm_reference(q, q_gain, eps)
    k = k if k_gain is None else rms_norm_reference(k, k_gain, eps)
    q, k = (rotary_reference(x.unsqueeze(2), cos.unsqueeze(1), sin.unsqueeze(1)).squeeze(2) for x in (q, k))
    if rotated:
        q, k = rotate_reference(q), rotate_reference(k)
    block_format, active = get_format(fmt, four_over_six=four_over_six), slots >= 0
    _store(KVPages(block_format, k_data, k_scale, k_outer, head_dim), slots[active], k[active])
    _store(KVPages(block_format, v_data, v_scale, v_outer, head_dim), slots[active], v[active])
    return q


@triton.jit
def _rope_head(
    PARTS,
    GAIN,
    COS,
    SIN,
    d,
    D,
    eps,
    inverse_D,
    stride_S,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    ROPE_DTYPE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    inside, first = d < D, d < D // 2
    partner = tl.where(first, d + D // 2, d - D // 2)
    x = load_sum(PARTS, d, inside, stride_S, S, DTYPE)
    y = load_sum(PARTS, partner, inside, stride_S, S, DTYPE)
    if GAIN is not None:
        scale = tl.rsqrt(tl.sum(x * x, 0) * inverse_D + eps)
        x_gain = tl.load(GAIN + d, mask=inside, other=0.0).to(tl.float32)
        y_gain = tl.load(GAIN + partner, mask=inside, other=0.0).to(tl.float32)
        x = round_to(x_gain * round_to(x * scale, DTYPE), NORM_DTYPE)
        y = round_to(y_gain * round_to(y * scale, DTYPE), NORM_DTYPE)
    cos = tl.load(COS + d, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + d, mask=inside, other=0.0).to(tl.float32)
    x = round_to(x * cos, ROPE_DTYPE) + round_to(tl.where(first, y * -1.0, y) * sin, ROPE_DTYPE)
    x = round_to(x, ROPE_DTYPE)
    if ROTATED:
        x = round_to(butterflies(x, BLOCK_D) * 0.25, ROPE_DTYPE)
    return x


@triton.jit
def _store_head(
    x,  # FP32 [BLOCK_D], zero beyond D
    d,
    place,  # number of the (page, head, offset), int64
    head,
    DATA,
    SCALE,
    OUTER,
    D,
    FMT: tl.constexpr,
    FOUR: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    if FMT == "none":
        tl.store(DATA + place * D + d, x.to(DATA.dtype.element_ty), mask=d < D)
    elif FMT == "fp8":
        inverse = tl.math.div_rn(tl.full((1,), 1.0, tl.float32), tl.load(OUTER + head + tl.arange(0, 1)))
        tl.store(DATA + place * D + d, e4m3_byte(x * inverse).to(tl.uint8), mask=d < D)
    else:
        B: tl.constexpr = 16 if FMT == "nvfp4" else 32
        g, h = tl.arange(0, BLOCK_D // B), tl.arange(0, BLOCK_D // 2)
        blocks = tl.cdiv(D, B)
        x_RGB = tl.reshape(x, (1, BLOCK_D // B, B))
        if FMT == "nvfp4":
            codes, scale = fp4.quantize_nvfp4(x_RGB, tl.load(OUTER + head + tl.arange(0, 1)), FOUR)
        else:
            codes, scale = fp4.quantize_mxfp4(x_RGB)
        packed = tl.reshape(fp4.pack_codes(codes), (BLOCK_D // 2,))
        width = blocks * (B // 2)
        tl.store(DATA + place * width + h, packed, mask=h < width)
        tl.store(SCALE + place * blocks + g, tl.reshape(scale, (BLOCK_D // B,)).to(tl.uint8), mask=g < blocks)


@triton.jit
def kv_append_kernel(
    PARTS,
    Q_GAIN,
    K_GAIN,
    COS,
    SIN,
    SLOTS,
    Q,
    K_DATA,
    K_SCALE,
    K_OUTER,
    V_DATA,
    V_SCALE,
    V_OUTER,
    eps,
    inverse_D,
    stride_S,
    H,
    K,
    D,
    PAGE: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr,
    ROTATED: tl.constexpr,
    FMT: tl.constexpr,
    FOUR: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens, H + 2 K)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ROPE_DTYPE: tl.constexpr = Q.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    PARTS += (token * (H + 2 * K) + head) * D
    COS += token * D
    SIN += token * D
    if head < H:
        x = _rope_head(
            PARTS, Q_GAIN, COS, SIN, d, D, eps, inverse_D, stride_S, S, DTYPE, NORM_DTYPE, ROPE_DTYPE, ROTATED, BLOCK_D
        )
        tl.store(Q + (token * H + head) * D + d, x.to(ROPE_DTYPE), mask=d < D)
    else:
        slot = tl.load(SLOTS + token)
        if slot >= 0:
            kv_head = (head - H) % K
            place = (slot // PAGE * K + kv_head) * PAGE + slot % PAGE
            if head < H + K:
                x = _rope_head(
                    PARTS,
                    K_GAIN,
                    COS,
                    SIN,
                    d,
                    D,
                    eps,
                    inverse_D,
                    stride_S,
                    S,
                    DTYPE,
                    NORM_DTYPE,
                    ROPE_DTYPE,
                    ROTATED,
                    BLOCK_D,
                )
                _store_head(x, d, place, kv_head, K_DATA, K_SCALE, K_OUTER, D, FMT, FOUR, BLOCK_D)
            else:
                x = load_sum(PARTS, d, d < D, stride_S, S, DTYPE)
                _store_head(x, d, place, kv_head, V_DATA, V_SCALE, V_OUTER, D, FMT, FOUR, BLOCK_D)


def kv_append_triton(
    parts: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_data: Tensor,
    k_scale: Tensor | None,
    k_outer: Tensor | None,
    v_data: Tensor,
    v_scale: Tensor | None,
    v_outer: Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
    rotated: bool,
    fmt: str,
    four_over_six: bool,
) -> Tensor:
    """Triton twin of `kv_append_reference`."""
    q = _empty_queries(parts, q_gain, cos, num_heads, dtype)
    num_kv_heads, page_size, (tokens, head_dim) = k_data.shape[1], k_data.shape[2], cos.shape
    if tokens == 0:
        return q
    kv_append_kernel[tokens, num_heads + 2 * num_kv_heads](
        *(parts.contiguous(), q_gain, k_gain, cos.contiguous(), sin.contiguous(), slots, q),
        *(k_data, k_scale, k_outer, v_data, v_scale, v_outer),
        *(eps, 1.0 / head_dim, parts[0].numel(), num_heads, num_kv_heads, head_dim),
        PAGE=page_size,
        S=parts.shape[0],
        DTYPE=TRITON_DTYPE[dtype],
        NORM_DTYPE=TRITON_DTYPE[_norm_dtype(q_gain, dtype)],
        ROTATED=rotated,
        FMT=fmt,
        FOUR=four_over_six,
        BLOCK_D=max(32, triton.next_power_of_2(head_dim)),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return q


def _empty_queries(parts: Tensor, q_gain: Tensor | None, cos: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    result = torch.promote_types(_norm_dtype(q_gain, dtype), cos.dtype)
    return parts.new_empty((parts.shape[1], num_heads, cos.shape[1]), dtype=result)


_MUTATED = ("k_data", "k_scale", "v_data", "v_scale")
_kv_append = torch.library.custom_op("trace_kernels::kv_append", kv_append_reference, mutates_args=_MUTATED)
_kv_append.register_kernel("cuda")(kv_append_triton)


@_kv_append.register_fake
def _(parts: Tensor, q_gain: Tensor | None, k_gain: Any, eps: Any, cos: Tensor, *rest: Any) -> Tensor:
    *_, num_heads, dtype, _rotated, _fmt, _four = rest
    return _empty_queries(parts, q_gain, cos, num_heads, dtype)


def kv_append(
    parts: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k: KVPages,
    v: KVPages,
    *,
    num_heads: int,
    dtype: torch.dtype,
    rotated: bool = False,
) -> Tensor:
    """Queries for attention; K and V of the same tokens are quantised and put into their pages.

    Args:
        parts: [S, N, (num_heads + 2 K) D], q then k then v: FP32 sums, or S = 1 in `dtype`.
        q_gain: [D], gain of the norm over each query head, or None.
        k_gain: [D], of each key head; None exactly if `q_gain` is.
        eps: of both norms.
        cos: [N, D] of the rotary embedding, half-split layout.
        sin: [N, D].
        slots: int64 [N], the tokens' places; a token with a negative one is not stored.
        k: pages of K, with their outer scales set.
        v: pages of V, in the same format.
        num_heads: query heads.
        dtype: compute dtype: of the qkv linear.
        rotated: multiply blocks of 16 of q and k by the orthonormal Hadamard matrix.

    Returns:
        [N, num_heads, D] in the dtype to which torch promotes `dtype`, the gain's and cos's.

    Raises:
        ValueError: if shapes, formats or dtypes do not fit each other.
    """
    head_dim, num_kv_heads = k.head_dim, k.data.shape[1]
    if k.fmt != v.fmt:
        raise ValueError(f"K in {k.fmt} and V in {v.fmt}: one layer's cache has one format")
    if parts.shape[2] != (num_heads + 2 * num_kv_heads) * head_dim or cos.shape != (parts.shape[1], head_dim):
        raise ValueError(
            f"parts {tuple(parts.shape)} and cos {tuple(cos.shape)} do not belong to {num_heads} + 2 x {num_kv_heads} "
            f"heads of {head_dim}: parts is [S, N, (heads + 2 KV heads) D], cos [N, D] without a partial rotary factor"
        )
    if head_dim % 2 or (rotated and head_dim % ROTATION_BLOCK):
        raise ValueError(f"head dim {head_dim}: RoPE needs an even one, the rotation a multiple of {ROTATION_BLOCK}")
    if (q_gain is None) != (k_gain is None) or _norm_dtype(q_gain, dtype) != _norm_dtype(k_gain, dtype):
        raise ValueError("q_gain and k_gain must both be given, in one dtype, or neither")
    return _kv_append(
        *(parts, q_gain, k_gain, eps, cos, sin, slots),
        *(k.data, k.scale, k.outer, v.data, v.scale, v.outer),
        *(num_heads, dtype, rotated, *format_words(k.fmt)),
    )
