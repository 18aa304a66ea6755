"""`silu(gate) * up` with a gradient: the trainer's twin of `gated_activation.py`.

    gate, up [..., I] in X  ->  y [..., I] in X

    forward    gate, up in, y out             a = X(silu(gate)),  y = X(a up)
    backward   gate, up, dy in, both gradients out

In torch it is two launches forward and three backward, and silu(gate) is kept for the backward pass: I elements per
token and layer. Here it is computed anew, in registers. Casts are torch's: the activation is computed in FP32 and
rounded to X, and so are the product and each gradient.

What was left out: other activations, which no family in `models/fused.py` is trained with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trace_kernels.gated_activation import sigmoid, silu
from trace_kernels.rows import round_to, runs_in_triton

_TILE = 2048  # elements a program takes


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in torch; autograd has its gradient."""
    return F.silu(gate) * up


@triton.jit
def swiglu_kernel(GATE, UP, Y, numel, TILE: tl.constexpr):
    """Grid (tiles)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    gate = tl.load(GATE + at, mask=at < numel, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=at < numel, other=0.0).to(tl.float32)
    active = round_to(silu(gate), GATE.dtype.element_ty)
    tl.store(Y + at, (active * up).to(Y.dtype.element_ty), mask=at < numel)


@triton.jit
def swiglu_backward_kernel(GATE, UP, DY, DGATE, DUP, numel, TILE: tl.constexpr):
    """Grid (tiles)."""
    X: tl.constexpr = GATE.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    gate = tl.load(GATE + at, mask=at < numel, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=at < numel, other=0.0).to(tl.float32)
    dy = tl.load(DY + at, mask=at < numel, other=0.0).to(tl.float32)
    slope = sigmoid(gate)
    slope *= 1.0 + gate * (1.0 - slope)
    tl.store(DUP + at, (dy * round_to(silu(gate), X)).to(X), mask=at < numel)
    tl.store(DGATE + at, (round_to(dy * up, X) * slope).to(X), mask=at < numel)


def swiglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Triton twin of `swiglu_reference`, without gradient."""
    gate, up = gate.contiguous(), up.contiguous()
    y, grid = torch.empty_like(gate), (triton.cdiv(gate.numel(), _TILE),)
    if gate.numel():
        swiglu_kernel[grid](gate, up, y, gate.numel(), TILE=_TILE, enable_fp_fusion=False)
    return y


def swiglu_backward_triton(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu` for gate and up."""
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup, grid = torch.empty_like(gate), torch.empty_like(up), (triton.cdiv(gate.numel(), _TILE),)
    if gate.numel():
        tensors = gate, up, dy, dgate, dup
        swiglu_backward_kernel[grid](*tensors, gate.numel(), TILE=_TILE, enable_fp_fusion=False)
    return dgate, dup


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_triton(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return swiglu_backward_triton(gate, up, dy)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, with gradients.

    Args:
        gate: [..., I]; FP32, BF16 or FP16.
        up: same shape and dtype.

    Returns:
        Their shape and dtype. On a CPU it is the reference, bit for bit.
    """
    if runs_in_triton(gate) and gate.dtype == up.dtype:
        result: Tensor = _SwiGLU.apply(gate, up)
        return result
    return swiglu_reference(gate, up)
