"""RMSNorm and its gradient in one pass each: what the trainer's layers do four times per layer and direction.

    x [..., C] in X, gain [C] in W  ->  y = gain * X(x / rms(x))  in the promoted dtype        (transformers' casts)

As torch operators a norm is six launches forward and some fifteen backward, each of which reads and writes the whole
tensor in FP32. Together with the rotary embedding (`rotary.py`) they took more of a 1.7B trainer's time on an H200 than
its matmuls. Here a program holds rows in registers:

    forward    x in, y out
    backward   x and dy in, dx out, and one FP32 row of the gain's gradient per program, which torch adds up

The sum of squares is taken anew in the backward pass: kept, it would be one more tensor per norm, and the row is in
registers anyway. With n = x / rms(x) and g = gain * dy:

    dx = (g - n mean(g n)) / rms(x)        dgain = sum over rows of dy X(n)

torch's own `F.rms_norm` rounds once, at the end, and gives x's dtype: in FP32 it is the same norm, under autocast it is
another one than the rollout's, which rounds x / rms(x) to X first (a quarter of BF16 values differ).

What was left out: the roundings of intermediate gradients to X that autograd makes (the kernel's are more exact), and
the sum with the residual stream, which autograd wants as a tensor of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trace_kernels.launch import num_multiprocessors
from trace_kernels.rows import round_to, runs_in_triton

TILE = 2048  # elements that a program holds at a time; a longer row is a tile of its own
PROGRAMS_PER_MULTIPROCESSOR = 4


def rms_norm_reference(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`rms_norm` in torch, as transformers writes it; autograd has its gradient."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


@triton.jit
def _load_rows(X, row, c, M, C):
    inside = (row < M)[:, None] & (c < C)[None, :]
    at = row[:, None].to(tl.int64) * C + c[None, :]
    return tl.load(X + at, mask=inside, other=0.0).to(tl.float32), at, inside


@triton.jit(do_not_specialize=["M"])
def rms_norm_kernel(X, GAIN, Y, M, C, eps, inverse_C, R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (tiles of R rows)."""
    c = tl.arange(0, BLOCK_C)
    x, at, inside = _load_rows(X, tl.program_id(0) * R + tl.arange(0, R), c, M, C)
    gain = tl.load(GAIN + c, mask=c < C, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) * inverse_C + eps)[:, None]
    y = gain[None, :] * round_to(normed, X.dtype.element_ty)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def rms_norm_backward_kernel(X, GAIN, DY, DX, DGAIN, M, C, eps, inverse_C, R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (programs): each takes every so many-th tile of R rows. DGAIN: FP32 [programs, C], or None."""
    c = tl.arange(0, BLOCK_C)
    gain = tl.load(GAIN + c, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        x, at, inside = _load_rows(X, row, c, M, C)
        dy, _, _ = _load_rows(DY, row, c, M, C)
        inverse = tl.rsqrt(tl.sum(x * x, 1) * inverse_C + eps)[:, None]
        normed = x * inverse
        if DGAIN is not None:
            total += tl.sum(dy * round_to(normed, X.dtype.element_ty), 0)
        g = gain[None, :] * dy
        dx = inverse * (g - normed * (tl.sum(g * normed, 1) * inverse_C)[:, None])
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    if DGAIN is not None:
        tl.store(DGAIN + tl.program_id(0) * C + c, total, mask=c < C)


def _tiling(width: int) -> dict[str, Any]:
    block = max(16, triton.next_power_of_2(width))
    return {"R": max(1, TILE // block), "BLOCK_C": block, "num_warps": min(max(block // 512, 4), 16)}


def rms_norm_triton(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Triton twin of `rms_norm_reference`, without gradient."""
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, gain.dtype))
    rows, tiling = x.numel() // width, _tiling(width)
    if rows:
        grid = (triton.cdiv(rows, tiling["R"]),)
        rms_norm_kernel[grid](x, gain, y, rows, width, eps, 1.0 / width, **tiling, enable_fp_fusion=False)
    return y


def rms_norm_backward_triton(
    x: Tensor, gain: Tensor, eps: float, dy: Tensor, *, gain_too: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rms_norm` for x and, if asked for, the gain."""
    x, dy, width = x.contiguous(), dy.contiguous(), x.shape[-1]
    dx, rows, tiling = torch.empty_like(x), x.numel() // width, _tiling(width)
    tiles = triton.cdiv(rows, tiling["R"])
    programs = min(tiles, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(x.device))
    parts = x.new_empty((programs, width), dtype=torch.float32) if gain_too else None
    if rows:
        constants = (rows, width, eps, 1.0 / width)
        rms_norm_backward_kernel[programs,](x, gain, dy, dx, parts, *constants, **tiling, enable_fp_fusion=False)
    return dx, None if parts is None else parts.sum(0).to(gain.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.eps = eps
        return rms_norm_triton(x, gain, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, gain = ctx.saved_tensors
        return *rms_norm_backward_triton(x, gain, ctx.eps, dy, gain_too=ctx.needs_input_grad[1]), None


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`gain * x / rms(x)` over the last dimension, with gradients: the norm of Llama, Qwen and Mistral.

    Args:
        x: [..., C]; FP32, BF16 or FP16.
        gain: [C].
        eps: added to the mean of the squares.

    Returns:
        Shape of x, in the dtype that x and gain promote to. On a CPU it is the reference, bit for bit.
    """
    if runs_in_triton(x):
        result: Tensor = _RMSNorm.apply(x, gain, eps)
        return result
    return rms_norm_reference(x, gain, eps)
