"""`act(gate) * up` from the partial sums of the gate/up linear, rounded for the down projection.

    parts [S, M, 2 I]  ->  [M, I] or permuted        bytes: S x 2 I in, I out per row (plus I out and in, see below)

A row has 12288 elements or more, so one program per row would leave half of a chip idle at 64 tokens while each of the
others works for microseconds. Rows are cut into chunks, a 2-D grid. A format with an outer scale needs the maximum of
the whole row before the first code: the first kernel then writes the row in the compute dtype and one maximum per
chunk, and the second, `round_rows_kernel`, rounds it, in place where the order is natural. The row in between never
leaves L2, and maxima need no atomics.

Casts are torch's: gate and up are rounded to the compute dtype, the activation is computed in FP32 and rounded, the
product is rounded.

What was left out: a single launch that waits for the other chunks of its row. It saves two microseconds and hangs if
they are not resident together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.quantize import BlockFormat, get_format
from trace_kernels.rows import (
    CHUNK,
    TRITON_DTYPE,
    RowRecord,
    empty_rows,
    finish_chunk,
    finish_rows,
    format_words,
    launch_round_rows,
    load_sum,
    record_strides,
    record_tensors,
    round_to,
    sum_parts,
)

GATED_STRIDES = ["stride_scale", "stride_parity", "stride_codes"]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_activation_reference(
    parts: Tensor,
    activation: str,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Torch reference of `gated_activation`; a format is its name here, the record its four tensors."""
    gate, up = sum_parts(parts, dtype).chunk(2, dim=-1)
    record = record_scale, record_outer, record_parity, record_codes
    return finish_rows(_activate(gate, activation) * up, dtype, fmt, four_over_six, permute, *record)


@triton.jit
def silu(x):
    """`x sigmoid(x)` in FP32."""
    return tl.math.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    """In FP32."""
    one = tl.full(x.shape, 1.0, tl.float32)
    return tl.math.div_rn(one, one + tl.exp(-x))


@triton.jit
def _act(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = silu(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh u) / 2 is the sigmoid of 2 u
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit(do_not_specialize=["M", *GATED_STRIDES], do_not_specialize_on_alignment=["SCALE", "PARITY", "CODES"])
def gated_activation_kernel(
    PARTS,
    OUT,
    AMAX,  # FP32 [M, chunks], or None
    SCALE,
    PARITY,
    CODES,
    M,
    C,
    stride_S,
    stride_scale,
    stride_parity,
    stride_codes,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FMT: tl.constexpr,
    PERMUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows, chunks); FMT has no outer scale."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    c = start + tl.arange(0, CHUNK)
    PARTS += row * (2 * C)
    gate = load_sum(PARTS, c, c < C, stride_S, S, DTYPE)
    up = load_sum(PARTS + C, c, c < C, stride_S, S, DTYPE)
    x = round_to(round_to(_act(gate, ACTIVATION), DTYPE) * up, DTYPE)
    if AMAX is not None:
        amax = tl.max(fp4.abs_bits(x), 0).to(tl.float32, bitcast=True)
        tl.store(AMAX + row * tl.num_programs(1) + tl.program_id(1), amax)
    outer_R = tl.full((1,), 1.0, tl.float32)
    if SCALE is not None:
        SCALE += row * stride_scale
    if PARITY is not None:
        PARITY += row * stride_parity
    if CODES is not None:
        CODES += row * stride_codes
    finish_chunk(x, outer_R, row, start, M, C, OUT, SCALE, PARITY, CODES, FMT, False, PERMUTE, CHUNK)


def gated_activation_triton(
    parts: Tensor,
    activation: str,
    dtype: torch.dtype,
    fmt: str,
    four_over_six: bool,
    permute: bool,
    record_scale: Tensor | None,
    record_outer: Tensor | None,
    record_parity: Tensor | None,
    record_codes: Tensor | None,
) -> Tensor:
    """Triton twin of `gated_activation_reference`."""
    splits, rows, width = parts.shape[0], parts.shape[1], parts.shape[2] // 2
    chunks = triton.cdiv(width, CHUNK)
    block_format = get_format(fmt)
    in_two = block_format is not None and block_format.has_outer
    out = empty_rows(parts, width, dtype, permute)
    if rows == 0:
        return out
    x = empty_rows(parts, width, dtype, False) if in_two and permute else out
    amax = parts.new_empty((rows, chunks), dtype=torch.float32) if in_two else None
    record = (None, None, None) if in_two else (record_scale, record_parity, record_codes)
    gated_activation_kernel[rows, chunks](
        *(parts.contiguous(), x, amax, *record, rows, width, rows * 2 * width, *record_strides(*record)),
        S=splits,
        DTYPE=TRITON_DTYPE[dtype],
        ACTIVATION=activation,
        FMT="none" if in_two else fmt,
        PERMUTE=permute and not in_two,
        CHUNK=CHUNK,
        enable_fp_fusion=False,
    )
    if in_two:
        four = record_scale, record_outer, record_parity, record_codes
        launch_round_rows(x, amax, out, fmt, four_over_six, permute, *four)
    return out


_MUTATED = ("record_scale", "record_outer", "record_parity", "record_codes")
_recorded = torch.library.custom_op(
    "trace_kernels::gated_activation_recorded", gated_activation_reference, mutates_args=_MUTATED
)
_recorded.register_kernel("cuda")(gated_activation_triton)


# Inductor of torch 2.11 cannot compile an operator whose mutated arguments are all None: without a record, another one.
@torch.library.custom_op("trace_kernels::gated_activation", mutates_args=())
def _gated_activation(
    parts: Tensor, activation: str, dtype: torch.dtype, fmt: str, four_over_six: bool, permute: bool
) -> Tensor:
    return gated_activation_reference(parts, activation, dtype, fmt, four_over_six, permute, None, None, None, None)


@_gated_activation.register_kernel("cuda")
def _(parts: Tensor, activation: str, dtype: torch.dtype, fmt: str, four_over_six: bool, permute: bool) -> Tensor:
    return gated_activation_triton(parts, activation, dtype, fmt, four_over_six, permute, None, None, None, None)


@_gated_activation.register_fake
def _(parts: Tensor, activation: str, dtype: torch.dtype, fmt: str, four_over_six: bool, permute: bool) -> Tensor:
    return empty_rows(parts, parts.shape[2] // 2, dtype, permute)


@_recorded.register_fake
def _(parts: Tensor, activation: Any, dtype: torch.dtype, fmt: Any, four: Any, permute: bool, *_: Any) -> Tensor:
    return empty_rows(parts, parts.shape[2] // 2, dtype, permute)


def gated_activation(
    parts: Tensor,
    *,
    activation: str,
    dtype: torch.dtype,
    fmt: BlockFormat | None = None,
    permute: bool = False,
    record: RowRecord | None = None,
) -> Tensor:
    """`act(gate) * up`, rounded to a block format: the input of the down projection.

    Args:
        parts: [S, M, 2 I], gate then up: FP32 sums, or S = 1 in `dtype`.
        activation: one of `ACTIVATIONS`.
        dtype: compute dtype: of the linear before and of the result.
        fmt: the number format, with one outer scale per row; None rounds not.
        permute: return [ceil(I / 128), 8, M, 16] and not [M, I]; the order is at the top of `rows.py`.
        record: tensors to which scales and codes are written as well.

    Raises:
        ValueError: for another activation, an odd width, or a record that does not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if parts.shape[2] % 2:
        raise ValueError(f"gate and up lie side by side, so parts [S, M, 2 I] cannot have width {parts.shape[2]}")
    plain = (parts, activation, dtype, *format_words(fmt), permute)
    if record is None:
        return _gated_activation(*plain)
    return _recorded(*plain, *record_tensors(record, fmt, parts.shape[1], parts.shape[2] // 2))
