"""Q and K turned so that no channel of K stands out: blocks of 16 times the orthonormal Hadamard matrix.

    x [..., D], 16 | D  ->  same shape, dtype and strides;  y = x H / 4,  H[i, j] = (-1)^popcount(i & j)

Applied to Q and K alike it leaves scores unchanged and spreads the outlier channels of K over their block. H / 4 is its
own inverse and its own transpose, so the gradient of `rotate` is `rotate`.

The entries are +-1/4, so only the order of additions matters, and a matmul has none: cuBLAS and the BLAS of one CPU or
another differ. It is therefore written as four rounds of sums and differences of pairs, in which every addition has its
place: K's bytes are the same anywhere. In torch each round is three passes over the tensor; here they happen in
registers, on one read and one write.

What was left out: larger blocks. 16 is the block of NVFP4, within which an outlier costs its neighbours their bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trace_kernels.rows import runs_in_triton

ROTATION_BLOCK = 16
_TILE = 2048  # elements a program takes


def rotate_reference(x: Tensor) -> Tensor:
    """`rotate` in torch (FP32 inside)."""
    y = x.float().unflatten(-1, (-1, 2, 2, 2, 2))
    for dim in (-1, -2, -3, -4):
        first, second = y.unbind(dim)
        y = torch.stack((first + second, first - second), dim)
    return (y * 0.25).flatten(-5).to(x.dtype)


@triton.jit
def butterflies(x, SIZE: tl.constexpr):
    """FP32 [SIZE]: its blocks of 16 times H, not yet divided by 4."""
    for _ in tl.static_range(4):  # neighbours, and then each half on its own: the next bit's are neighbours now
        a, b = tl.split(tl.reshape(x, (SIZE // 16, 8, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def rotate_kernel(X, Y, numel, TILE: tl.constexpr):
    """Grid (tiles of TILE elements, in the order of memory)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(X + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(Y + at, (butterflies(x, TILE) * 0.25).to(Y.dtype.element_ty), mask=at < numel)


def rotate_triton(x: Tensor) -> Tensor:
    """Triton twin of `rotate_reference`."""
    y = torch.empty_like(x)
    if y.stride() != x.stride() or x.stride(-1) != 1:  # holes, overlaps, or blocks that do not lie together
        x = x.contiguous()
        y = torch.empty_like(x)
    if x.numel():
        rotate_kernel[triton.cdiv(x.numel(), _TILE),](x, y, x.numel(), TILE=_TILE, enable_fp_fusion=False)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rotate_triton(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return rotate_triton(dy)


def rotate(x: Tensor) -> Tensor:
    """Multiply each block of 16 along the last dim by the orthonormal Hadamard matrix, in FP32, with a gradient.

    Args:
        x: [..., D], 16 divides D.
    """
    assert x.shape[-1] % ROTATION_BLOCK == 0, "the recipe should have been refused for this head dim"
    if runs_in_triton(x):
        result: Tensor = _Rotate.apply(x)
        return result
    return rotate_reference(x)
