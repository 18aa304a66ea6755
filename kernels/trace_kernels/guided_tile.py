"""One tile of a token under a rollout's record, as the trainer's kernels share it: its place, its scales, its codes.

A program takes a token and walks its heads as one row of blocks, G at a time. Tiles are [G, B / 8, 8]: a byte of parity
bits, or four of packed codes, belongs to the last dimension.

    token   | block | block | ...          H heads of n = ceil(D / B) blocks, the last of a head cut at D
    place_tile -> guided_units -> pick_code          z = x / (block scale * outer scale), then the code that is picked

`round_values` turns that into values, `audit_codes` compares it, `syndrome_decode` asks what another pick would cost.
SCALE, CODES and (unless it is per head) OUTER point at the record's row of the token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4

TILE = 2048  # elements of a token that a program takes at a time


def tile_constants(x: Tensor, fmt: str) -> dict[str, int]:
    """D, HEADS, B and G for `x` [N, (H,) D]."""
    heads, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    block_size = 16 if fmt == "nvfp4" else 32
    most = triton.next_power_of_2(heads * triton.cdiv(width, block_size))
    return {"D": width, "HEADS": heads, "B": block_size, "G": min(most, TILE // block_size)}


@triton.jit
def place_blocks(start, D: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """Of blocks `start ... start + G` of a token: their numbers, where they begin in it, and where in their head."""
    n: tl.constexpr = (D + B - 1) // B
    g = start + tl.arange(0, G)
    first = (g % n) * B
    # A plain multiple of B where heads are whole blocks: loads are wide then.
    return g, g * B if D % B == 0 else (g // n) * D + first, first


@triton.jit
def place_tile(start, D: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """Numbers of the blocks [G], offsets of the elements, which blocks there are [G, 1, 1], and which elements."""
    g, begin, first = place_blocks(start, D, B, G)
    lane = tl.arange(0, B // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    whole = (g < HEADS * ((D + B - 1) // B))[:, None, None]
    return g, begin[:, None, None] + lane, whole, whole & (first[:, None, None] + lane < D)


@triton.jit
def row_amax(X, numel: tl.constexpr, T: tl.constexpr):
    """FP32 max |x| of a token; NaN is the largest."""
    peak = tl.zeros((T,), tl.int32)
    for start in range(0, numel, T):
        i = start + tl.arange(0, T)
        peak = tl.maximum(peak, fp4.abs_bits(tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)))
    return tl.max(peak, 0).to(tl.float32, bitcast=True)


@triton.jit
def nearest_codes(x_RGB, outer_R, B: tl.constexpr, FOUR: tl.constexpr):
    """Nearest codes on own scales, and the scales FP32 [R, G]."""
    if B == 16:
        codes, byte = fp4.quantize_nvfp4(x_RGB, outer_R, FOUR)
        scale = fp4.e4m3_scale_value(byte)
    else:
        codes, byte = fp4.quantize_mxfp4(x_RGB)
        scale = fp4.e8m0_scale_value(byte)
    return codes, scale


@triton.jit
def _outer_scales(OUTER, head, inside_G, stride, PER_HEAD: tl.constexpr):
    """FP32 outer scales [G] of the record; ones where OUTER is None."""
    outer_G = tl.full(head.shape, 1.0, tl.float32)
    if OUTER is not None and PER_HEAD:
        outer_G = tl.load(OUTER + head * stride, mask=inside_G, other=1.0)
    elif OUTER is not None:
        outer_G = outer_G * tl.load(OUTER)
    return outer_G


@triton.jit
def _block_scales(SCALE, g, amax_bits_G, outer_G, inside_G, D: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr):
    """FP32 block scales [G]: those recorded, or of the two next to the own ideal one that with the recorded bit."""
    n: tl.constexpr = (D + B - 1) // B
    if BITS:
        k = g % n
        byte = tl.load(SCALE + (g // n) * ((n + 7) // 8) + k // 8, mask=inside_G, other=0).to(tl.int32)
        parity = (byte >> (k % 8)) & 1
        lower = fp4.lower_e4m3_byte(amax_bits_G, outer_G) if B == 16 else fp4.lower_e8m0_byte(amax_bits_G)
        byte = tl.where((lower & 1) == parity, lower, lower + 1)
    else:
        byte = tl.load(SCALE + g, mask=inside_G, other=8).to(tl.int32)
    scale = fp4.e4m3_scale_value(byte) if B == 16 else fp4.e8m0_scale_value(byte)
    return tl.where(amax_bits_G < 0x7F800000, scale, float("nan"))  # x that is not finite must stay visible


@triton.jit
def guided_units(
    x,
    SCALE,
    OUTER,
    outer_stride,
    g,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    BITS: tl.constexpr,
    OUTER_PER_HEAD: tl.constexpr,
):
    """`x` in units of the recorded scales, those block scales and the outer ones, FP32 [G]."""
    n: tl.constexpr = (D + B - 1) // B
    inside_G = g < HEADS * n
    outer_G = _outer_scales(OUTER, g // n, inside_G, outer_stride, OUTER_PER_HEAD)
    amax_bits_G = tl.max(tl.max(fp4.abs_bits(x), 2), 1)
    scale_G = _block_scales(SCALE, g, amax_bits_G, outer_G, inside_G, D, B, BITS)
    inverse_G = tl.math.div_rn(tl.full(g.shape, 1.0, tl.float32), outer_G)
    return x * tl.math.div_rn(inverse_G, scale_G)[:, None, None], scale_G, outer_G


@triton.jit
def load_codes(PACKED, g, whole, B: tl.constexpr):
    """Codes int32 [G, B / 8, 8] of packed blocks `g`."""
    p, h = tl.arange(0, B // 8)[None, :, None], tl.arange(0, 4)[None, None, :]
    packed = tl.load(PACKED + g[:, None, None] * (B // 2) + p * 4 + h, mask=whole, other=0).to(tl.int32)
    return tl.reshape(tl.join(packed & 15, packed >> 4), (g.shape[0], B // 8, 8))


@triton.jit
def pick_code(z, CODES, g, whole, B: tl.constexpr, FULL: tl.constexpr):
    """Codes [G, B / 8, 8]: of the two around z, that nearest the recorded code (FULL) or with the recorded parity."""
    lower = fp4.e2m1_bracket(z)
    if FULL:
        target = fp4.e2m1_value(load_codes(CODES, g, whole, B))
        inner, outward = fp4.signed_code(lower, z), fp4.signed_code(lower + 1, z)
        nearer = tl.abs(fp4.e2m1_value(inner) - target) <= tl.abs(fp4.e2m1_value(outward) - target)
        code = tl.where(nearer, inner, outward)
    else:
        p = tl.arange(0, B // 8)[None, :, None]
        packed = tl.load(CODES + g[:, None, None] * (B // 8) + p, mask=whole, other=0).to(tl.int32)
        bit = (packed >> tl.arange(0, 8)[None, None, :]) & 1
        code = fp4.signed_code(lower + ((lower & 1) ^ bit), z)
    return code
