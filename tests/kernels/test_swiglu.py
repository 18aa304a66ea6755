"""`silu(gate) * up` and its gradients: against autograd and FP64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels.swiglu import swiglu, swiglu_backward_triton, swiglu_reference, swiglu_triton


def of_autograd(gate: Tensor, up: Tensor, dy: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Value and gradients of the reference, computed in `dtype`."""
    gate, up = (x.detach().to(dtype).requires_grad_() for x in (gate, up))
    y = swiglu_reference(gate, up)
    return [y.detach(), *torch.autograd.grad(y, (gate, up), dy.to(dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has a BF16 of its own
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 1000), (0, 8)], ids=str)
def test_kernels_are_no_worse_than_torch(shape, dtype):
    gate, up, dy = (4 * torch.randn(3, *shape)).to(dtype)
    ours = [swiglu_triton(gate, up), *swiglu_backward_triton(gate, up, dy)]
    torchs, exact = (of_autograd(gate, up, dy, kind) for kind in (dtype, torch.float64))
    for mine, theirs, right in zip(ours, torchs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.numel():
            assert_no_worse_than_torch(mine, theirs, right, floor=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_large_gates_saturate():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    dgate, dup = swiglu_backward_triton(gate, torch.ones(5), torch.ones(5))
    assert_bit_equal(swiglu_triton(gate, torch.ones(5)), torch.tensor([-0.0, -0.0, 0.0, 100.0, 1e4]))
    assert_bit_equal(dgate.abs(), torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert dup.isfinite().all()


def test_strided_inputs():
    gate, up = torch.randn(4, 64).chunk(2, dim=-1)
    assert_no_worse_than_torch(
        swiglu_triton(gate, up), swiglu_reference(gate, up), swiglu_reference(gate.double(), up.double()), floor=1e-7
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_gradients_are_no_worse_than_torch(dtype):
    gate, up, dy = (4 * torch.randn(3, 512, 6144, device="cuda")).to(dtype)
    torchs, exact = (of_autograd(gate, up, dy, kind) for kind in (dtype, torch.float64))
    gate.requires_grad_(), up.requires_grad_()
    y = swiglu(gate, up)
    for mine, theirs, right in zip([y.detach(), *torch.autograd.grad(y, (gate, up), dy)], torchs, exact, strict=True):
        assert_no_worse_than_torch(mine, theirs, right, floor=1e-6)
