"""Policy losses: by hand on three tokens, against REINFORCE, under masks, and under every way to cut a batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jsonargparse
import pytest
import torch
from torch import Tensor

from trace_lightning.rl import (
    DAPO,
    GRPO,
    TBPO,
    DrGRPO,
    GlobalCounts,
    LossInputs,
    PolicyLoss,
    ScoreCentering,
    merge_metrics,
)
from trace_lightning.rl.losses import K3_LIMIT, LOG_RATIO_LIMIT

LOSSES = [
    *(GRPO(), DrGRPO(), DAPO(), GRPO(delta=2.0, beta=0.1), DAPO(beta=0.05)),
    *(TBPO(positive_high=9.0, negative_low=0.9, negative_high=9.0), ScoreCentering(), ScoreCentering(cap=None)),
]
RATIOS = (1.5, 0.5, 1.1)


def three_tokens(advantage: float, **kwargs: Any) -> LossInputs:
    old = torch.full((1, 3), -2.0)
    policy = old + torch.tensor([RATIOS]).log()
    return LossInputs(
        policy_logprobs_BT=policy.requires_grad_(),
        old_logprobs_BT=old,
        rollout_logprobs_BT=old,
        advantages_B=torch.tensor([advantage]),
        mask_BT=torch.ones(1, 3, dtype=torch.bool),
        counts=GlobalCounts(3, 1, 10),
        **kwargs,
    )


def random_inputs(lengths: list[int], width: int = 7) -> LossInputs:
    shape = (len(lengths), width)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    policy = -torch.rand(shape) * 3
    top, rollout_top = (torch.log_softmax(torch.randn(*shape, 5), dim=-1)[..., :4] for _ in range(2))
    return LossInputs(
        policy_logprobs_BT=policy.requires_grad_(),
        old_logprobs_BT=policy.detach() + 0.3 * torch.randn(shape),
        rollout_logprobs_BT=policy.detach() + 0.3 * torch.randn(shape),
        ref_logprobs_BT=policy.detach() + 0.3 * torch.randn(shape),
        weights_BT=torch.rand(shape) * 2,
        topk_logprobs_BTK=top,
        rollout_topk_logprobs_BTK=rollout_top,
        advantages_B=torch.randn(len(lengths)),
        mask_BT=mask,
        counts=GlobalCounts.from_mask(mask, 9),
    )


def rows(inputs: LossInputs, index: Any, width: int | None = None) -> LossInputs:
    """A micro-batch of some rows, cut to `width` tokens, with the counts of the whole."""
    parts = {
        f.name: getattr(inputs, f.name)[index][:, :width] if f.name != "advantages_B" else inputs.advantages_B[index]
        for f in dataclasses.fields(inputs)
        if f.name != "counts" and getattr(inputs, f.name) is not None
    }
    return LossInputs(**parts, counts=inputs.counts)


@pytest.mark.parametrize(
    ("loss", "advantage", "expected"),
    [
        (GRPO(), 1.0, -(1.2 + 0.5 + 1.1) / 3),
        (GRPO(), -1.0, (1.5 + 0.8 + 1.1) / 3),
        (GRPO(), 2.0, -2 * (1.2 + 0.5 + 1.1) / 3),
        (GRPO(epsilon_high=0.4), 1.0, -(1.4 + 0.5 + 1.1) / 3),
        (GRPO(delta=1.3), -1.0, (1.3 + 0.8 + 1.1) / 3),
        (GRPO(delta=1.3), 1.0, -(1.2 + 0.5 + 1.1) / 3),
        (DrGRPO(), 1.0, -(1.2 + 0.5 + 1.1) / 10),
        (DAPO(), 1.0, -(1.28 + 0.5 + 1.1) / 3),
        (DAPO(), -1.0, (1.5 + 0.8 + 1.1) / 3),
    ],
)
def test_three_tokens_by_hand(loss: PolicyLoss, advantage: float, expected: float) -> None:
    assert loss(three_tokens(advantage)).loss.item() == pytest.approx(expected, rel=1e-5)


def test_gradient_by_hand_vanishes_only_where_the_clip_bites() -> None:
    inputs = three_tokens(1.0)
    GRPO()(inputs).loss.backward()
    torch.testing.assert_close(inputs.policy_logprobs_BT.grad, torch.tensor([[0.0, -0.5, -1.1]]) / 3)
    inputs = three_tokens(-1.0)
    GRPO()(inputs).loss.backward()
    torch.testing.assert_close(inputs.policy_logprobs_BT.grad, torch.tensor([[1.5, 0.0, 1.1]]) / 3)


def test_weights_multiply_the_policy_term_and_get_no_gradient() -> None:
    weights = torch.tensor([[2.0, 0.5, 0.0]], requires_grad=True)
    outputs = GRPO()(three_tokens(1.0, weights_BT=weights))
    assert outputs.loss.item() == pytest.approx(-(2 * 1.2 + 0.5 * 0.5) / 3, rel=1e-5)
    outputs.loss.backward()
    assert weights.grad is None


def test_kl_is_k3_and_is_not_weighted() -> None:
    inputs = three_tokens(1.0, weights_BT=torch.zeros(1, 3))
    inputs.ref_logprobs_BT = inputs.policy_logprobs_BT.detach() - 0.5
    outputs = GRPO(beta=0.1)(inputs)
    expected = math.exp(-0.5) + 0.5 - 1
    assert outputs.loss.item() == pytest.approx(0.1 * expected, rel=1e-5)
    total, count = outputs.metrics["kl"]
    assert (total / count).item() == pytest.approx(expected, rel=1e-5)


def test_kl_of_an_outlier_is_bounded() -> None:
    inputs = three_tokens(0.0)
    inputs.ref_logprobs_BT = inputs.policy_logprobs_BT.detach() + torch.tensor([[100.0, 0.0, 0.0]])
    outputs = GRPO(beta=1.0)(inputs)
    assert outputs.loss.item() == pytest.approx(K3_LIMIT / 3, rel=1e-5)
    outputs.loss.backward()
    assert inputs.policy_logprobs_BT.grad.isfinite().all()


@pytest.mark.parametrize(
    ("advantage", "low", "high"), [(1.0, 0, 1), (-1.0, 1, 0), (0.0, 0, 0)], ids=["positive", "negative", "zero"]
)
def test_clip_metrics(advantage: float, low: int, high: int) -> None:
    metrics = GRPO()(three_tokens(advantage)).metrics
    pairs = {name: (total.item(), count.item()) for name, (total, count) in metrics.items()}
    assert pairs == {
        "clip_ratio/low_mean": (low, 3),
        "clip_ratio/high_mean": (high, 3),
        "clip_ratio/region_mean": (low + high, 3),
    }


@pytest.mark.parametrize("loss", [GRPO(), DrGRPO(), DAPO()])
def test_gradient_at_ratio_one_is_reinforce(loss: PolicyLoss) -> None:
    inputs = random_inputs([2, 6, 4])
    inputs.old_logprobs_BT = inputs.policy_logprobs_BT.detach()
    loss(inputs).loss.backward()
    mask, lengths = inputs.mask_BT.float(), inputs.mask_BT.sum(-1, keepdim=True)
    share = {GRPO: mask / lengths / 3, DrGRPO: mask / 27, DAPO: mask / 12}[type(loss)]
    surrogate = -(share * inputs.weights_BT * inputs.advantages_B[:, None] * inputs.policy_logprobs_BT).sum()
    (expected,) = torch.autograd.grad(surrogate, inputs.policy_logprobs_BT)
    torch.testing.assert_close(inputs.policy_logprobs_BT.grad, expected)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_masked_tokens_have_exactly_zero_gradient(loss: PolicyLoss, garbage: float) -> None:
    inputs = random_inputs([2, 6, 0])
    clean = loss(inputs)
    clean.loss.backward()
    expected = inputs.policy_logprobs_BT.grad
    assert (expected[~inputs.mask_BT] == 0).all()
    assert (expected[inputs.mask_BT] != 0).any()
    for field in dataclasses.fields(inputs):
        if field.name not in ("mask_BT", "advantages_B", "counts"):
            tensor = getattr(inputs, field.name).detach()
            mask = inputs.mask_BT if tensor.ndim == 2 else inputs.mask_BT.unsqueeze(-1)
            setattr(inputs, field.name, tensor.masked_fill(~mask, garbage))
    inputs.policy_logprobs_BT.requires_grad_()
    dirty = loss(inputs)
    dirty.loss.backward()
    assert torch.equal(dirty.loss, clean.loss)
    assert torch.equal(inputs.policy_logprobs_BT.grad, expected)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("lengths", [[0, 0], []], ids=["masked", "no rows"])
def test_empty_masks_give_zero_loss_and_gradient(loss: PolicyLoss, lengths: list[int]) -> None:
    inputs = random_inputs(lengths) if lengths else rows(random_inputs([3]), slice(0, 0))
    inputs.policy_logprobs_BT = inputs.policy_logprobs_BT.detach().requires_grad_()
    inputs.counts = GlobalCounts.from_mask(inputs.mask_BT, 9)
    outputs = loss(inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == 0
    assert torch.equal(inputs.policy_logprobs_BT.grad, torch.zeros_like(inputs.policy_logprobs_BT))
    assert all(count == 0 and total == 0 for total, count in outputs.metrics.values())


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], [[3, 0], [2, 1]]], ids=str)
def test_splitting_never_changes_the_update(loss: PolicyLoss, split: list[list[int]]) -> None:
    inputs = random_inputs([2, 6, 0, 5])
    whole = loss(inputs)
    (expected,) = torch.autograd.grad(whole.loss, inputs.policy_logprobs_BT)
    parts = []
    for index in split:
        width = int(inputs.mask_BT[index].sum(-1).max())  # each micro-batch is only as wide as its longest row
        parts.append(loss(rows(inputs, index, width)))
    total = torch.stack([part.loss for part in parts]).sum()
    (got,) = torch.autograd.grad(total, inputs.policy_logprobs_BT)
    torch.testing.assert_close(total, whole.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    merged = merge_metrics(part.metrics for part in parts)
    assert merged.keys() == whole.metrics.keys()
    for name, (total, count) in whole.metrics.items():
        torch.testing.assert_close(merged[name][0], total)
        assert merged[name][1] == count


@pytest.mark.parametrize(("loss", "expected"), [(DAPO(), 2.5), (GRPO(), 2.0), (DrGRPO(), 20 / 16)])
@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]]], ids=["whole", "split"])
def test_two_and_six_tokens(loss: PolicyLoss, expected: float, split: list[list[int]]) -> None:
    mask = torch.arange(6)[None] < torch.tensor([[2], [6]])
    logprobs = torch.full((2, 6), -1.0)
    inputs = LossInputs(
        policy_logprobs_BT=logprobs.clone().requires_grad_(),
        old_logprobs_BT=logprobs,
        rollout_logprobs_BT=logprobs,
        weights_BT=torch.ones(2, 6),
        ref_logprobs_BT=logprobs,
        advantages_B=torch.tensor([-1.0, -3.0]),  # at ratio 1 the per-token losses are 1 and 3
        mask_BT=mask,
        counts=GlobalCounts.from_mask(mask, 8),
    )
    assert sum(loss(rows(inputs, part)).loss.item() for part in split) == pytest.approx(expected)


def test_on_policy_loss_is_zero_but_the_gradient_is_not() -> None:
    inputs = three_tokens(1.0)
    old = torch.full((2, 3), -1.0)
    inputs = LossInputs(
        policy_logprobs_BT=old.clone().requires_grad_(),
        old_logprobs_BT=old,
        rollout_logprobs_BT=old,
        advantages_B=torch.tensor([1.0, -1.0]),
        mask_BT=torch.ones(2, 3, dtype=torch.bool),
        counts=GlobalCounts(6, 2, 3),
    )
    loss = GRPO()(inputs).loss
    loss.backward()
    assert loss.item() == 0
    assert inputs.policy_logprobs_BT.grad.norm() > 0


@pytest.mark.parametrize("gap", [1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(gap: float, advantage: float) -> None:
    inputs = three_tokens(advantage)
    inputs.policy_logprobs_BT = (inputs.old_logprobs_BT + gap).requires_grad_()
    loss = GRPO()(inputs).loss
    loss.backward()
    assert loss.isfinite()
    assert loss.abs() <= math.exp(LOG_RATIO_LIMIT) * 1.001
    assert torch.equal(inputs.policy_logprobs_BT.grad, torch.zeros(1, 3))


def test_bad_input_is_named() -> None:
    good = three_tokens(1.0)
    with pytest.raises(ValueError, match="old_logprobs_BT has shape"):
        dataclasses.replace(good, old_logprobs_BT=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="advantages_B has shape"):
        dataclasses.replace(good, advantages_B=torch.zeros(3))
    with pytest.raises(ValueError, match="topk_logprobs_BTK has shape"):
        dataclasses.replace(good, topk_logprobs_BTK=torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="a mask is bool"):
        dataclasses.replace(good, mask_BT=torch.ones(1, 3))
    with pytest.raises(ValueError, match="reference log-probs"):
        GRPO(beta=0.1)(good)
    for field, value in {"epsilon": 0.0, "epsilon_high": -0.1, "delta": 1.1, "beta": -1.0}.items():
        with pytest.raises(ValueError, match=rf"loss\.{field}"):
            GRPO(**{field: value})


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--loss=DAPO"], DAPO()),
        (["--loss=trace_lightning.rl.GRPO", "--loss.epsilon=0.1", "--loss.beta=0.01"], GRPO(epsilon=0.1, beta=0.01)),
        (["--loss=DrGRPO", "--loss.delta=3"], DrGRPO(delta=3.0)),
        (["--loss=TBPO", "--loss.cap=1.5"], TBPO(cap=1.5)),
        (["--loss=ScoreCentering", "--loss.cap=null"], ScoreCentering(cap=None)),
    ],
)
def test_any_loss_can_be_named_in_a_config(args: list[str], expected: PolicyLoss) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=PolicyLoss)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed within our bounds
    assert instantiate(parser.parse_args(args)).loss == expected


def test_a_loss_of_ones_own_needs_one_method() -> None:
    class Reinforce(PolicyLoss):
        def __call__(self, inputs: LossInputs) -> Any:
            return -(inputs.policy_logprobs_BT * inputs.advantages_B[:, None]).sum() / inputs.counts.num_tokens

    loss: Tensor = Reinforce()(three_tokens(3.0))
    assert loss.item() == pytest.approx(6 - sum(math.log(r) for r in RATIOS), rel=1e-5)
