"""Rows of a record as kernels wrote them, made shorter: scales by their parity, bits by their syndrome.

The kernels of a rollout write whole scale bytes and parity bits, one row of bytes per token, all sites side by side.
What a record keeps of them may be less; a window of decode steps is shortened when it is stored. Site by site that is
some ten operators, and a launch each; here one kernel does all sites of all rows.

    field of a site in DATA -> in OUT      scale  n bytes -> n, or ceil(n / 8) of their last bits
                                           codes  m bytes -> m, or the syndrome of 8 m bits
                                           outer  4 bytes -> 4

    fields int32 [sites, 8]     scale: where in DATA, n, where in OUT; codes: where, m, where; outer: where or -1, where
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.formats import pack_bits
from trace_kernels.syndromes import WINDOW, checks_of, encode

TILE = 128  # bytes of a field at a time


@triton.jit
def _copy(SOURCE, TARGET, length, T: tl.constexpr):
    for start in range(0, length, T):
        i = start + tl.arange(0, T)
        tl.store(TARGET + i, tl.load(SOURCE + i, mask=i < length, other=0), mask=i < length)


@triton.jit
def _shorten_kernel(
    DATA,
    OUT,
    FIELDS,
    stride_data,
    stride_out,
    SCALE_BITS: tl.constexpr,
    SYNDROME: tl.constexpr,
    MASK: tl.constexpr,
    T: tl.constexpr,
):
    """Grid (rows, sites)."""
    row = tl.program_id(0).to(tl.int64)
    DATA += row * stride_data
    OUT += row * stride_out
    FIELDS += tl.program_id(1) * 8
    scale, blocks, scale_out = tl.load(FIELDS), tl.load(FIELDS + 1), tl.load(FIELDS + 2)
    codes, length, codes_out = tl.load(FIELDS + 3), tl.load(FIELDS + 4), tl.load(FIELDS + 5)
    outer, outer_out = tl.load(FIELDS + 6), tl.load(FIELDS + 7)
    if SCALE_BITS:
        for start in range(0, (blocks + 7) // 8, T):
            b = start + tl.arange(0, T)
            at = b[:, None] * 8 + tl.arange(0, 8)[None, :]
            bit = tl.load(DATA + scale + at, mask=at < blocks, other=0).to(tl.int32) & 1
            packed = tl.sum(bit << tl.arange(0, 8)[None, :], 1)
            tl.store(OUT + scale_out + b, packed.to(tl.uint8), mask=b < (blocks + 7) // 8)
    else:
        _copy(DATA + scale, OUT + scale_out, blocks, T)
    if SYNDROME:
        checks = (8 * length + 2) // 3 + 6
        for start in range(0, (checks + 7) // 8, T):
            b = start + tl.arange(0, T)
            packed = checks_of(DATA + codes, b, length, MASK)
            tl.store(OUT + codes_out + b, packed.to(tl.uint8), mask=b < (checks + 7) // 8)
    else:
        _copy(DATA + codes, OUT + codes_out, length, T)
    if outer >= 0:
        i = tl.arange(0, 4)
        tl.store(OUT + outer_out + i, tl.load(DATA + outer + i))


def shorten_rows_reference(data: Tensor, out: Tensor, fields: Tensor, scale_bits: bool, syndrome: bool) -> None:
    """`shorten_rows_` in torch."""
    for scale, blocks, scale_out, codes, length, codes_out, outer, outer_out in fields.tolist():
        scales, bits = data[:, scale : scale + blocks], data[:, codes : codes + length]
        kept_scales = pack_bits(scales & 1) if scale_bits else scales
        kept_bits = encode(bits, 8 * length) if syndrome else bits
        out[:, scale_out : scale_out + kept_scales.shape[1]] = kept_scales
        out[:, codes_out : codes_out + kept_bits.shape[1]] = kept_bits
        if outer >= 0:
            out[:, outer_out : outer_out + 4] = data[:, outer : outer + 4]


def shorten_rows_triton(data: Tensor, out: Tensor, fields: Tensor, scale_bits: bool, syndrome: bool) -> None:
    """Triton twin of `shorten_rows_reference`."""
    assert data.stride(1) == out.stride(1) == 1, "dense within a row"
    if len(data):
        _shorten_kernel[len(data), len(fields)](
            *(data, out, fields, data.stride(0), out.stride(0)),
            SCALE_BITS=scale_bits,
            SYNDROME=syndrome,
            MASK=WINDOW,
            T=TILE,
        )


_SHORTEN = torch.library.custom_op(
    "trace_kernels::shorten_rows_", shorten_rows_reference, mutates_args=("out",), device_types="cpu"
)
_SHORTEN.register_kernel("cuda")(shorten_rows_triton)
_SHORTEN.register_fake(lambda data, out, fields, scale_bits, syndrome: None)


def shorten_rows_(data: Tensor, out: Tensor, fields: Tensor, *, scale_bits: bool, syndrome: bool) -> None:
    """Write what is kept of rows.

    Args:
        data: uint8 [M, bytes], rows as kernels wrote them.
        out: uint8 [M, fewer bytes]; bytes between fields are left as they are.
        fields: int32 [sites, 8] on the device of the rows, drawn at the top of this file.
        scale_bits: keep of a scale byte its last bit.
        syndrome: keep of parity bits their syndrome.
    """
    _SHORTEN(data, out, fields, scale_bits, syndrome)
