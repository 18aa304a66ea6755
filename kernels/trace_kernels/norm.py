"""Add a linear's output to the residual stream, normalise, round for the next linear: one pass over the rows.

As torch operators these are about ten launches (sum of parts, add, square, mean, rsqrt, two products, casts, amax,
quantise, dequantise), each of which reads and writes the row; at 64 tokens they cost more than the matmul they feed.
One program takes one row and holds it in registers, so a row of C elements moves

    S C parts + C residual in, C residual + C normalised out        (no intermediate reaches memory)

Casts are the decoder's, one by one: the sum of the parts is rounded to the compute dtype and added in the residual's
dtype R; squares are averaged in FP32; the quotient is cast to R, multiplied by the gain in R, rounded to the block
format, and only then cast to the compute dtype. Only the order in which the squares are added differs from torch.

What was left out: rows split over programs. A row of 8192 elements fits 512 threads, and a decode batch has more rows
than it takes to hide the latency.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.quantize import BlockFormat
from trace_kernels.rms_norm import rms_norm_reference
from trace_kernels.rows import (
    RECORD_POINTERS,
    RECORD_STRIDES,
    TRITON_DTYPE,
    RowRecord,
    empty_rows,
    finish_chunk,
    finish_rows,
    format_words,
    load_sum,
    record_strides,
    record_tensors,
    round_to,
    row_outer,
    sum_parts,
)


def add_rms_norm_reference(
    residual: Tensor,
    parts: Tensor | None,
    gain: Tensor,
    eps: float,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Torch reference of `add_rms_norm`; a format is its name here, the record its four tensors."""
    if parts is not None:
        residual += sum_parts(parts, dtype)
    x = rms_norm_reference(residual, gain, eps)
    record = record_scale, record_outer, record_parity, record_codes
    return finish_rows(x, dtype, fmt, four_over_six, permute, *record)


@triton.jit(do_not_specialize=["M", *RECORD_STRIDES], do_not_specialize_on_alignment=RECORD_POINTERS)
def add_rms_norm_kernel(
    RESIDUAL,
    PARTS,
    GAIN,
    OUT,
    SCALE,
    OUTER,
    PARITY,
    CODES,
    M,
    C,
    stride_S,
    eps,
    inverse_C,
    stride_scale,
    stride_outer,
    stride_parity,
    stride_codes,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    FMT: tl.constexpr,
    FOUR: tl.constexpr,
    PERMUTE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (rows): one program holds one row."""
    row = tl.program_id(0).to(tl.int64)
    R: tl.constexpr = RESIDUAL.dtype.element_ty
    c = tl.arange(0, BLOCK_C)
    inside = c < C
    x = tl.load(RESIDUAL + row * C + c, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(GAIN + c, mask=inside, other=0.0).to(tl.float32)
    if PARTS is not None:
        x = round_to(x + load_sum(PARTS + row * C, c, inside, stride_S, S, DTYPE), R)
        tl.store(RESIDUAL + row * C + c, x.to(R), mask=inside)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) * inverse_C + eps)
    y = round_to(gain * round_to(normed, R), R)
    outer_R = row_outer(tl.max(tl.reshape(fp4.abs_bits(y), (1, BLOCK_C)), 1), FMT, FOUR)
    if OUTER is not None:
        tl.store(OUTER + row * stride_outer + tl.arange(0, 1), outer_R)
    if SCALE is not None:
        SCALE += row * stride_scale
    if PARITY is not None:
        PARITY += row * stride_parity
    if CODES is not None:
        CODES += row * stride_codes
    finish_chunk(y, outer_R, row, 0, M, C, OUT, SCALE, PARITY, CODES, FMT, FOUR, PERMUTE, BLOCK_C)


def add_rms_norm_triton(
    residual: Tensor,
    parts: Tensor | None,
    gain: Tensor,
    eps: float,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Triton twin of `add_rms_norm_reference`."""
    rows, width = residual.shape
    out = empty_rows(residual, width, dtype, permute)
    if rows == 0:
        return out
    parts = None if parts is None else parts.contiguous()
    block = max(128, triton.next_power_of_2(width))
    add_rms_norm_kernel[rows,](
        *(residual, parts, gain, out, record_scale, record_outer, record_parity, record_codes),
        *(rows, width, rows * width, eps, 1.0 / width),
        *record_strides(record_scale, record_outer, record_parity, record_codes),
        S=1 if parts is None else parts.shape[0],
        DTYPE=TRITON_DTYPE[dtype],
        FMT=fmt,
        FOUR=four_over_six,
        PERMUTE=permute,
        BLOCK_C=block,
        num_warps=min(max(block // 512, 2), 16),
        enable_fp_fusion=False,
    )
    return out


_MUTATED = ("residual", "record_scale", "record_outer", "record_parity", "record_codes")
_add_rms_norm = torch.library.custom_op("trace_kernels::add_rms_norm", add_rms_norm_reference, mutates_args=_MUTATED)
_add_rms_norm.register_kernel("cuda")(add_rms_norm_triton)


@_add_rms_norm.register_fake
def _(
    residual: Tensor, parts: Any, gain: Any, eps: Any, dtype: torch.dtype, fmt: Any, four: Any, permute: bool, *_: Any
) -> Tensor:
    return empty_rows(residual, residual.shape[1], dtype, permute)


def add_rms_norm(
    residual: Tensor,
    parts: Tensor | None,
    gain: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    fmt: BlockFormat | None = None,
    permute: bool = False,
    record: RowRecord | None = None,
) -> Tensor:
    """`residual += parts`, RMSNorm of the sum, rounded to a block format: the input of the next linear.

    Args:
        residual: [M, C] in the dtype R of the residual stream; changed in place.
        parts: [S, M, C], what the linear before left: FP32 sums, or S = 1 in `dtype`. None adds nothing.
        gain: [C] in R.
        eps: of the norm.
        dtype: compute dtype: of the linear before and of the result.
        fmt: the number format, with one outer scale per row; None rounds not.
        permute: return [ceil(C / 128), 8, M, 16] and not [M, C]; the order is at the top of `rows.py`.
        record: tensors to which scales and codes are written as well.

    Raises:
        ValueError: if shapes or dtypes do not fit each other, or the record does not fit.
    """
    if gain.dtype != residual.dtype or torch.promote_types(residual.dtype, dtype) != residual.dtype:
        raise ValueError(
            f"a residual stream in {residual.dtype} needs a gain in the same dtype (not {gain.dtype}) and takes up "
            f"linears in it or in a narrower one (not {dtype})"
        )
    if not residual.is_contiguous() or (parts is not None and parts.shape[1:] != residual.shape):
        raise ValueError(f"residual must be contiguous, and parts [S, {', '.join(map(str, residual.shape))}]")
    record_fields = record_tensors(record, fmt, *residual.shape)
    return _add_rms_norm(residual, parts, gain, eps, dtype, *format_words(fmt), permute, *record_fields)
