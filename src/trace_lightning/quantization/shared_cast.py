"""One cast of an input that several linears multiply, and one gradient back.

Under autocast each linear casts its input by itself: q, k and v the same FP32 tensor three times, gate and up twice.
In the backward pass each gradient is cast to FP32 before autograd adds them up. `cast_for(x, dtype, n)` casts once and
hands out n tensors over the same memory; their gradients are added in FP32, in the order in which autograd adds them:
the same values, bit for bit.

What was left out: letting autograd accumulate on the cast tensor. It would add in the narrow dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _CastFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, n: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        cast = x.to(dtype)
        return tuple(cast.detach() for _ in range(n))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[-1].to(ctx.dtype)
        for gradient in reversed(gradients[:-1]):
            total += gradient
        return total, None, None


def cast_for(x: Tensor, dtype: torch.dtype, n: int) -> list[Tensor]:
    """`x` in `dtype`, n times over, one for each of n linears: several uses of one result add up in the narrow dtype.

    Args:
        x: [..., C].
        dtype: of the matmuls.
        n: how many linears multiply it.
    """
    if x.dtype == dtype or n == 1:
        return [x.to(dtype)] * n
    return list(_CastFor.apply(x, dtype, n))
