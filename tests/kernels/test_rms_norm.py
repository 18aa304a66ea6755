"""The trainer's norm and its gradient: against transformers' module, autograd and FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels.rms_norm import rms_norm, rms_norm_backward_triton, rms_norm_reference, rms_norm_triton

EPS = 1e-6
DTYPES = {  # input, gain; the interpreter rounds to BF16 in a way of its own
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.float16, torch.float32),
    "fp16": (torch.float16, torch.float16),
}


def inputs(shape: tuple[int, ...], x_dtype: torch.dtype, gain_dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    x, gain, dy = torch.randn(shape), 1 + 0.2 * torch.randn(shape[-1]), torch.randn(shape)
    wide = torch.promote_types(x_dtype, gain_dtype)
    return [x.to(device, x_dtype), gain.to(device, gain_dtype), dy.to(device, wide)]


def of_autograd(x: Tensor, gain: Tensor, dy: Tensor) -> list[Tensor]:
    """Value and both gradients of the reference."""
    x, gain = x.detach().requires_grad_(), gain.detach().requires_grad_()
    y = rms_norm_reference(x, gain, EPS)
    return [y.detach(), *torch.autograd.grad(y, (x, gain), dy)]


def exact(x: Tensor, gain: Tensor, dy: Tensor) -> list[Tensor]:
    """The same in FP64; no cast in between."""
    wide, gain = x.double().requires_grad_(), gain.double().requires_grad_()
    y = gain * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return [y.detach(), *torch.autograd.grad(y, (wide, gain), dy.double())]


@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 5, 16), (3, 2304), (0, 64)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_kernels_are_no_worse_than_torch(dtypes, shape):
    x, gain, dy = inputs(shape, *DTYPES[dtypes])
    ours = [rms_norm_triton(x, gain, EPS), *rms_norm_backward_triton(x, gain, EPS, dy, gain_too=True)]
    torchs = of_autograd(x, gain, dy)
    for mine, theirs, right in zip(ours, torchs, exact(x, gain, dy), strict=True):
        assert mine.dtype == theirs.dtype
        if mine.numel():
            assert_no_worse_than_torch(mine, theirs, right, floor=1e-6)


def test_rows_of_several_tiles_add_up_in_the_gain(monkeypatch):
    """Each program takes more than one tile: 70 rows of 512 are 18 tiles of 4 for 5 programs."""
    monkeypatch.setattr("trace_kernels.rms_norm.num_multiprocessors", lambda device: 1)
    monkeypatch.setattr("trace_kernels.rms_norm.PROGRAMS_PER_MULTIPROCESSOR", 5)
    x, gain, dy = inputs((70, 512), torch.float32, torch.float32)
    dx, dgain = rms_norm_backward_triton(x, gain, EPS, dy, gain_too=True)
    _, torchs_dx, torchs_dgain = of_autograd(x, gain, dy)
    _, right_dx, right_dgain = exact(x, gain, dy)
    assert_no_worse_than_torch(dx, torchs_dx, right_dx, floor=1e-6)
    assert_no_worse_than_torch(dgain, torchs_dgain, right_dgain, floor=1e-5)


def test_frozen_gain_costs_nothing():
    x, gain, dy = inputs((4, 32), torch.float32, torch.float32)
    dx, dgain = rms_norm_backward_triton(x, gain, EPS, dy, gain_too=False)
    assert dgain is None
    assert_bit_equal(dx, rms_norm_backward_triton(x, gain, EPS, dy, gain_too=True)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_transformers_norm(dtype):
    x, gain, dy = inputs((2, 3, 48), dtype, torch.float32)
    norm = Qwen3RMSNorm(48, EPS)
    norm.weight = torch.nn.Parameter(gain.clone())
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    gain = gain.clone().requires_grad_()
    expected, y = norm(theirs), rms_norm(ours, gain, EPS)
    assert_bit_equal(y.detach(), expected.detach())
    for mine, right in zip(
        torch.autograd.grad(y, (ours, gain), dy), torch.autograd.grad(expected, (theirs, norm.weight), dy), strict=True
    ):
        assert_bit_equal(mine, right)


GPU_DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 2048), (2, 512, 16, 128), (3, 577, 576), (64, 8192)], ids=str)
@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids=["fp32", "mixed", "bf16"])
def test_gpu_gradients_are_no_worse_than_torch(dtypes, shape):
    x, gain, dy = inputs(shape, *dtypes, "cuda")
    torchs, right = of_autograd(x, gain, dy), exact(x, gain, dy)
    x.requires_grad_(), gain.requires_grad_()
    y = rms_norm(x, gain, EPS)
    ours = [y.detach(), *torch.autograd.grad(y, (x, gain), dy)]
    for mine, theirs, exactly in zip(ours, torchs, right, strict=True):
        assert mine.dtype == theirs.dtype
        assert_no_worse_than_torch(mine, theirs, exactly, floor=1e-6)
