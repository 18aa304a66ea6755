"""Rotary embeddings: the values, and gradients, of transformers' function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels.rotary import rotary, rotary_reference, rotary_triton

DTYPES = {  # x, cos; the interpreter rounds to BF16 in a way of its own
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.float16, torch.float32),
    "fp16": (torch.float16, torch.float16),
}


def inputs(
    x_dtype: torch.dtype, cos_dtype: torch.dtype, head_dim: int, batch: int = 1, device: str = "cpu"
) -> list[Tensor]:
    """x as a projection leaves it: [B, T, H, D] seen as [B, H, T, D]; its gradient alike; cos and sin."""
    x, dy = torch.randn(2, 2, 5, 3, head_dim).to(device, x_dtype).transpose(2, 3)
    cos, sin = torch.randn(2, batch, 5, head_dim).to(device, cos_dtype)
    return [x, dy.to(torch.promote_types(x_dtype, cos_dtype)), cos, sin]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head_dim", [16, 40])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_values_and_gradients_are_torchs(dtypes, head_dim, batch):
    x, dy, cos, sin = inputs(*DTYPES[dtypes], head_dim, batch)
    ours, back = rotary_triton(x, cos, sin), rotary_triton(dy, cos, sin, backward_to=x.dtype)
    expected = rotary_reference(x.requires_grad_(), cos, sin)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    assert_bit_equal(ours, expected.detach())
    assert ours.stride() == x.stride()
    if x.dtype == cos.dtype:
        assert_bit_equal(back, gradient)
    else:  # autograd rounds each term
        wide = rotary_triton(dy, cos, sin, backward_to=torch.float32)
        assert_no_worse_than_torch(back, gradient, wide)
        assert_bit_equal(back, wide.to(x.dtype))


def test_on_a_cpu_it_is_transformers_function():
    x, _, cos, sin = inputs(torch.bfloat16, torch.float32, 32)
    wide_cos, wide_sin = cos.unsqueeze(1), sin.unsqueeze(1)
    assert_bit_equal(rotary(x, cos, sin), (x * wide_cos) + (rotate_half(x) * wide_sin))


def test_other_strides_and_no_tokens():
    x, _, cos, sin = inputs(torch.float32, torch.float32, 16)
    longer = torch.randn(2, 2, 9, 16)[:, :, :5]
    assert_bit_equal(rotary_triton(x, *longer), rotary_reference(x, *longer))
    reversed_strides = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_bit_equal(rotary_triton(reversed_strides, cos, sin), rotary_reference(x, cos, sin))
    assert rotary_triton(x[:, :, :0], cos[:, :0], sin[:, :0]).shape == (2, 3, 0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["fp32", "mixed", "bf16"],
)
def test_gpu_values_and_gradients_are_torchs(dtypes):
    x, dy, cos, sin = inputs(*dtypes, 128, device="cuda")
    torchs = x.detach().requires_grad_()
    expected = rotary_reference(torchs, cos, sin)
    (gradient,) = torch.autograd.grad(expected, torchs, dy)
    y = rotary(x.requires_grad_(), cos, sin)
    (ours,) = torch.autograd.grad(y, x, dy)
    assert_bit_equal(y.detach(), expected.detach())
    if x.dtype == cos.dtype:
        assert_bit_equal(ours, gradient)
    else:
        assert_no_worse_than_torch(ours, gradient, rotary_triton(dy, cos, sin, backward_to=torch.float32))
