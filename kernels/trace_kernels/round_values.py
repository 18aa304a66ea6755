"""Round to FP4 values in one pass, to the nearest or along a rollout's record: what the trainer's forward multiplies.

    x      [N, H, D] or [N, D]  ->  values, same shape, exact in BF16
    own    FP32 [H] or [1]      outer scales that are given (K, V, weights); None: one per row, from its maximum
    guide  row   int64 [N]             entry of the tables that a token follows, or -1: it rounds to nearest
           scale uint8 [R, (H,) n]     n = ceil(D / B) block scales; or their last bits, [R, (H,) ceil(n / 8)]
           codes uint8 [R, (H,) n B / 8]      parity bits; or whole codes, [R, (H,) n B / 2]
           outer FP32  [R], one per token, or [H], the same for all; None for MXFP4

The arithmetic is that of `BlockFormat.quantize`, `round_parity` and `round_full`, and the values are theirs to the bit.
In torch it is some 40 operators per site, each a launch and a pass over FP32 or int32 temporaries: of a 1.7B model on
an H200 they took four fifths of a training step. Here a program takes one token, reads x (twice where it needs the
maximum, the second time from the caches) and 3/16 of a byte per element of the record, and writes the values.

    row[token] < 0:   own maximum -> own block scales -> nearest codes -> values
    else:             scales of the record -> the bracket of two codes -> its bit or code picks one -> values

What was left out: codes as a result. Nobody keeps them: the audit of a few rows rounds those again in torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.formats import unpack_bits, unpack_codes
from trace_kernels.guided_tile import (
    guided_units,
    nearest_codes,
    pick_code,
    place_blocks,
    place_tile,
    row_amax,
    tile_constants,
)
from trace_kernels.quantize import FP8, MXFP4, NVFP4, BlockFormat, Quantized, _E2M1Format, get_format
from trace_kernels.rows import format_words, round_rows


@dataclass(frozen=True)
class Guide:
    """The record of one site and the rows that tokens follow; layout at the top of this file.

    Args:
        row: int64 [N], -1 where a token rounds to nearest.
        scale: block scales, whole or (`scale_bits`) the last bit of each.
        codes: parity bits, or (`full`) whole codes.
        outer: FP32 [R] or [H]; None for MXFP4.
        per_token: whether `outer` is [R].
        full: `codes` holds whole codes.
        scale_bits: `scale` holds bits.
        syndrome: `codes` holds syndromes of the parity bits, to be decoded first (`syndrome_decode.py`).
    """

    row: Tensor
    scale: Tensor
    codes: Tensor
    outer: Tensor | None
    per_token: bool
    full: bool = False
    scale_bits: bool = False
    syndrome: bool = False

    def followed(self, tokens: Tensor) -> Guide:
        """Of the tokens at int64 `tokens` alone, all of which follow a row; tables gathered to them."""
        rows = self.row[tokens]
        outer = self.outer[rows] if self.outer is not None and self.per_token else self.outer
        row = torch.arange(len(rows), device=rows.device)
        return replace(self, row=row, scale=self.scale[rows], codes=self.codes[rows], outer=outer)


def guided_codes(x: Tensor, guide: Guide, fmt: BlockFormat) -> Quantized:
    """Codes and scales of `x` [N, (H,) D] under N guided rows, as `Guide.followed` makes them."""
    assert isinstance(fmt, _E2M1Format), f"{fmt.name} cannot be guided; the recipe should have refused this"
    padded = -(-x.shape[-1] // fmt.block_size) * fmt.block_size
    outer = None if guide.outer is None else guide.outer.unsqueeze(-1)
    scale = guide.scale
    if guide.scale_bits:
        scale = fmt.scale_from_parity(x, outer, unpack_bits(scale, padded // fmt.block_size))
    if guide.full:
        return fmt.round_full(x, scale, outer, unpack_codes(guide.codes))
    return fmt.round_parity(x, scale, outer, unpack_bits(guide.codes, padded))


def round_in_torch(
    x: Tensor, fmt: BlockFormat, outer: Tensor | None, guide: Guide | None, dtype: torch.dtype
) -> Tensor:
    """`round_values` of any format."""
    if guide is None:
        return fmt.dequantize(fmt.quantize(x, outer), dtype)
    out = x.new_empty(x.shape, dtype=dtype)
    guided, rest = (guide.row >= 0).nonzero().squeeze(-1), (guide.row < 0).nonzero().squeeze(-1)
    out[guided] = fmt.dequantize(guided_codes(x[guided], guide.followed(guided), fmt), dtype)
    if len(rest):
        out[rest] = fmt.dequantize(fmt.quantize(x[rest], outer), dtype)
    return out


@triton.jit
def _nearest(
    X,
    OUT,
    OWN,
    own_stride,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    FOUR: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """One token. SOURCE 0: no outer scale, 1: from the token's maximum, 2: given per head."""
    BLOCKS: tl.constexpr = HEADS * ((D + B - 1) // B)
    LIMIT: tl.constexpr = 1536.0 if FOUR else 2688.0
    outer_G = tl.full((G,), 1.0, tl.float32)
    if SOURCE == 1:
        outer_G = fp4.outer_from_amax(tl.zeros((G,), tl.float32) + row_amax(X, HEADS * D, G * B), LIMIT)
    for start in range(0, BLOCKS, G):
        g, begin, first = place_blocks(start, D, B, G)
        lane = tl.arange(0, B)[None, :]
        at = begin[:, None] + lane
        inside = (g < BLOCKS)[:, None] & (first[:, None] + lane < D)
        if SOURCE == 2:
            outer_G = tl.load(OWN + (g // (BLOCKS // HEADS)) * own_stride, mask=g < BLOCKS, other=1.0)
        x = tl.reshape(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), (G, 1, B))
        codes, scale = nearest_codes(x, outer_G, B, FOUR)
        value = (fp4.e2m1_value(codes) * scale[:, :, None]) * outer_G[:, None, None]
        tl.store(OUT + at, tl.reshape(value, (G, B)).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _guided(
    X,
    OUT,
    SCALE,
    CODES,
    OUTER,
    outer_stride,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    FULL: tl.constexpr,
    BITS: tl.constexpr,
    OUTER_PER_HEAD: tl.constexpr,
):
    """One token; SCALE, CODES and (unless per head) OUTER point at the row it follows. Elements as [G, B / 8, 8]."""
    BLOCKS: tl.constexpr = HEADS * ((D + B - 1) // B)
    for start in range(0, BLOCKS, G):
        g, at, whole, inside = place_tile(start, D, HEADS, B, G)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        z, scale_G, outer_G = guided_units(x, SCALE, OUTER, outer_stride, g, D, HEADS, B, BITS, OUTER_PER_HEAD)
        value = fp4.e2m1_value(pick_code(z, CODES, g, whole, B, FULL))
        value = (value * scale_G[:, None, None]) * outer_G[:, None, None]
        tl.store(OUT + at, value.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["OWN", "SCALE", "CODES", "OUTER"])
def round_values_kernel(
    X,
    OUT,
    OWN,
    ROW,
    SCALE,
    CODES,
    OUTER,
    own_stride,
    stride_scale,
    stride_codes,
    stride_outer,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    FOUR: tl.constexpr,
    SOURCE: tl.constexpr,
    FULL: tl.constexpr,
    BITS: tl.constexpr,
    OUTER_PER_HEAD: tl.constexpr,
):
    """Grid (tokens). ROW None: all round to nearest."""
    token = tl.program_id(0).to(tl.int64)
    X += token * (HEADS * D)
    OUT += token * (HEADS * D)
    if ROW is None:
        _nearest(X, OUT, OWN, own_stride, D, HEADS, B, G, FOUR, SOURCE)
    else:
        row = tl.load(ROW + token)
        if row >= 0:
            if OUTER is not None and not OUTER_PER_HEAD:
                OUTER += row * stride_outer
            SCALE += row * stride_scale
            CODES += row * stride_codes
            _guided(X, OUT, SCALE, CODES, OUTER, stride_outer, D, HEADS, B, G, FULL, BITS, OUTER_PER_HEAD)
        else:
            _nearest(X, OUT, OWN, own_stride, D, HEADS, B, G, FOUR, SOURCE)


def round_values_reference(
    x: Tensor,
    own: Tensor | None,
    row: Tensor | None,
    scale: Tensor | None,
    codes: Tensor | None,
    outer: Tensor | None,
    fmt: str,
    four_over_six: bool,
    per_token: bool,
    full: bool,
    scale_bits: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`round_values` in torch; a format is its name and `four_over_six` here, a guide its fields."""
    block_format = get_format(fmt, four_over_six=four_over_six)
    assert block_format is not None
    guide = None
    if row is not None:
        assert scale is not None
        assert codes is not None
        guide = Guide(row, scale, codes, outer, per_token, full, scale_bits)
    return round_in_torch(x, block_format, None if own is None else own.unsqueeze(-1), guide, dtype).contiguous()


def round_values_triton(
    x: Tensor,
    own: Tensor | None,
    row: Tensor | None,
    scale: Tensor | None,
    codes: Tensor | None,
    outer: Tensor | None,
    fmt: str,
    four_over_six: bool,
    per_token: bool,
    full: bool,
    scale_bits: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Triton twin of `round_values_reference`."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if x.numel() == 0:
        return out
    constants = tile_constants(x, fmt)
    assert own is None or own.numel() in (1, constants["HEADS"]), "outer scales of rows are computed, not given"
    assert all(table is None or table[:1].is_contiguous() for table in (scale, codes)), "dense within a row"
    round_values_kernel[(len(x),)](
        *(x, out, own, row, scale, codes, outer),
        0 if own is None or own.numel() == 1 else own.stride(0),
        *(0 if table is None else table.stride(0) for table in (scale, codes, outer)),
        **constants,
        FOUR=four_over_six,
        SOURCE=0 if fmt == "mxfp4" else 1 if own is None else 2,
        FULL=full,
        BITS=scale_bits,
        OUTER_PER_HEAD=not per_token,
        enable_fp_fusion=False,
    )
    return out


_ROUND = torch.library.custom_op(
    "trace_kernels::round_values", round_values_reference, mutates_args=(), device_types="cpu"
)
_ROUND.register_kernel("cuda")(round_values_triton)
_ROUND.register_fake(lambda x, *rest: x.new_empty(x.shape, dtype=rest[-1]))


def round_values(
    x: Tensor,
    fmt: BlockFormat,
    outer: Tensor | None = None,
    *,
    guide: Guide | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`DQ(Q(x))`, without gradient, guided where `guide` has a row.

    Args:
        x: [N, D], or [N, H, D] with one outer scale per head; any float dtype.
        fmt: the number format; guided only NVFP4 and MXFP4, and with `guide.scale_bits` not four-over-six.
        outer: FP32 [H, 1] or [1, 1]; None computes one per row [N, D]. Heads of NVFP4 must have theirs.
        guide: the rollout's record.
        dtype: of the result; that of `x` by default. Values of FP4 are exact in BF16.
    """
    dtype = x.dtype if dtype is None else dtype
    if type(fmt) is FP8 and outer is None and x.dim() == 2:
        return round_rows(x, dtype=dtype, fmt=fmt)
    if type(fmt) not in (NVFP4, MXFP4):  # FP8 under given scales, and formats of users: in torch
        return round_in_torch(x, fmt, outer, guide, dtype)
    assert x.dim() == 2 or outer is not None or not fmt.has_outer, "heads have outer scales of their own"
    name, four_over_six = format_words(fmt)
    own = outer.reshape(-1) if outer is not None and fmt.has_outer else None
    if guide is None:
        return _ROUND(x, own, None, None, None, None, name, four_over_six, False, False, False, dtype)
    flags = guide.per_token, guide.full, guide.scale_bits
    return _ROUND(x, own, guide.row, guide.scale, guide.codes, guide.outer, name, four_over_six, *flags, dtype)
