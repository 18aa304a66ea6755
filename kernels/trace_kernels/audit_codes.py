"""Compare a trainer's codes with the rollout's on audited tokens, in one kernel per site.

Of every audited token the rollout kept its full codes. Per token, ten numbers, which add up over tokens:

    elements   before, of these off by one   after, of these off by one      counts of codes that differ
    tokens     gap_before   gap_nearest   gap_after   rollout               squared norms of values and their gaps

`before` is the trainer's nearest rounding on its own scales, `nearest` that on the rollout's scales, `after` what
guidance makes of it. In torch that is a hundred operators per site, and more time than the rounding itself.

What was left out: anything that is kept per element. The sums are taken where the codes are made.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.formats import e2m1_encode, unpack_codes
from trace_kernels.guided_tile import (
    guided_units,
    load_codes,
    nearest_codes,
    pick_code,
    place_tile,
    row_amax,
    tile_constants,
)
from trace_kernels.quantize import BlockFormat, Quantized, _E2M1Format, get_format
from trace_kernels.round_values import Guide, guided_codes
from trace_kernels.rows import format_words

SUMS = 10


def compare_codes(x: Tensor, used: Quantized, rolled: Tensor, own: Quantized, fmt: BlockFormat) -> Tensor:
    """The ten numbers of each token, FP32 [A, 10].

    Args:
        x: [A, (H,) D], the trainer's input.
        used: its codes on the rollout's scales.
        rolled: uint8 [A, (H,) Dp], the rollout's codes.
        own: nearest codes on own scales.
        fmt: NVFP4 or MXFP4.
    """
    assert isinstance(fmt, _E2M1Format)
    assert used.scale is not None
    target_index = _signed_index(rolled)
    counts = [torch.full_like(rolled, 1)]
    for codes in (own.codes, used.codes):
        step = (_signed_index(codes) - target_index).abs()
        counts += [step > 0, step == 1]
    nearest = e2m1_encode(fmt.normalize(x, used.scale, used.outer)).flatten(-2)
    target = fmt.dequantize(replace(used, codes=rolled))
    values = (fmt.dequantize(own), fmt.dequantize(replace(used, codes=nearest)), fmt.dequantize(used))
    squares = [(value - target).square() for value in values] + [target.square()]
    columns = [part.flatten(1).sum(1, dtype=torch.float32) for part in (*counts, *squares)]
    columns.insert(5, torch.ones_like(columns[0]))
    return torch.stack(columns, 1)


def _signed_index(codes: Tensor) -> Tensor:
    """E2M1 codes as -7..7, so that neighbours differ by one."""
    index = (codes & 7).to(torch.int16)
    return torch.where(codes > 7, -index, index)


@triton.jit
def _signed(code):
    """Codes (int32) as -7..7."""
    return tl.where(code > 7, 8 - code, code)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(tl.sum(x, 2), 1), 0)


@triton.jit
def _differ(code, rolled, whole):
    """How many codes differ, and how many of these by one."""
    step = tl.where(whole, tl.abs(_signed(code) - _signed(rolled)), 0)
    return _total((step > 0).to(tl.int32)), _total((step == 1).to(tl.int32))


@triton.jit
def _squares(gap, inside):
    return _total(tl.where(inside, gap * gap, 0.0))


@triton.jit
def _store_counts(OUT, elements, before, before_one, after, after_one):
    """The first five numbers, and that this is one token."""
    tl.store(OUT, elements)
    tl.store(OUT + 1, before * 1.0)
    tl.store(OUT + 2, before_one * 1.0)
    tl.store(OUT + 3, after * 1.0)
    tl.store(OUT + 4, after_one * 1.0)
    tl.store(OUT + 5, 1.0)


@triton.jit(do_not_specialize_on_alignment=["SCALE", "CODES", "OUTER", "AUDIT"])
def audit_codes_kernel(
    X,
    TOKENS,
    ENTRIES,
    AUDIT,
    ROW,
    SCALE,
    CODES,
    OUTER,
    OUT,
    stride_audit,
    stride_scale,
    stride_codes,
    stride_outer,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    FOUR: tl.constexpr,
    FULL: tl.constexpr,
    BITS: tl.constexpr,
    OUTER_PER_HEAD: tl.constexpr,
):
    """Grid (audited tokens). Elements as [G, B / 8, 8]."""
    BLOCKS: tl.constexpr = HEADS * ((D + B - 1) // B)
    a = tl.program_id(0).to(tl.int64)
    token = tl.load(TOKENS + a)
    row = tl.load(ROW + token)
    X += token * (HEADS * D)
    AUDIT += tl.load(ENTRIES + a) * stride_audit
    SCALE += row * stride_scale
    CODES += row * stride_codes
    if OUTER is not None and not OUTER_PER_HEAD:
        OUTER += row * stride_outer
    amax = row_amax(X, HEADS * D, G * B)
    before, before_one, after, after_one = 0, 0, 0, 0
    gap_before, gap_nearest, gap_after, rollout = 0.0, 0.0, 0.0, 0.0
    for start in range(0, BLOCKS, G):
        g, at, whole, inside = place_tile(start, D, HEADS, B, G)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        z, scale_G, outer_G = guided_units(x, SCALE, OUTER, stride_outer, g, D, HEADS, B, BITS, OUTER_PER_HEAD)
        own_outer_G = outer_G
        if OUTER is not None and not OUTER_PER_HEAD:
            own_outer_G = fp4.outer_from_amax(tl.zeros((G,), tl.float32) + amax, 1536.0 if FOUR else 2688.0)
        own, own_scale = nearest_codes(tl.reshape(x, (G, 1, B)), own_outer_G, B, FOUR)
        own = tl.reshape(own, (G, B // 8, 8))
        used = pick_code(z, CODES, g, whole, B, FULL)
        rolled = load_codes(AUDIT, g, whole, B)

        differ, by_one = _differ(own, rolled, whole)
        before, before_one = before + differ, before_one + by_one
        differ, by_one = _differ(used, rolled, whole)
        after, after_one = after + differ, after_one + by_one
        unit, factor = outer_G[:, None, None], scale_G[:, None, None]
        target = (fp4.e2m1_value(rolled) * factor) * unit
        own_value = (fp4.e2m1_value(own) * own_scale[:, :, None]) * own_outer_G[:, None, None]
        gap_before += _squares(own_value - target, inside)
        gap_nearest += _squares((fp4.e2m1_value(fp4.e2m1_encode(z)) * factor) * unit - target, inside)
        gap_after += _squares((fp4.e2m1_value(used) * factor) * unit - target, inside)
        rollout += _squares(target, inside)
    OUT += a * 10
    _store_counts(OUT, BLOCKS * B * 1.0, before, before_one, after, after_one)
    tl.store(OUT + 6, gap_before)
    tl.store(OUT + 7, gap_nearest)
    tl.store(OUT + 8, gap_after)
    tl.store(OUT + 9, rollout)


def audit_codes_reference(
    x: Tensor,
    tokens: Tensor,
    entries: Tensor,
    audit: Tensor,
    row: Tensor,
    scale: Tensor,
    codes: Tensor,
    outer: Tensor | None,
    fmt: str,
    four_over_six: bool,
    per_token: bool,
    full: bool,
    scale_bits: bool,
) -> Tensor:
    """`audit_codes` in torch; a format is its name and `four_over_six` here, a guide its fields."""
    block_format = get_format(fmt, four_over_six=four_over_six)
    assert block_format is not None
    guide = Guide(row, scale, codes, outer, per_token, full, scale_bits).followed(tokens)
    x = x[tokens]
    used = guided_codes(x, guide, block_format)
    own = block_format.quantize(x, None if per_token else used.outer)
    return compare_codes(x, used, unpack_codes(audit[entries]), own, block_format)


def audit_codes_triton(
    x: Tensor,
    tokens: Tensor,
    entries: Tensor,
    audit: Tensor,
    row: Tensor,
    scale: Tensor,
    codes: Tensor,
    outer: Tensor | None,
    fmt: str,
    four_over_six: bool,
    per_token: bool,
    full: bool,
    scale_bits: bool,
) -> Tensor:
    """Triton twin of `audit_codes_reference`."""
    x = x.contiguous()
    assert all(table[:1].is_contiguous() for table in (scale, codes, audit)), "dense within a row"
    out = torch.empty(len(tokens), SUMS, dtype=torch.float32, device=x.device)
    audit_codes_kernel[(len(tokens),)](
        *(x, tokens, entries, audit, row, scale, codes, outer, out),
        *(0 if table is None else table.stride(0) for table in (audit, scale, codes, outer)),
        **tile_constants(x, fmt),
        FOUR=four_over_six,
        FULL=full,
        BITS=scale_bits,
        OUTER_PER_HEAD=not per_token,
        enable_fp_fusion=False,
    )
    return out


_AUDIT = torch.library.custom_op(
    "trace_kernels::audit_codes", audit_codes_reference, mutates_args=(), device_types="cpu"
)
_AUDIT.register_kernel("cuda")(audit_codes_triton)
_AUDIT.register_fake(lambda x, tokens, *rest: x.new_empty(len(tokens), SUMS, dtype=torch.float32))


def audit_codes(x: Tensor, fmt: BlockFormat, guide: Guide, tokens: Tensor, audit: Tensor, entries: Tensor) -> Tensor:
    """Sums over audited tokens, FP64 [10], in the order at the top of this file.

    Args:
        x: [N, (H,) D], the trainer's input at a site.
        fmt: NVFP4 or MXFP4.
        guide: the rollout's record, as for `round_values`.
        tokens: int64 [A], A > 0, positions in `x` that follow a row.
        audit: uint8 [E, (H,) Dp / 2], the rollout's full codes.
        entries: int64 [A], entries of `audit`.
    """
    tables = guide.row, guide.scale, guide.codes, guide.outer
    flags = guide.per_token, guide.full, guide.scale_bits
    sums = _AUDIT(x, tokens, entries, audit, *tables, *format_words(fmt), *flags).double().sum(0)
    if guide.scale_bits:
        sums[5:] = 0  # the scales are the trainer's reading of one bit: the rollout's values are not known
    return sums
