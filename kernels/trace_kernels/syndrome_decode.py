"""The rollout's parity bits from their syndrome: the cheapest flips of the trainer's own bits that explain it.

    own bits, costs    of nearest rounding on the record's scales; a flip moves a code to the other end of its bracket,
                       and costs the distance of the value to the bracket's middle times the root of its block scale
    target checks      syndrome of the own bits, exclusive-or the record's: what the flips must add up to
    flips              of least total cost with these checks (`cheapest_flips.py`)

Over a distance d the odds of a flip fall about like exp(-d / noise) (measured), so costs that are distances in units of
the noise add up to a log-likelihood. The noise lies between constant in units of the block scale and constant without
it, hence the root; a common factor of a row does not matter.

The bits are found apart from the guide that they make (`decode_bits`, `guide_by_bits`): a recomputed forward pass
takes the bits of the first, an eighth of a byte per element of each site.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.cheapest_flips import cheapest_flips
from trace_kernels.formats import E2M1_VALUES, e2m1_bracket, pack_bits, unpack_bits
from trace_kernels.guided_tile import guided_units, place_tile, tile_constants
from trace_kernels.quantize import BlockFormat, _E2M1Format, get_format
from trace_kernels.round_values import Guide
from trace_kernels.syndromes import encode


def own_bits_reference(
    x: Tensor,
    row: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    fmt: str,
    per_token: bool,
    scale_bits: bool,
) -> tuple[Tensor, Tensor]:
    """`own_bits` in torch; a guide is its fields."""
    block_format = get_format(fmt)
    assert isinstance(block_format, _E2M1Format)
    scale = scale[row]
    wide = None if outer is None else (outer[row] if per_token else outer).unsqueeze(-1)
    if scale_bits:
        scale = block_format.scale_from_parity(x, wide, unpack_bits(scale, -(-x.shape[-1] // block_format.block_size)))
    z = block_format.normalize(x, scale, wide)
    near, grid = e2m1_bracket(z), torch.tensor(E2M1_VALUES, device=z.device)
    beyond = z.abs() - ((grid[1:] + grid[:-1]) / 2)[near.long()]
    weight = (block_format.decode_scale(scale) * (1.0 if wide is None else wide)).sqrt().unsqueeze(-1)
    cost = torch.nan_to_num(beyond.abs() * weight, nan=0.0, posinf=0.0)
    return pack_bits(((near & 1) ^ (beyond > 0)).flatten(1)), cost.flatten(1).contiguous()


@triton.jit(do_not_specialize_on_alignment=["SCALE", "OUTER"])
def _own_bits_kernel(
    X,
    ROW,
    SCALE,
    OUTER,
    BITS,
    COST,
    stride_scale,
    stride_outer,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    OUTER_PER_HEAD: tl.constexpr,
):
    """Grid (tokens). Elements as [G, B / 8, 8]."""
    BLOCKS: tl.constexpr = HEADS * ((D + B - 1) // B)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ROW + token)
    X += token * (HEADS * D)
    SCALE += row * stride_scale
    if OUTER is not None and not OUTER_PER_HEAD:
        OUTER += row * stride_outer
    for start in range(0, BLOCKS, G):
        g, at, whole, inside = place_tile(start, D, HEADS, B, G)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        z, scale_G, outer_G = guided_units(x, SCALE, OUTER, stride_outer, g, D, HEADS, B, SCALE_BITS, OUTER_PER_HEAD)
        near = fp4.e2m1_bracket(z)
        beyond = tl.abs(z) - (fp4.e2m1_value(near) + fp4.e2m1_value(near + 1)) * 0.5
        cost = tl.abs(beyond) * tl.sqrt_rn(scale_G * outer_G)[:, None, None]
        cost = tl.where(fp4.abs_bits(cost) < 0x7F800000, cost, 0.0)
        bit = (near & 1) ^ (beyond > 0).to(tl.int32)
        packed = tl.sum(bit << tl.arange(0, 8)[None, None, :], 2)
        at_bits = (token * BLOCKS + g[:, None]) * (B // 8) + tl.arange(0, B // 8)[None, :]
        tl.store(BITS + at_bits, packed.to(tl.uint8), mask=(g < BLOCKS)[:, None])
        lane = tl.arange(0, B // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        tl.store(COST + (token * BLOCKS + g[:, None, None]) * B + lane, cost, mask=whole)


def own_bits_triton(
    x: Tensor,
    row: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    fmt: str,
    per_token: bool,
    scale_bits: bool,
) -> tuple[Tensor, Tensor]:
    """Triton twin of `own_bits_reference`."""
    x = x.contiguous()
    assert scale[:1].is_contiguous(), "dense within a row"
    constants = tile_constants(x, fmt)
    width = constants["HEADS"] * triton.cdiv(constants["D"], constants["B"]) * constants["B"]
    bits = torch.empty(len(x), width // 8, dtype=torch.uint8, device=x.device)
    cost = torch.empty(len(x), width, dtype=torch.float32, device=x.device)
    if len(x):
        _own_bits_kernel[(len(x),)](
            *(x, row, scale, outer, bits, cost, scale.stride(0), 0 if outer is None else outer.stride(0)),
            **constants,
            SCALE_BITS=scale_bits,
            OUTER_PER_HEAD=not per_token,
            enable_fp_fusion=False,
        )
    return bits, cost


_OWN = torch.library.custom_op("trace_kernels::own_bits", own_bits_reference, mutates_args=(), device_types="cpu")
_OWN.register_kernel("cuda")(own_bits_triton)


@_OWN.register_fake
def _(x: Tensor, row: Tensor, scale: Tensor, outer: Any, fmt: str, *_: Any) -> tuple[Tensor, Tensor]:
    block_size = 16 if fmt == "nvfp4" else 32
    width = math.prod(x.shape[1:-1]) * -(-x.shape[-1] // block_size) * block_size
    return x.new_empty(len(x), width // 8, dtype=torch.uint8), x.new_empty(len(x), width, dtype=torch.float32)


@triton.jit
def _flip_bits_kernel(BITS, FLIPS, P: tl.constexpr, BYTES: tl.constexpr, T: tl.constexpr):
    """Grid (rows, tiles of T bytes). BITS are flipped in place; entry p of FLIPS is for elements 3p to 3p + 2."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * T + tl.arange(0, T)
    element = b[:, None] * 8 + tl.arange(0, 8)[None, :]
    sets = tl.load(FLIPS + row * P + element // 3, mask=(b < BYTES)[:, None], other=0).to(tl.int32)
    packed = tl.sum(((sets >> (element % 3)) & 1) << tl.arange(0, 8)[None, :], 1)
    bits = tl.load(BITS + row * BYTES + b, mask=b < BYTES, other=0).to(tl.int32)
    tl.store(BITS + row * BYTES + b, (bits ^ packed).to(tl.uint8), mask=b < BYTES)


def flip_bits_reference(bits: Tensor, flips: Tensor) -> None:
    """`flip_bits_` in torch."""
    single = (flips.unsqueeze(-1) >> torch.arange(3, dtype=torch.uint8, device=flips.device)) & 1
    bits ^= pack_bits(single.flatten(1)[:, : 8 * bits.shape[1]])


def flip_bits_triton(bits: Tensor, flips: Tensor) -> None:
    """Triton twin of `flip_bits_reference`."""
    if len(bits):
        tile = min(triton.next_power_of_2(bits.shape[1]), 128)
        grid = (len(bits), triton.cdiv(bits.shape[1], tile))
        _flip_bits_kernel[grid](bits, flips, P=flips.shape[1], BYTES=bits.shape[1], T=tile)


_FLIP_BITS = torch.library.custom_op(
    "trace_kernels::flip_bits_", flip_bits_reference, mutates_args=("bits",), device_types="cpu"
)
_FLIP_BITS.register_kernel("cuda")(flip_bits_triton)
_FLIP_BITS.register_fake(lambda bits, flips: None)


def decode_bits(x: Tensor, guide: Guide, fmt: BlockFormat) -> Tensor:
    """Parity bits uint8 [N, (H,) Dp / 8], one row per token of `x`, that a guide of syndromes stands for.

    Nothing waits for the device. Tokens that follow no row are decoded as if they followed the first.

    Args:
        x: [N, (H,) D], the trainer's input at a site.
        guide: `codes` holds the syndromes uint8 [R, `syndrome_bytes(H Dp)`] of rows over all heads.
        fmt: NVFP4 or MXFP4.

    Returns:
        No rows where the record has none.
    """
    heads = x.shape[1:-1]
    if not len(guide.codes) or not len(x):
        return guide.codes.new_zeros(0, *heads, -(-x.shape[-1] // fmt.block_size) * fmt.block_size // 8)
    row = guide.row.clamp(min=0)
    bits, cost = _OWN(x, row, guide.scale, guide.outer, fmt.name, guide.per_token, guide.scale_bits)
    target = encode(bits, cost.shape[1]) ^ guide.codes[row]
    _FLIP_BITS(bits, cheapest_flips(cost, target))
    return bits.view(len(x), *heads, -1)


def guide_by_bits(guide: Guide, bits: Tensor) -> Guide:
    """A guide of syndromes as one of the bits that `decode_bits` found; tokens that follow no row still follow none."""
    if not len(bits):
        return replace(guide, codes=bits, syndrome=False)
    row = guide.row.clamp(min=0)
    place = torch.where(guide.row < 0, guide.row, torch.arange(len(row), device=row.device))
    outer = guide.outer[row] if guide.outer is not None and guide.per_token else guide.outer
    return replace(guide, row=place, scale=guide.scale[row], codes=bits, outer=outer, syndrome=False)
