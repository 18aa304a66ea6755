"""The rotation of Q and K: one matrix, its own inverse and its own gradient."""

from __future__ import annotations

import pytest
import torch

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels.hadamard import _Rotate, rotate, rotate_reference, rotate_triton


def heads(dtype: torch.dtype, head_dim: int, device: str = "cpu") -> torch.Tensor:
    """[B, H, T, D] over the memory of [B, T, H, D]."""
    return torch.randn(2, 7, 3, head_dim).to(device, dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_kernel_adds_in_the_order_of_the_reference(head_dim, dtype):
    x = heads(dtype, head_dim)
    y = rotate_triton(x)
    assert_bit_equal(y, rotate_reference(x))
    assert y.stride() == x.stride()


def test_it_is_the_hadamard_matrix():
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)], dtype=torch.float64)
    x = torch.randn(5, 32)
    right = (x.double().view(5, 2, 16) @ signs / 4).view(5, 32)
    assert_no_worse_than_torch(rotate(x), (x.view(5, 2, 16) @ (signs.float() / 4)).view(5, 32), right, floor=1e-7)


@pytest.mark.parametrize("layout", ["holes", "blocks apart", "empty"])
def test_other_layouts_are_copied(layout):
    x = torch.randn(3, 32, 16)
    x = {"holes": x[:, ::2], "blocks apart": x.transpose(1, 2), "empty": x[:0]}[layout]
    assert_bit_equal(rotate_triton(x), rotate_reference(x))


def test_gradient_is_the_rotation_itself():
    x, dy = heads(torch.float32, 32).requires_grad_(), heads(torch.float32, 32)
    (ours,) = torch.autograd.grad(_Rotate.apply(x), x, dy)
    (torchs,) = torch.autograd.grad(rotate_reference(x), x, dy)
    assert_bit_equal(ours, rotate_reference(dy))
    assert_no_worse_than_torch(ours, torchs, rotate_reference(dy.double()).float(), floor=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_gradient_is_the_rotation_itself(dtype):
    x, dy = heads(dtype, 128, "cuda").requires_grad_(), heads(dtype, 128, "cuda")
    y = rotate(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_bit_equal(y.detach(), rotate_reference(x.detach()))
    assert_bit_equal(dx, rotate_reference(dy))
