"""One cast for several linears: the values and gradients of one cast each, bit for bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from numerics import assert_bit_equal
from trace_lightning.quantization.shared_cast import cast_for


def test_gradients_are_those_of_a_cast_per_linear():
    x, weights = torch.randn(2, 30, 48), torch.randn(3, 20, 48, dtype=torch.bfloat16)
    shared, single = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = [F.linear(cast, w) for cast, w in zip(cast_for(shared, torch.bfloat16, 3), weights, strict=True)]
    theirs = [F.linear(single.to(torch.bfloat16), w) for w in weights]
    for mine, right in zip(ours, theirs, strict=True):
        assert_bit_equal(mine.detach(), right.detach())
    gradients = list(torch.randn(3, 2, 30, 20, dtype=torch.bfloat16))
    torch.autograd.backward(ours, gradients)
    torch.autograd.backward(theirs, gradients)
    assert_bit_equal(shared.grad, single.grad)
    summed = x.clone().to(torch.bfloat16).requires_grad_()
    torch.autograd.backward([F.linear(summed, w) for w in weights], gradients)
    assert not torch.equal(shared.grad.to(torch.bfloat16), summed.grad)  # what a shared tensor alone would give


def test_results_share_their_memory():
    q, k, v = cast_for(torch.randn(4, 8), torch.bfloat16, 3)
    assert q.data_ptr() == k.data_ptr() == v.data_ptr()


def test_nothing_is_copied_where_nothing_is_cast():
    x = torch.randn(4, 8)
    assert all(result is x for result in cast_for(x, torch.float32, 2))
