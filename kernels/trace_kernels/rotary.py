"""The rotary embedding of queries or keys, and its gradient, in one launch: the half-split layout of Llama and Qwen.

    x [B, H, T, D] of any strides, cos, sin [B or 1, T, D]  ->  y, same shape and strides

    y1 = x1 cos1 - x2 sin1          dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2          dx2 = dy2 cos2 - dy1 sin1        (1, 2: first and second half of D)

In torch it is five launches forward, a concatenation among them, and more backward, each over the whole tensor. One
program takes one token: its heads share their cosines.

Casts are torch's: products and sum are rounded to the dtype that x and cos promote to, so the values are those of
transformers' `apply_rotary_pos_emb` to the bit, and so are gradients, unless x is narrower than cos: autograd then
rounds both terms of a gradient to x's dtype before it adds them.

What was left out: partial rotary embeddings (cos narrower than D), which no family of the fused decoder has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trace_kernels.rows import TRITON_DTYPE, round_to, runs_in_triton


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` in torch, operator by operator as transformers has it; autograd has its gradient."""
    return (x * cos.unsqueeze(1)) + (_rotate_half(x) * sin.unsqueeze(1))


@triton.jit(do_not_specialize=["T"])
def rotary_kernel(
    X,
    Y,
    COS,
    SIN,
    T,
    heads,
    D,
    x_stride_B,
    x_stride_H,
    x_stride_T,
    y_stride_B,
    y_stride_H,
    y_stride_T,
    angle_stride_B,
    BACKWARD: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (B T). DTYPE: what products and sum are rounded to; BLOCK_D covers half of D."""
    b, t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    h, d, half = tl.arange(0, BLOCK_H).to(tl.int64)[:, None], tl.arange(0, BLOCK_D)[None, :], D // 2
    inside = (h < heads) & (d < half)
    angle = b * angle_stride_B + t * D + d
    cos1 = tl.load(COS + angle, mask=d < half, other=0.0).to(tl.float32)
    cos2 = tl.load(COS + angle + half, mask=d < half, other=0.0).to(tl.float32)
    sin1 = tl.load(SIN + angle, mask=d < half, other=0.0).to(tl.float32)
    sin2 = tl.load(SIN + angle + half, mask=d < half, other=0.0).to(tl.float32)
    X += b * x_stride_B + h * x_stride_H + t * x_stride_T + d
    Y += b * y_stride_B + h * y_stride_H + t * y_stride_T + d
    x1 = tl.load(X, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(X + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y1 = round_to(x1 * cos1, DTYPE) + round_to(x2 * sin2, DTYPE)
        y2 = round_to(x2 * cos2, DTYPE) - round_to(x1 * sin1, DTYPE)
    else:
        y1 = round_to(x1 * cos1, DTYPE) - round_to(x2 * sin1, DTYPE)
        y2 = round_to(x2 * cos2, DTYPE) + round_to(x1 * sin2, DTYPE)
    tl.store(Y, round_to(y1, DTYPE).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + half, round_to(y2, DTYPE).to(Y.dtype.element_ty), mask=inside)


def rotary_triton(x: Tensor, cos: Tensor, sin: Tensor, *, backward_to: torch.dtype | None = None) -> Tensor:
    """Triton twin of `rotary_reference`; with `backward_to`, a dtype, it takes the gradient of y to that of x."""
    x, cos, sin = x if x.stride(-1) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    batch, heads, length, head_dim = x.shape
    wide = torch.promote_types(x.dtype, cos.dtype)
    y = torch.empty_like(x, dtype=wide if backward_to is None else backward_to)
    if y.stride(-1) != 1:
        y = torch.empty(x.shape, dtype=y.dtype, device=x.device)
    if x.numel():
        rotary_kernel[batch * length,](
            *(x, y, cos, sin, length, heads, head_dim),
            *(*x.stride()[:3], *y.stride()[:3], cos.stride(0) if len(cos) > 1 else 0),
            BACKWARD=backward_to is not None,
            DTYPE=TRITON_DTYPE[wide],
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=max(16, triton.next_power_of_2(head_dim // 2)),
            enable_fp_fusion=False,
        )
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotary_triton(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotary_triton(dy, cos, sin, backward_to=ctx.dtype), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, H, T, D] turned by its position, with a gradient for x.

    Args:
        x: queries or keys; FP32, BF16 or FP16.
        cos: [B or 1, T, D], of the rotary embedding, without gradient.
        sin: as cos.

    Returns:
        Shape of x, in the dtype that x and cos promote to. On a CPU it is the reference, bit for bit.
    """
    if runs_in_triton(x):
        result: Tensor = _Rotary.apply(x, cos, sin)
        return result
    return rotary_reference(x, cos, sin)
