"""The last step of a linear with an adapter: partial sums of the base joined and rounded, the low-rank product added.

    parts [S, M, N]    of `fp4_linear`      hidden [M, R] = A x      b [N, R]      ->  y [M, N] in the compute dtype
    y = round(round(sum of parts) + hidden b^T)       the trainer rounds the base's product, then the sum

With R of 16 to 128 this is a read of the parts and a write of the result; in torch it is a sum, a cast and an `addmm`,
which move the parts' bytes and twice the result's more. One program: BM rows by BN columns, BR ranks at a time.

What was left out: A x inside (its K is as long as the base's, and cuBLAS splits it), and skipping the zeros of a block
diagonal b, a sixth of the bytes of packed weights at rank 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.rows import TRITON_DTYPE, load_sum, sum_parts

_COLUMNS, _RANKS = 64, 32


@triton.jit(do_not_specialize=["M"])
def _expand_kernel(
    PARTS, HIDDEN, B, OUT, M, N, R, stride_S,
    S: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    product = tl.zeros((BM, BN), tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        hidden = tl.load(HIDDEN + m[:, None] * R + r[None, :], mask=(m[:, None] < M) & (r[None, :] < R), other=0.0)
        b = tl.load(B + n[None, :] * R + r[:, None], mask=(n[None, :] < N) & (r[:, None] < R), other=0.0)
        product = tl.dot(hidden, b, product, input_precision="ieee")
    y = load_sum(PARTS, at, inside, stride_S, S, DTYPE) + product
    tl.store(OUT + at, y.to(DTYPE), mask=inside)


def expand_reference(parts: Tensor, hidden: Tensor, b: Tensor) -> Tensor:
    """Torch reference; arguments as for `expand`."""
    return torch.addmm(sum_parts(parts, hidden.dtype), hidden, b.T)


def expand_triton(parts: Tensor, hidden: Tensor, b: Tensor) -> Tensor:
    """Launcher; arguments as for `expand`."""
    splits, rows, columns = parts.shape
    out = torch.empty(rows, columns, dtype=hidden.dtype, device=parts.device)
    block = min(32, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, block))
    _expand_kernel[grid](
        parts.contiguous(), hidden.contiguous(), b.contiguous(), out, rows, columns, b.shape[1], rows * columns,
        S=splits, DTYPE=TRITON_DTYPE[hidden.dtype], BM=block, BN=_COLUMNS, BR=_RANKS,
    )  # fmt: skip
    return out


_EXPAND = torch.library.custom_op(
    "trace_kernels::low_rank_expand", expand_reference, mutates_args=(), device_types="cpu"
)
_EXPAND.register_kernel("cuda")(expand_triton)
_EXPAND.register_fake(lambda parts, hidden, b: hidden.new_empty(parts.shape[1:]))


def expand(parts: Tensor, hidden: Tensor, b: Tensor) -> Tensor:
    """Join the partial sums of a linear and add a low-rank product.

    Args:
        parts: FP32 [S, M, N], added in order.
        hidden: [M, R] in the compute dtype.
        b: [N, R], the same dtype.

    Returns:
        [M, N] in the compute dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    (rows, rank), (columns, other) = hidden.shape, b.shape
    if parts.shape[1:] != (rows, columns) or rank != other or hidden.dtype != b.dtype:
        raise ValueError(
            f"low-rank product {tuple(hidden.shape)} {hidden.dtype} x {tuple(b.shape)} {b.dtype} does not fit parts of "
            f"{tuple(parts.shape)}"
        )
    return _EXPAND(parts, hidden, b)
