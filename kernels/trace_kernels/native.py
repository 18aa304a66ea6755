"""W4A4 linear layers on Blackwell, whose tensor cores multiply block-scaled FP4 themselves.

Compiled for sm_100 and sm_120 and inspected (`tests/kernels/gate_native.py`), not yet run on hardware. Nothing calls it
by default; `native_supported` says where it could run.

Codes and scale bytes go to the tensor core as they are stored: no unpacking, half a byte per weight *and* per
activation, four times the arithmetic rate of BF16. Like `linear.py` it computes `Y^T[BN, BM] = W x^T`, so that weights
fill the 128-row side and a small batch the narrow one.

    NVFP4   tl.dot_scaled over E4M3 scales, blocks of 16   kind::mxf4nvf4.block_scale.block16 (4X)
    MXFP4   tl.dot_scaled over E8M0 scales, blocks of 32   kind::mxf4 on sm_100, kind::mxf4nvf4 (2X) on sm_120

It differs from a matmul over dequantised values only in the order of FP32 additions: products of two codes and two
scales are exact, and the outer scales, powers of two, come last.

    bytes: 0.5625 (N C + M C) + 2 M N       BF16: 2 N C + 2 M C + 2 M N

What was left out: emulation elsewhere (Hopper upcasts in software, slower than `linear.py`, and refuses E4M3 scales);
the swizzled scale layout of the tensor core's own loads, since our scales lie row-major for every other reader; splits
over K, which need tuning on hardware.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.formats import unpack_codes
from trace_kernels.linear import BLOCK_SIZE
from trace_kernels.quantize import Quantized, get_format


def native_supported(device: torch.device) -> bool:
    """Whether the tensor cores of `device` take FP4: capability 10.0 (B200) or 12.0 (RTX 50, RTX PRO 6000)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((10, 0), (12, 0))


def native_fp4_linear_reference(
    x_qdata: Tensor, x_scale: Tensor, x_outer: Tensor | None, w_qdata: Tensor, w_scale: Tensor, w_outer: Tensor | None,
    bias: Tensor | None, *, in_features: int, fmt: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Dequantised operands, FP32 matmul; arguments as for `native_fp4_linear`."""
    block_format = get_format(fmt)
    assert block_format is not None
    x_MC = block_format.dequantize(Quantized(unpack_codes(x_qdata), x_scale, x_outer, in_features))
    w_NC = block_format.dequantize(Quantized(unpack_codes(w_qdata), w_scale, w_outer, in_features))
    y = x_MC @ w_NC.T
    return (y if bias is None else y + bias.float()).to(dtype)


@triton.jit
def _native_fp4_linear(
    XQ, XS, X_OUTER, WQ, WS, W_OUTER, BIAS, Y, M, N, row_bytes, row_scales,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Y[m, n] for BN rows n of the weight and BM tokens m; steps of BK elements."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    byte = tl.arange(0, BK // 2)
    block = tl.arange(0, BK // BLOCK)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]  # past the end: the last one again, not stored
    token = tl.minimum(m, M - 1).to(tl.int64)[:, None]
    wq_ptr, ws_ptr = WQ + row * row_bytes, WS + row * row_scales
    xq_ptr, xs_ptr = XQ + token * row_bytes, XS + token * row_scales

    y = tl.zeros((BN, BM), tl.float32)
    for k in range(0, row_bytes, BK // 2):
        byte_k = (k + byte)[None, :]
        block_k = (k * 2 // BLOCK + block)[None, :]
        if EVEN:
            w, x = tl.load(wq_ptr + byte_k), tl.load(xq_ptr + byte_k)
            w_scale, x_scale = tl.load(ws_ptr + block_k), tl.load(xs_ptr + block_k)
        else:  # zero codes and a zero or tiny scale contribute exactly nothing
            w = tl.load(wq_ptr + byte_k, mask=byte_k < row_bytes, other=0)
            x = tl.load(xq_ptr + byte_k, mask=byte_k < row_bytes, other=0)
            w_scale = tl.load(ws_ptr + block_k, mask=block_k < row_scales, other=0)
            x_scale = tl.load(xs_ptr + block_k, mask=block_k < row_scales, other=0)
        if BLOCK == 16:
            w_scale = w_scale.to(tl.float8e4nv, bitcast=True)
            x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
        y = tl.dot_scaled(w, w_scale, "e2m1", tl.trans(x), x_scale, "e2m1", y)

    if HAS_OUTER:
        y *= tl.load(W_OUTER)
        y *= tl.load(X_OUTER + tl.minimum(m, M - 1))[None, :]
    if HAS_BIAS:
        y += tl.load(BIAS + tl.minimum(n, N - 1)).to(tl.float32)[:, None]
    stored = (m[None, :] < M) & (n[:, None] < N)
    tl.store(Y + m[None, :].to(tl.int64) * N + n[:, None], y.to(Y.dtype.element_ty), mask=stored)


def native_fp4_linear_triton(
    x_qdata: Tensor, x_scale: Tensor, x_outer: Tensor | None, w_qdata: Tensor, w_scale: Tensor, w_outer: Tensor | None,
    bias: Tensor | None, *, in_features: int, fmt: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Launcher; arguments as for `native_fp4_linear`."""
    tokens, row_bytes = x_qdata.shape
    rows = w_qdata.shape[0]
    y = torch.empty(tokens, rows, dtype=dtype, device=x_qdata.device)
    rows_tile, step = 128, 256
    tokens_tile = min(128, max(16, triton.next_power_of_2(tokens)))
    _native_fp4_linear[(triton.cdiv(rows, rows_tile), triton.cdiv(tokens, tokens_tile))](
        x_qdata, x_scale, x_outer, w_qdata, w_scale, w_outer, bias, y, tokens, rows, row_bytes, x_scale.shape[1],
        BN=rows_tile, BM=tokens_tile, BK=step, BLOCK=BLOCK_SIZE[fmt], EVEN=row_bytes % (step // 2) == 0,
        HAS_OUTER=w_outer is not None, HAS_BIAS=bias is not None, num_warps=8, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _fake_native_fp4_linear(
    x_qdata: Tensor, x_scale: Tensor, x_outer: Tensor | None, w_qdata: Tensor, w_scale: Tensor, w_outer: Tensor | None,
    bias: Tensor | None, *, in_features: int, fmt: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x_qdata.new_empty(x_qdata.shape[0], w_qdata.shape[0], dtype=dtype)


_op = torch.library.custom_op(
    "trace_kernels::native_fp4_linear", native_fp4_linear_reference, mutates_args=(), device_types="cpu"
)
_op.register_kernel("cuda")(native_fp4_linear_triton)
_op.register_fake(_fake_native_fp4_linear)


def native_fp4_linear(
    x_qdata: Tensor, x_scale: Tensor, x_outer: Tensor | None, w_qdata: Tensor, w_scale: Tensor, w_outer: Tensor | None,
    bias: Tensor | None, *, in_features: int, fmt: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`x W^T + bias` with both operands in FP4, rounded once.

    Args:
        x_qdata: packed codes of the activations, uint8 [M, Cp / 2], contiguous; Cp is C rounded up to whole blocks.
        x_scale: their block scale bytes, uint8 [M, Cp / block].
        x_outer: FP32 [M, 1], one power of two per token; None for MXFP4.
        w_qdata: packed codes of the weight, uint8 [N, Cp / 2], contiguous.
        w_scale: its block scale bytes, uint8 [N, Cp / block].
        w_outer: FP32 [1, 1], a power of two; None for MXFP4.
        bias: [N] or None.
        in_features: C.
        fmt: "nvfp4" or "mxfp4", the same for both operands.
        dtype: of the result.

    Returns:
        [M, N] in `dtype`.

    Raises:
        ValueError: for another format, or on a GPU whose tensor cores do not take FP4; use `fp4_linear` there.
    """
    if fmt not in BLOCK_SIZE:
        raise ValueError(f"native_fp4_linear multiplies {' and '.join(BLOCK_SIZE)}, not {fmt!r}")
    if (x_outer is None) != (fmt == "mxfp4") or (w_outer is None) != (fmt == "mxfp4"):
        raise ValueError("NVFP4 has an outer scale for either operand, MXFP4 for none")
    if x_qdata.device.type == "cuda" and not native_supported(x_qdata.device):
        raise ValueError(
            "this GPU has no FP4 tensor cores (capability 10.0 or 12.0); use trace_kernels.linear.fp4_linear"
        )
    return _op(
        x_qdata, x_scale, x_outer, w_qdata, w_scale, w_outer, bias, in_features=in_features, fmt=fmt, dtype=dtype
    )
