"""What the producers of a linear's input share: partial sums in; rounded, arranged and recorded rows out.

A linear of a decode step leaves partial sums, and the kernel after it adds them up, computes one row per token, rounds
the row to a block format and writes it in the order in which the next linear reads. Done apart, that is three more
passes over the row and three more launches; `norm.py` and `gated_activation.py` do it on the way, with these pieces.

    parts  [S, M, N]                      FP32 sums of a split linear, or S = 1 in the compute dtype. Added in the order
                                          of s in FP32 and rounded once to the compute dtype: what one matmul returns
    rows   [M, C]                         natural, or
           [ceil(C / 128), 8, M, 16]      permuted: out[kb, j, m, w] = row[m, 128 kb + 8 w + j], zero beyond C. A word
                                          of packed weights holds 8 elements, so this is the operand that meets nibble
                                          j of 16 words, contiguous
    record scale uint8 [M, Cp / block]    outer FP32 [M]    parity uint8 [M, Cp / 8]    codes uint8 [M, Cp / 2]

`round_rows` is the same ending for a row that no kernel of ours computed. It runs on a grid of rows x chunks, and each
program reads its whole row for the maximum: 8 KB from L2 cost less than the launch of a kernel of their own.

What was left out: FP8 by the hardware's conversion. Rounding as integers is a few instructions more, and the bytes are
the same in the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.formats import pack_bits, pack_codes
from trace_kernels.quantize import BlockFormat, get_format

CHUNK = 1024  # elements of a row that one program of a 2-D grid takes; a multiple of 128
# Fields of a record begin at any multiple of 4 bytes: one kernel for all of them.
RECORD_POINTERS = ["SCALE", "OUTER", "PARITY", "CODES"]
RECORD_STRIDES = ["stride_scale", "stride_outer", "stride_parity", "stride_codes"]
TRITON_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def runs_in_triton(x: Tensor) -> bool:
    """Whether the trainer's kernels take `x`; elsewhere, and in FP64, their references do."""
    return x.is_cuda and x.dtype in TRITON_DTYPE


@dataclass(frozen=True)
class RowRecord:
    """Preallocated tensors that receive what the rounding of rows decided; layout at the top of this file."""

    scale: Tensor | None = None
    outer: Tensor | None = None
    parity: Tensor | None = None
    codes: Tensor | None = None


def format_words(fmt: BlockFormat | None) -> tuple[str, bool]:
    """A format as an operator takes it: its name, and whether blocks try amax -> 4 as well."""
    return ("none", False) if fmt is None else (fmt.name, getattr(fmt, "four_over_six", False))


def record_tensors(
    record: RowRecord | None, fmt: BlockFormat | None, rows: int, width: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The fields of `record` for rows [rows, width].

    Raises:
        ValueError: if the format has nothing to record, or a tensor has another shape or dtype than it must have.
    """
    if record is None:
        return None, None, None, None
    if fmt is None or not fmt.guidable:
        raise ValueError(f"format {format_words(fmt)[0]!r} has no codes to record: pass record=None")
    padded = -(-width // fmt.block_size) * fmt.block_size
    shapes = {"scale": (rows, padded // fmt.block_size), "parity": (rows, padded // 8), "codes": (rows, padded // 2)}
    for name, shape in (shapes | {"outer": (rows,)}).items():
        tensor, dtype = getattr(record, name), torch.float32 if name == "outer" else torch.uint8
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or tensor[:1].stride()[1:] > (1,)):
            raise ValueError(
                f"record.{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}: it must be "
                f"{dtype} {shape}, dense within a row"
            )
    if record.outer is not None and not fmt.has_outer:
        raise ValueError(f"{fmt.name} has no outer scale: leave record.outer None")
    return record.scale, record.outer, record.parity, record.codes


def record_strides(*record: Tensor | None) -> tuple[int, ...]:
    """Elements from row to row of each tensor of a record: rows may be columns of one wider matrix."""
    return tuple(0 if tensor is None else tensor.stride(0) for tensor in record)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts [S, ...] to their sum [...] in `dtype`: FP32, in order, rounded once."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def permute_rows(x: Tensor) -> Tensor:
    """Rows [M, C] in the permuted order [ceil(C / 128), 8, M, 16]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    return padded.view(len(x), -1, 16, 8).permute(1, 3, 0, 2).contiguous()


def finish_rows(
    x: Tensor,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Torch reference of the common ending: round rows [M, C] to `fmt`, record, cast, arrange."""
    block_format = get_format(fmt, four_over_six=four_over_six)
    if block_format is not None:
        q = block_format.quantize(x)
        x = block_format.dequantize(q, x.dtype)
        if record_scale is not None and q.scale is not None:
            record_scale.copy_(q.scale)
        if record_outer is not None and q.outer is not None:
            record_outer.copy_(q.outer.squeeze(-1))
        if record_parity is not None:
            record_parity.copy_(pack_bits(q.codes & 1))
        if record_codes is not None:
            record_codes.copy_(pack_codes(q.codes))
    return permute_rows(x.to(dtype)) if permute else x.to(dtype)


def empty_rows(like: Tensor, width: int, dtype: torch.dtype, permute: bool) -> Tensor:
    """Uninitialised output for as many rows as `like` [..., M, anything] has."""
    rows = like.shape[-2]
    shape = (-(-width // 128), 8, rows, 16) if permute else (rows, width)
    return like.new_empty(shape, dtype=dtype)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """FP32 values rounded to DTYPE."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def load_sum(PARTS, at, inside, stride_S, S: tl.constexpr, DTYPE: tl.constexpr):
    """Sum of S parts in order, rounded to DTYPE, as FP32; 0 where not `inside`."""
    total = tl.load(PARTS + at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(S - 1):
        PARTS += stride_S
        total += tl.load(PARTS + at, mask=inside, other=0.0).to(tl.float32)
    return round_to(total, DTYPE)


@triton.jit
def e4m3_byte(z):
    """FP32 to E4M3 bytes (int32), nearest, ties to even, saturating; NaN and infinity give 0x7F."""
    raw = fp4.abs_bits(z)
    bits = tl.minimum(raw, 0x43E00000)  # 448
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # its ulp is 2**-9
    byte = tl.where(bits < 0x3C800000, small, normal) | ((z.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(raw < 0x7F800000, byte, 0x7F)


@triton.jit
def e4m3_value(byte):
    """FP32 values of E4M3 bytes (int32), all of them."""
    index = byte & 0x7F
    normal = tl.where(index == 0x7F, 0x7FC00000, (index + 960) << 20).to(tl.float32, bitcast=True)
    magnitude = tl.where(index < 8, index * 0.001953125, normal)
    return tl.where(byte > 0x7F, magnitude * -1.0, magnitude)  # `-x` is 0 - x in Triton, and loses -0


@triton.jit
def row_outer(amax_bits_R, FMT: tl.constexpr, FOUR: tl.constexpr):
    """FP32 outer scales [R] from the bits of the rows' maxima; ones for a format without."""
    outer_R = tl.full(amax_bits_R.shape, 1.0, tl.float32)
    if FMT == "nvfp4":
        outer_R = fp4.outer_from_amax(amax_bits_R.to(tl.float32, bitcast=True), 1536.0 if FOUR else 2688.0)
    if FMT == "fp8":
        outer_R = fp4.outer_from_amax(amax_bits_R.to(tl.float32, bitcast=True), 448.0)
    return outer_R


@triton.jit
def _record(codes, scale, start, C, SCALE, PARITY, CODES, B: tl.constexpr, CHUNK: tl.constexpr):
    blocks = tl.cdiv(C, B)
    if SCALE is not None:
        g = start // B + tl.arange(0, CHUNK // B)
        tl.store(SCALE + g, tl.reshape(scale, (CHUNK // B,)).to(tl.uint8), mask=g < blocks)
    if PARITY is not None:
        p = start // 8 + tl.arange(0, CHUNK // 8)
        tl.store(PARITY + p, tl.reshape(fp4.pack_parity(codes), (CHUNK // 8,)), mask=p < blocks * (B // 8))
    if CODES is not None:
        h = start // 2 + tl.arange(0, CHUNK // 2)
        tl.store(CODES + h, tl.reshape(fp4.pack_codes(codes), (CHUNK // 2,)), mask=h < blocks * (B // 2))


@triton.jit
def _store_row(x, row, start, M, C, OUT, PERMUTE: tl.constexpr, CHUNK: tl.constexpr):
    x = x.to(OUT.dtype.element_ty)
    if PERMUTE:
        kb = start // 128 + tl.arange(0, CHUNK // 128)[:, None, None]
        j, w = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :]
        x_KJW = tl.permute(tl.reshape(x, (CHUNK // 128, 16, 8)), (0, 2, 1))
        tl.store(OUT + row * 16 + (kb * 8 + j) * (M * 16) + w, x_KJW, mask=kb < tl.cdiv(C, 128))
    else:
        c = start + tl.arange(0, CHUNK)
        tl.store(OUT + row * C + c, x, mask=c < C)


@triton.jit
def finish_chunk(
    x,  # FP32 [CHUNK], zero beyond C
    outer_R,  # FP32 [1]
    row,  # int64
    start,
    M,
    C,
    OUT,
    SCALE,  # this and the next two: at the row already
    PARITY,
    CODES,
    FMT: tl.constexpr,
    FOUR: tl.constexpr,
    PERMUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Round elements `start ... start + CHUNK` of a row to FMT, record what was decided, write them to OUT."""
    if FMT == "fp8":
        inverse_R = tl.math.div_rn(tl.full(outer_R.shape, 1.0, tl.float32), outer_R)
        x = e4m3_value(e4m3_byte(x * inverse_R)) * outer_R
    elif FMT != "none":
        B: tl.constexpr = 16 if FMT == "nvfp4" else 32
        x_RGB = tl.reshape(x, (1, CHUNK // B, B))
        if FMT == "nvfp4":
            codes, scale = fp4.quantize_nvfp4(x_RGB, outer_R, FOUR)
            value_RG = fp4.e4m3_scale_value(scale)
        else:
            codes, scale = fp4.quantize_mxfp4(x_RGB)
            value_RG = fp4.e8m0_scale_value(scale)
        _record(codes, scale, start, C, SCALE, PARITY, CODES, B, CHUNK)
        x = tl.reshape(fp4.e2m1_value(codes) * value_RG[:, :, None] * outer_R[:, None, None], (CHUNK,))
    if FMT != "none":
        x = tl.where(start + tl.arange(0, CHUNK) < C, x, 0.0)  # 0 times the scale of a NaN row
    _store_row(x, row, start, M, C, OUT, PERMUTE, CHUNK)


@triton.jit(do_not_specialize=["M", *RECORD_STRIDES], do_not_specialize_on_alignment=RECORD_POINTERS)
def round_rows_kernel(
    X,
    AMAX,  # FP32 [M, NUM_AMAX] whose maximum is the row's, or None: read the row
    OUT,
    SCALE,
    OUTER,
    PARITY,
    CODES,
    M,
    C,
    NUM_AMAX,
    stride_scale,
    stride_outer,
    stride_parity,
    stride_codes,
    FMT: tl.constexpr,
    FOUR: tl.constexpr,
    PERMUTE: tl.constexpr,
    BLOCK_AMAX: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows, chunks). X may be OUT: a program reads only what it writes, provided AMAX is given."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    at = tl.arange(0, BLOCK_AMAX)
    amax_bits_R = tl.zeros((1,), tl.int32)
    if FMT == "nvfp4" or FMT == "fp8":
        if AMAX is None:
            whole = tl.load(X + row * C + at, mask=at < C, other=0.0).to(tl.float32)
        else:
            whole = tl.load(AMAX + row * NUM_AMAX + at, mask=at < NUM_AMAX, other=0.0)
        amax_bits_R = tl.max(tl.reshape(fp4.abs_bits(whole), (1, BLOCK_AMAX)), 1)
    outer_R = row_outer(amax_bits_R, FMT, FOUR)
    if OUTER is not None and start == 0:
        tl.store(OUTER + row * stride_outer + tl.arange(0, 1), outer_R)
    if SCALE is not None:
        SCALE += row * stride_scale
    if PARITY is not None:
        PARITY += row * stride_parity
    if CODES is not None:
        CODES += row * stride_codes
    c = start + tl.arange(0, CHUNK)
    x = tl.load(X + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    finish_chunk(x, outer_R, row, start, M, C, OUT, SCALE, PARITY, CODES, FMT, FOUR, PERMUTE, CHUNK)


def round_rows_reference(
    x: Tensor,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Torch reference of `round_rows`; a format is its name here, the record its four tensors."""
    record = record_scale, record_outer, record_parity, record_codes
    return finish_rows(x.clone(), dtype, fmt, four_over_six, permute, *record)


def round_rows_triton(
    x: Tensor,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Triton twin of `round_rows_reference`."""
    out = empty_rows(x, x.shape[1], dtype, permute)
    record = record_scale, record_outer, record_parity, record_codes
    launch_round_rows(x.contiguous(), None, out, fmt, four_over_six, permute, *record)
    return out


def launch_round_rows(
    x: Tensor,
    amax: Tensor | None,
    out: Tensor,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> None:
    """Round rows `x` [M, C] into `out`; `amax` FP32 [M, n] holds maxima of their chunks where they are known."""
    rows, width = x.shape
    count = 0 if amax is None else amax.shape[1]
    if rows == 0:
        return
    round_rows_kernel[rows, triton.cdiv(width, CHUNK)](
        *(x, amax, out, record_scale, record_outer, record_parity, record_codes),
        *(rows, width, count, *record_strides(record_scale, record_outer, record_parity, record_codes)),
        *(fmt, four_over_six, permute),
        BLOCK_AMAX=triton.next_power_of_2(count or width),
        CHUNK=CHUNK,
        enable_fp_fusion=False,
    )


_MUTATED = ("record_scale", "record_outer", "record_parity", "record_codes")
_recorded = torch.library.custom_op("trace_kernels::round_rows_recorded", round_rows_reference, mutates_args=_MUTATED)
_recorded.register_kernel("cuda")(round_rows_triton)


# Inductor of torch 2.11 cannot compile an operator whose mutated arguments are all None: without a record, another one.
@torch.library.custom_op("trace_kernels::round_rows", mutates_args=())
def _round_rows(x: Tensor, dtype: torch.dtype, fmt: str, four_over_six: bool, permute: bool) -> Tensor:
    return round_rows_reference(x, dtype, fmt, four_over_six, permute, None, None, None, None)


@_round_rows.register_kernel("cuda")
def _(x: Tensor, dtype: torch.dtype, fmt: str, four_over_six: bool, permute: bool) -> Tensor:
    return round_rows_triton(x, dtype, fmt, four_over_six, permute, None, None, None, None)


@_round_rows.register_fake
def _(x: Tensor, dtype: torch.dtype, fmt: str, four_over_six: bool, permute: bool) -> Tensor:
    return empty_rows(x, x.shape[1], dtype, permute)


@_recorded.register_fake
def _(x: Tensor, dtype: torch.dtype, fmt: Any, four_over_six: Any, permute: bool, *_: Any) -> Tensor:
    return empty_rows(x, x.shape[1], dtype, permute)


def round_rows(
    x: Tensor,
    *,
    dtype: torch.dtype,
    fmt: BlockFormat | None,
    permute: bool = False,
    record: RowRecord | None = None,
) -> Tensor:
    """Rows rounded to a block format under one outer scale each, in the order the next linear reads.

    Args:
        x: [M, C], any float dtype.
        dtype: of the result; the rounded values are exact in BF16.
        fmt: the number format; None only casts and arranges.
        permute: return [ceil(C / 128), 8, M, 16] and not [M, C].
        record: tensors to which scales and codes are written as well.

    Raises:
        ValueError: if the record does not fit.
    """
    plain = (x, dtype, *format_words(fmt), permute)
    return _round_rows(*plain) if record is None else _recorded(*plain, *record_tensors(record, fmt, *x.shape))
