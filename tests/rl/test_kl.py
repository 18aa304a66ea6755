"""KL estimators: values by hand, and whose gradient each has, measured against the exact KL of two small softmaxes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trace_lightning.rl import K1, K2, K3, KLEstimator
from trace_lightning.rl.kl import K3_LIMIT


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (K1(), [0.5, -1.0, 0.0]),
        (K2(), [0.125, 0.5, 0.0]),
        (K3(), [math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1, 0.0]),
    ],
)
@pytest.mark.parametrize("gradient", ["value", "k2"])
def test_values_by_hand(estimator: KLEstimator, expected: list[float], gradient: str) -> None:
    gap = torch.tensor([0.5, -1.0, 0.0])
    got = type(estimator)(gradient)(gap, torch.ones(3))
    torch.testing.assert_close(got, torch.tensor(expected))


def test_k3_is_bounded() -> None:
    assert K3()(torch.tensor([-20.0]), torch.ones(1)).item() == K3_LIMIT


class World:
    """All tokens of a vocabulary of 6 under policy p, old policy and reference; expectations are exact sums."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = [torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(3)]
        self.logits, self.old, self.ref = draw[0].requires_grad_(), draw[1].log_softmax(-1), draw[2].log_softmax(-1)

    def kl_gradient(self) -> Tensor:
        p = self.logits.log_softmax(-1)
        (found,) = torch.autograd.grad((p.exp() * (p - self.ref)).sum(), self.logits)
        return found

    def reverse_gradient(self) -> Tensor:
        p = self.logits.log_softmax(-1)
        (found,) = torch.autograd.grad((self.ref.exp() * (self.ref - p)).sum(), self.logits)
        return found

    def expected_gradient(self, estimator: KLEstimator, *, off_policy: bool) -> Tensor:
        """Of the loss as a batch has it: tokens drawn from p itself, or from the old policy, are fixed."""
        p = self.logits.log_softmax(-1)
        source = self.old if off_policy else p.detach()
        values = estimator(p - self.ref, (p - source).exp())
        (found,) = torch.autograd.grad((source.exp() * values).sum(), self.logits)
        return found


@pytest.mark.parametrize("estimator", [K1("k2"), K2(), K2("k2"), K3("k2"), K1("ratio"), K3("ratio")], ids=repr)
def test_these_have_the_gradient_of_kl_on_policy(estimator: KLEstimator) -> None:
    world = World()
    torch.testing.assert_close(world.expected_gradient(estimator, off_policy=False), world.kl_gradient())


@pytest.mark.parametrize("estimator", [K1("ratio"), K3("ratio")], ids=repr)
def test_these_have_it_off_policy_as_well(estimator: KLEstimator) -> None:
    world = World()
    torch.testing.assert_close(world.expected_gradient(estimator, off_policy=True), world.kl_gradient())
    naive = world.expected_gradient(K2(), off_policy=True)
    assert (naive - world.kl_gradient()).abs().max() > 0.05


def test_plain_k1_pushes_nowhere_and_plain_k3_minimises_the_other_direction() -> None:
    world = World()
    nowhere = world.expected_gradient(K1("value"), off_policy=False)
    torch.testing.assert_close(nowhere, torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(world.expected_gradient(K3("value"), off_policy=False), world.reverse_gradient())
