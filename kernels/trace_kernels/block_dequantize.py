"""Packed FP4 weights to plain values in one pass, for matmuls too large to unpack codes inside.

    qdata uint8 [N, Kp / 2], scale uint8 [N, Kp / B], outer FP32 [1, 1] or none  ->  [N, K] in any float dtype

Who holds a weight in FP4 alone (a frozen base under adapters) makes its BF16 values when a matmul of many rows needs
them and lets them go. Bytes moved per weight: 9/16 read (NVFP4), 2 written, and 2 read by the matmul; torch's own
operations would move 39. The values are those of `BlockFormat.dequantize`, exactly: scale bytes must be ours,
that is normal E4M3 codes or NaN.

What was left out: unpacking inside a matmul of many rows. `linear.py` does that up to 128 rows or so; above, tensor
cores wait for the unpacking.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.formats import unpack_codes
from trace_kernels.quantize import Quantized, get_format

BLOCK_SIZE = {"nvfp4": 16, "mxfp4": 32}


@triton.jit
def _dequantize_kernel(QDATA, SCALE, OUTER, OUT, K, groups, B: tl.constexpr, G: tl.constexpr):
    """One program: G blocks of one row. OUTER None: MXFP4."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * G + tl.arange(0, G)
    inside = g < groups
    byte = tl.load(SCALE + row * groups + g, mask=inside, other=8).to(tl.int32)
    pair = tl.arange(0, B // 2)
    packed = tl.load(QDATA + (row * groups + g)[:, None] * (B // 2) + pair[None, :], mask=inside[:, None], other=0)
    packed = packed.to(tl.int32)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (G, B))
    if OUTER is None:
        value = fp4.e2m1_value(codes) * fp4.e8m0_scale_value(byte)[:, None]
    else:
        value = (fp4.e2m1_value(codes) * fp4.e4m3_scale_value(byte)[:, None]) * tl.load(OUTER)
    column = g[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(OUT + row * K + column, value.to(OUT.dtype.element_ty), mask=column < K)


def dequantize_packed_reference(
    qdata: Tensor, scale: Tensor, outer: Tensor | None, width: int, fmt: str, dtype: torch.dtype
) -> Tensor:
    """Torch reference; arguments as for `dequantize_packed`."""
    block_format = get_format(fmt)
    assert block_format is not None
    return block_format.dequantize(Quantized(unpack_codes(qdata), scale, outer, width), dtype)


def dequantize_packed_triton(
    qdata: Tensor, scale: Tensor, outer: Tensor | None, width: int, fmt: str, dtype: torch.dtype
) -> Tensor:
    """Launcher; arguments as for `dequantize_packed`."""
    rows, groups = scale.shape
    tile = min(triton.next_power_of_2(groups), 128)
    out = torch.empty(rows, width, dtype=dtype, device=qdata.device)
    grid = (rows, triton.cdiv(groups, tile))
    _dequantize_kernel[grid](qdata, scale, outer, out, width, groups, B=BLOCK_SIZE[fmt], G=tile)
    return out


_DEQUANTIZE = torch.library.custom_op(
    "trace_kernels::dequantize_packed", dequantize_packed_reference, mutates_args=(), device_types="cpu"
)
_DEQUANTIZE.register_kernel("cuda")(dequantize_packed_triton)
_DEQUANTIZE.register_fake(
    lambda qdata, scale, outer, width, fmt, dtype: qdata.new_empty(len(qdata), width, dtype=dtype)
)


def dequantize_packed(
    qdata: Tensor, scale: Tensor, outer: Tensor | None, *, width: int, fmt: str, dtype: torch.dtype
) -> Tensor:
    """Values [N, width] in `dtype` of packed weights; all tensors contiguous.

    Args:
        qdata: packed codes, uint8 [N, Kp / 2].
        scale: block scale bytes, uint8 [N, Kp / block]; E4M3 without subnormals, or E8M0.
        outer: FP32 [1, 1]; None for MXFP4.
        width: K.
        fmt: "nvfp4" or "mxfp4".
        dtype: of the values; FP64 only on a CPU.

    Raises:
        ValueError: another format, or tensors that are not contiguous.
    """
    if fmt not in BLOCK_SIZE:
        raise ValueError(f"dequantize_packed reads {' and '.join(BLOCK_SIZE)}, not {fmt!r}")
    if not (qdata.is_contiguous() and scale.is_contiguous()):
        raise ValueError("dequantize_packed needs contiguous codes and scales")
    return _DEQUANTIZE(qdata, scale, outer, width, fmt, dtype)
