"""Quantise to packed FP4 on the device: weights in place at every sync, activations row by row.

    x [M, K]  ->  qdata  uint8 [M, Kp / 2]    two codes a byte, element 2i in the low nibble, Kp = K in whole blocks
                  scale  uint8 [M, Kp / B]    E4M3 over B = 16 (NVFP4) or E8M0 over B = 32 (MXFP4)
                  outer  FP32 [M, 1]          per row, or [1, 1] over a fused group of weights; none for MXFP4
                  parity uint8 [M, Kp / 8]    the lowest bit of each code, on request

The bytes are those of `BlockFormat.quantize`, `pack_codes` and `pack_bits`; the arithmetic is in `fp4.py`. Codes of a
block with a non-finite value are undefined: its scale byte tells.

A Hopper GPU can spend about 30 instructions per BF16 element before a quantiser becomes slower than its memory, and the
rounding alone takes half of them. So a block never leaves one thread: it is loaded as pieces of 16 bytes and joined in
registers, and neither its maximum nor its packing needs another lane.

    thread t:   | piece | piece | ...    = block t, 16 or 32 elements    ->  8 or 16 bytes of codes, one scale byte

Bytes moved, per element of the master: `requantize_` reads it twice (the amax of the whole group comes first, and stays
on the device, so that nothing waits for the host) and writes 9/16 of a byte plus the dense copy. Rows are read once
from memory and once from the caches. MXFP4 needs no amax.

What was left out: swizzled scales (no kernel of ours multiplies in FP4), and a single pass over weights that guesses
the amax from the last sync: one wrong guess, and the two sides of RL part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.formats import pack_bits, pack_codes
from trace_kernels.launch import num_multiprocessors
from trace_kernels.quantize import BlockFormat, get_format

# SOURCE of the kernel: where the outer scale comes from.
_NONE, _OF_ROW, _GIVEN, _OF_AMAX = range(4)
_AMAX_TILE = 4096


@dataclass
class PackedRows:
    """What `quantize_rows` returns; layout at the top of this file."""

    qdata: Tensor
    scale: Tensor
    outer: Tensor | None
    parity: Tensor | None


@triton.jit
def _load_block(pointer, left, N: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr):
    """FP32 [R, G, N] from `pointer` [R, G, 1] on, all N in one thread: halves down to the V elements of one load.

    `left` [R, G, 1] is how many elements there are; a piece is whole or absent, absent ones read as 0.
    """
    if N == V:
        pieces = pointer + tl.arange(0, V)[None, None, :]
        x = (tl.load(pieces, mask=left > 0, other=0.0) if MASKED else tl.load(pieces)).to(tl.float32)
    else:
        low = _load_block(pointer, left, N // 2, V, MASKED)
        high = _load_block(pointer + N // 2, left - N // 2, N // 2, V, MASKED)
        x = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (low.shape[0], low.shape[1], N))
    return x


@triton.jit
def _store_block(pointer, x, left, N: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr):
    """The way back: [R, G, N] out of one thread, V elements at a time."""
    R: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    if N == V:
        pieces = pointer + tl.arange(0, V)[None, None, :]
        if MASKED:
            tl.store(pieces, x, mask=left > 0)
        else:
            tl.store(pieces, x)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (R, G, 2, N // 2)), (0, 1, 3, 2)))
        _store_block(pointer, low, left, N // 2, V, MASKED)
        _store_block(pointer + N // 2, high, left - N // 2, N // 2, V, MASKED)


@triton.jit
def _amax_kernel(X, AMAX, numel, TILE: tl.constexpr):
    """Raise AMAX, int32 bits of FP32, to max |x|: bits of magnitudes are ordered like the magnitudes, NaN on top."""
    peak = tl.zeros((TILE,), tl.int32)
    for start in range(tl.program_id(0) * TILE, numel, tl.num_programs(0) * TILE):
        i = start + tl.arange(0, TILE)
        peak = tl.maximum(peak, fp4.abs_bits(tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)))
    tl.atomic_max(AMAX, tl.max(peak, 0))


@triton.jit
def _load_tile(X, row_R, g_G, inside_R, K: tl.constexpr, B: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr):
    """FP32 [R, G, B]: blocks `g_G` of rows `row_R`, zeros beyond the ends; with it the elements left to each block."""
    left = tl.where(inside_R[:, None], K - g_G[None, :] * B, 0)[:, :, None]
    return _load_block(X + row_R[:, None, None] * K + g_G[None, :, None] * B, left, B, V, MASKED), left


@triton.jit
def _outer_scales(
    X,
    OUTER_IN,
    outer_stride,
    row_R,
    inside_R,
    K: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    LIMIT: tl.constexpr,
    SOURCE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """FP32 [R]. SOURCE 0: ones, 1: from the row's own amax, 2: given, 3: from the bits of one amax."""
    R: tl.constexpr = row_R.shape[0]
    if SOURCE == 1:
        peak = tl.zeros((R, G), tl.int32)
        for start in range(0, (K + B - 1) // B, G):
            x, _ = _load_tile(X, row_R, start + tl.arange(0, G), inside_R, K, B, V, MASKED)
            peak = tl.maximum(peak, tl.max(fp4.abs_bits(x), 2))
        outer = fp4.outer_from_amax(tl.max(peak, 1).to(tl.float32, bitcast=True), LIMIT)
    elif SOURCE == 2:
        outer = tl.load(OUTER_IN + row_R * outer_stride, mask=inside_R, other=1.0)
    elif SOURCE == 3:
        amax = tl.load(OUTER_IN + tl.zeros((R,), tl.int32))
        outer = fp4.outer_from_amax(amax.to(tl.float32, bitcast=True), LIMIT)
    else:
        outer = tl.full((R,), 1.0, tl.float32)
    return outer


@triton.jit
def _quantize_kernel(
    X,
    OUTER_IN,
    QDATA,
    SCALE,
    OUTER,
    PARITY,
    DENSE,
    rows,
    outer_stride,
    K: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    V_DENSE: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SOURCE: tl.constexpr,
    HAS_PARITY: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One program: R rows, G blocks at a time. V_DENSE 0: no dense copy."""
    LIMIT: tl.constexpr = 1536.0 if FOUR_OVER_SIX else 2688.0
    GROUPS: tl.constexpr = (K + B - 1) // B
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = row < rows
    outer = _outer_scales(X, OUTER_IN, outer_stride, row, inside, K, B, G, V, LIMIT, SOURCE, MASKED)
    if SOURCE % 2 == 1:  # of the whole group: each part writes the same value
        tl.store(OUTER + row, outer, mask=inside if SOURCE == 1 else row == 0)

    for start in range(0, GROUPS, G):
        g = start + tl.arange(0, G)
        x, left = _load_tile(X, row, g, inside, K, B, V, MASKED)
        if SOURCE == 0:
            codes, byte = fp4.quantize_mxfp4(x)
        else:
            codes, byte = fp4.quantize_nvfp4(x, outer, FOUR_OVER_SIX)
        block = row[:, None] * GROUPS + g[None, :]
        whole = inside[:, None] & (g[None, :] < GROUPS)
        tl.store(SCALE + block, byte.to(tl.uint8), mask=whole)
        packed = QDATA + block[:, :, None] * (B // 2) + tl.arange(0, B // 2)[None, None, :]
        tl.store(packed, fp4.pack_codes(codes), mask=whole[:, :, None])
        if HAS_PARITY:
            bits = PARITY + block[:, :, None] * (B // 8) + tl.arange(0, B // 8)[None, None, :]
            tl.store(bits, fp4.pack_parity(codes), mask=whole[:, :, None])
        if V_DENSE > 0:
            scale = fp4.e8m0_scale_value(byte) if SOURCE == 0 else fp4.e4m3_scale_value(byte)
            value = (fp4.e2m1_value(codes) * scale[:, :, None]) * outer[:, None, None]
            target = DENSE + row[:, None, None] * K + g[None, :, None] * B
            _store_block(target, value.to(DENSE.dtype.element_ty), left, B, V_DENSE, MASKED)


def _fp4(name: str, four_over_six: bool) -> BlockFormat:
    fmt = get_format(name, four_over_six=four_over_six)
    if fmt is None or not fmt.guidable:
        raise ValueError(f"rows are packed to nvfp4 or mxfp4, not {name}")
    return fmt


def _piece(width: int, tensor: Tensor, block_size: int) -> int:
    """Elements of one load: 16 bytes, or less where rows do not start at multiples of them."""
    piece = min(16 // tensor.element_size(), block_size)
    while width % piece or tensor.data_ptr() % (piece * tensor.element_size()):
        piece //= 2
    return piece


def _launch(
    x: Tensor,
    source: int,
    outer_in: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    parity: Tensor | None,
    dense: Tensor | None,
    block_size: int,
    four_over_six: bool,
    *,
    tile: int = 256,
    num_warps: int = 4,
) -> None:
    assert all(t is None or t.is_contiguous() for t in (x, outer_in, qdata, scale, outer, parity, dense))
    rows, width = x.shape
    groups = triton.cdiv(width, block_size)
    g = min(triton.next_power_of_2(groups), tile)
    r = tile // g
    _quantize_kernel[(triton.cdiv(rows, r),)](
        x,
        outer_in,
        qdata,
        scale,
        outer,
        parity,
        dense,
        rows,
        0 if outer_in is None or outer_in.numel() == 1 else 1,
        K=width,
        B=block_size,
        R=r,
        G=g,
        V=_piece(width, x, block_size),
        V_DENSE=0 if dense is None else _piece(width, dense, block_size),
        FOUR_OVER_SIX=four_over_six,
        SOURCE=source,
        HAS_PARITY=parity is not None,
        MASKED=bool(width % (g * block_size) or rows % r),
        num_warps=num_warps,
        enable_fp_fusion=False,  # a fused multiply-add would decide ties of four-over-six
    )


def quantize_rows_reference(
    x: Tensor,
    outer_in: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    parity: Tensor | None,
    fmt: str,
    four_over_six: bool,
) -> None:
    """`quantize_rows` in torch, into given tensors."""
    q = _fp4(fmt, four_over_six).quantize(x, outer_in)
    assert q.scale is not None
    qdata.copy_(pack_codes(q.codes))
    scale.copy_(q.scale)
    if outer is not None:
        assert q.outer is not None
        outer.copy_(q.outer)
    if parity is not None:
        parity.copy_(pack_bits(q.codes & 1))


def quantize_rows_triton(
    x: Tensor,
    outer_in: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    parity: Tensor | None,
    fmt: str,
    four_over_six: bool,
) -> None:
    """`quantize_rows` by one kernel, a few rows per program."""
    source = _NONE if fmt == "mxfp4" else _OF_ROW if outer_in is None else _GIVEN
    block_size = _fp4(fmt, four_over_six).block_size
    _launch(x.contiguous(), source, outer_in, qdata, scale, outer, parity, None, block_size, four_over_six)


_ROWS = torch.library.custom_op(
    "trace_kernels::quantize_rows",
    quantize_rows_triton,
    mutates_args=("qdata", "scale", "outer", "parity"),
    device_types="cuda",
    schema="(Tensor x, Tensor? outer_in, Tensor(a!) qdata, Tensor(b!) scale, Tensor(c!)? outer, Tensor(d!)? parity, "
    "str fmt, bool four_over_six) -> ()",
)
_ROWS.register_kernel("cpu", quantize_rows_reference)
_ROWS.register_fake(lambda *args: None)


def quantize_rows(
    x_MK: Tensor,
    fmt: BlockFormat,
    outer: Tensor | None = None,
    *,
    with_parity: bool = False,
    out: PackedRows | None = None,
) -> PackedRows:
    """Quantise each row of `x_MK` to packed FP4.

    Args:
        x_MK: FP32, BF16 or FP16 [M, K].
        fmt: NVFP4 or MXFP4.
        outer: powers of two, FP32 [M, 1] or [1, 1]; None computes one per row. MXFP4 ignores it.
        with_parity: also return the parity bits.
        out: preallocated results to write into, at any address.

    Raises:
        ValueError: for another format.
    """
    _fp4(fmt.name, False)
    computes_outer = fmt.has_outer and outer is None
    if out is None:
        rows, groups = x_MK.shape[0], -(-x_MK.shape[1] // fmt.block_size)
        out = PackedRows(
            qdata=x_MK.new_empty(rows, groups * fmt.block_size // 2, dtype=torch.uint8),
            scale=x_MK.new_empty(rows, groups, dtype=torch.uint8),
            outer=x_MK.new_empty(rows, 1, dtype=torch.float32) if computes_outer else outer if fmt.has_outer else None,
            parity=x_MK.new_empty(rows, groups * fmt.block_size // 8, dtype=torch.uint8) if with_parity else None,
        )
    new_outer = out.outer if computes_outer else None
    _ROWS(x_MK, outer, out.qdata, out.scale, new_outer, out.parity, fmt.name, getattr(fmt, "four_over_six", False))
    return out


def requantize_reference(
    parts: list[Tensor],
    qdata: Tensor | None,
    scale: Tensor | None,
    outer: Tensor | None,
    dense: Tensor | None,
    fmt: str,
    four_over_six: bool,
) -> None:
    """`requantize_` in torch: one call of the format over all parts. FP8 has one scale per row."""
    number_format = get_format(fmt, four_over_six=four_over_six)
    if number_format is None:
        assert dense is not None
        for target, part in zip(dense.split([len(part) for part in parts]), parts, strict=True):
            target.copy_(part)
        return
    whole = torch.cat([part.float() for part in parts])
    per_tensor = whole.abs().amax().reshape(1, 1) if number_format.guidable else whole.abs().amax(-1, keepdim=True)
    q = number_format.quantize(whole, number_format.outer_from_amax(per_tensor))
    packed = pack_codes(q.codes) if number_format.guidable else q.codes
    for target, source in ((qdata, packed), (scale, q.scale), (outer, q.outer)):
        if target is not None and source is not None:
            target.copy_(source)
    if dense is not None:
        dense.copy_(number_format.dequantize(q, dense.dtype))


def requantize_triton(
    parts: list[Tensor],
    qdata: Tensor | None,
    scale: Tensor | None,
    outer: Tensor | None,
    dense: Tensor | None,
    fmt: str,
    four_over_six: bool,
) -> None:
    """`requantize_` by two kernels per part: amax (NVFP4 only), then codes, scales and the dense copy in one pass."""
    if fmt not in ("nvfp4", "mxfp4"):
        requantize_reference(parts, qdata, scale, outer, dense, fmt, four_over_six)
        return
    assert qdata is not None
    assert scale is not None
    parts = [part.contiguous() for part in parts]
    amax = _group_amax(parts) if fmt == "nvfp4" else None
    rows = [part.shape[0] for part in parts]
    dense_parts = [None] * len(parts) if dense is None else dense.split(rows)
    for part, q, s, d in zip(parts, qdata.split(rows), scale.split(rows), dense_parts, strict=True):
        source = _NONE if amax is None else _OF_AMAX
        _launch(part, source, amax, q, s, outer, None, d, 16 if amax is not None else 32, four_over_six)


def _group_amax(parts: list[Tensor]) -> Tensor:
    """int32 [1]: the bits of the largest FP32 magnitude."""
    amax = torch.zeros(1, dtype=torch.int32, device=parts[0].device)
    for part in parts:
        programs = min(triton.cdiv(part.numel(), _AMAX_TILE), 8 * num_multiprocessors(part.device))
        _amax_kernel[(programs,)](part, amax, part.numel(), TILE=_AMAX_TILE)
    return amax


_REQUANTIZE = torch.library.custom_op(
    "trace_kernels::requantize_",
    requantize_triton,
    mutates_args=("qdata", "scale", "outer", "dense"),
    device_types="cuda",
    schema="(Tensor[] parts, Tensor(a!)? qdata, Tensor(b!)? scale, Tensor(c!)? outer, Tensor(d!)? dense, str fmt, "
    "bool four_over_six) -> ()",
)
_REQUANTIZE.register_kernel("cpu", requantize_reference)
_REQUANTIZE.register_fake(lambda *args: None)


def requantize_(
    parts: list[Tensor],
    qdata: Tensor | None,
    scale: Tensor | None,
    outer: Tensor | None,
    dense: Tensor | None,
    fmt: str,
    four_over_six: bool = False,
) -> None:
    """Quantise a fused group of weights under one outer scale, into the storages it has.

    Args:
        parts: masters [N_i, K], FP32, BF16 or FP16; their rows follow each other in the results.
        qdata: uint8 [sum N, Kp / 2], needed for FP4. For FP8 the codes [sum N, K], if wanted.
        scale: uint8 [sum N, Kp / B], needed for FP4.
        outer: FP32 [1, 1] for NVFP4; [sum N, 1], if wanted, for FP8; None for MXFP4.
        dense: [sum N, K] in any float dtype, the dequantised values; the only result of fmt "none".
        fmt: "none", "nvfp4", "mxfp4" or "fp8".
        four_over_six: see `NVFP4`.

    Raises:
        ValueError: if the results do not fit the parts, or are not contiguous.
    """
    _check_group(parts, qdata, scale, outer, dense, fmt)
    _REQUANTIZE(parts, qdata, scale, outer, dense, fmt, four_over_six)


def _check_group(
    parts: list[Tensor],
    qdata: Tensor | None,
    scale: Tensor | None,
    outer: Tensor | None,
    dense: Tensor | None,
    fmt: str,
) -> None:
    rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    expected = {"dense": (dense, (rows, width))}
    number_format = get_format(fmt)
    if number_format is not None and number_format.guidable:
        groups = -(-width // number_format.block_size)
        expected["qdata"] = (qdata, (rows, groups * number_format.block_size // 2))
        expected["scale"] = (scale, (rows, groups))
        expected["outer"] = (outer, (1, 1))
        needed = ["qdata", "scale", *(["outer"] if number_format.has_outer else [])]
    else:
        needed = ["dense"] if fmt == "none" else []
    for name, (tensor, shape) in expected.items():
        found = "nothing" if tensor is None else str(tuple(tensor.shape))
        if tensor is None and name not in needed:
            continue
        if tensor is None or tuple(tensor.shape) != shape:
            raise ValueError(f"{fmt} weights of {rows} x {width} need `{name}` {shape}, found {found}")
        if not tensor.is_contiguous():
            raise ValueError(f"{fmt} weights need `{name}` {shape}, contiguous: strides are {tensor.stride()}")
