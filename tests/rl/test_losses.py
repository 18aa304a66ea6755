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
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    K1,
    K2,
    K3,
    PPO,
    RLOO,
    SAPO,
    TBPO,
    CISPOBand,
    DrGRPO,
    GlobalCounts,
    GSPOToken,
    LossInputs,
    PolicyLoss,
    ScoreCentering,
    merge_metrics,
)
from trace_lightning.rl.kl import K3_LIMIT
from trace_lightning.rl.losses import LOG_RATIO_LIMIT

LOSSES = [
    *(GRPO(), DrGRPO(), DAPO(), GRPO(delta=2.0, beta=0.1), DAPO(beta=0.05)),
    *(TBPO(positive_high=9.0, negative_low=0.9, negative_high=9.0), ScoreCentering(), ScoreCentering(cap=None)),
    *(PPO(delta=3.0, entropy_coef=0.1), CISPO(cap=1.2), CISPOBand(), SAPO(beta=0.1, kl=K2())),
    *(kind(epsilon=0.9, epsilon_high=9.0, beta=0.1, kl=K1(gradient="ratio")) for kind in (GSPO, GSPOToken, RLOO)),
    *(GRPO(beta=0.1, kl=K1()), GRPO(beta=0.1, kl=K3(gradient="k2")), GRPO(beta=0.1, kl=K2(gradient="ratio"))),
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
        entropy_BT=torch.rand(shape),
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
        (PPO(), 1.0, -(1.2 + 0.5 + 1.1) / 3),
        (PPO(delta=1.25), -1.0, (1.25 + 0.8 + 1.1) / 3),
        # the ratios' geometric mean is .825 ** (1 / 3) = .9379
        (GSPO(epsilon=0.2), 1.0, -(0.825 ** (1 / 3))),
        (GSPO(), 2.0, -2 * 0.825 ** (1 / 3)),
        (GSPO(), -1.0, 1 - 3e-4),
        (GSPOToken(epsilon=0.2), 1.0, -(0.825 ** (1 / 3))),
        (GSPOToken(), -1.0, 1 - 3e-4),
        (RLOO(), 1.0, -0.825),
        (RLOO(epsilon=0.1), -1.0, 0.9),
        # -w A log pi with log pi = -2 + log r
        (CISPO(cap=1.2), 1.0, -sum(min(r, 1.2) * (-2 + math.log(r)) for r in RATIOS) / 3),
        (CISPO(), -1.0, sum(r * (-2 + math.log(r)) for r in RATIOS) / 3),
        (CISPO(floor=0.8), 1.0, -sum(max(r, 0.8) * (-2 + math.log(r)) for r in RATIOS) / 3),
        (CISPOBand(), 1.0, -sum(min(r, 1.28) * (-2 + math.log(r)) for r in RATIOS) / 3),
        (CISPOBand(epsilon=0.3), 1.0, -sum(min(max(r, 0.7), 1.28) * (-2 + math.log(r)) for r in RATIOS) / 3),
        (SAPO(), 1.0, -sum(4 / (1 + math.exp(1 - r)) for r in RATIOS) / 3),
        (SAPO(), -1.0, sum(4 / 1.05 / (1 + math.exp(1.05 * (1 - r))) for r in RATIOS) / 3),
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


def gradient(loss: PolicyLoss, inputs: LossInputs) -> Tensor:
    (found,) = torch.autograd.grad(loss(inputs).loss, inputs.policy_logprobs_BT)
    return found


def test_gradients_of_sequence_ratios_by_hand() -> None:
    mean = 0.825 ** (1 / 3)
    for kind in (GSPO, GSPOToken):
        torch.testing.assert_close(gradient(kind(epsilon=0.2), three_tokens(1.0)), torch.full((1, 3), -mean / 3))
        assert torch.equal(gradient(kind(), three_tokens(-1.0)), torch.zeros(1, 3)), "below 1 - epsilon with A < 0"
    torch.testing.assert_close(gradient(RLOO(), three_tokens(1.0)), torch.full((1, 3), -0.825))
    assert torch.equal(gradient(RLOO(epsilon=0.1), three_tokens(-1.0)), torch.zeros(1, 3))


def test_where_gspo_weighs_by_tokens_and_where_by_their_mean() -> None:
    weights = torch.tensor([[2.0, 1.0, 0.0]])
    mean = 0.825 ** (1 / 3)
    got = gradient(GSPO(epsilon=0.2), three_tokens(1.0, weights_BT=weights))
    torch.testing.assert_close(got, torch.full((1, 3), -mean / 3))
    got = gradient(GSPOToken(epsilon=0.2), three_tokens(1.0, weights_BT=weights))
    torch.testing.assert_close(got, -mean / 3 * weights)


def test_cispo_keeps_the_gradient_that_the_clip_removes() -> None:
    assert gradient(PPO(), three_tokens(1.0))[0, 0] == 0
    torch.testing.assert_close(gradient(CISPO(cap=1.2), three_tokens(1.0)), torch.tensor([[-1.2, -0.5, -1.1]]) / 3)
    # the same number means another thing to the two forms
    torch.testing.assert_close(gradient(CISPO(cap=1.25), three_tokens(1.0))[0, 0], torch.tensor(-1.25 / 3))
    torch.testing.assert_close(gradient(CISPOBand(epsilon_high=0.25), three_tokens(1.0))[0, 0], torch.tensor(-1.25 / 3))


def test_sapos_gradient_by_hand() -> None:
    gate = [4 * s * (1 - s) for s in (1 / (1 + math.exp(1 - r)) for r in RATIOS)]
    expected = -torch.tensor([[g * r for g, r in zip(gate, RATIOS, strict=True)]]) / 3
    torch.testing.assert_close(gradient(SAPO(), three_tokens(1.0)), expected)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_delta_is_the_dual_clip(advantage: float) -> None:
    """Ye et al. (arXiv 1912.09729): where A < 0, the objective is max(min(r A, clip(r) A), c A)."""
    inputs, c = three_tokens(advantage), 1.3
    ratios = torch.tensor(RATIOS)
    objective = torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.2) * advantage)
    if advantage < 0:
        objective = objective.clamp(min=c * advantage)
    assert PPO(delta=c)(inputs).loss.item() == pytest.approx(-objective.mean().item(), rel=1e-6)
    assert (gradient(PPO(delta=c), inputs)[0, 0] == 0) or advantage > 0


def double(inputs: LossInputs) -> LossInputs:
    parts = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    wide = {
        name: value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in parts.items()
    }
    return LossInputs(**wide)


SMOOTH = [GRPO(), DrGRPO(), PPO(delta=3.0), SAPO(), GSPO(epsilon=0.9, epsilon_high=9.0), RLOO(epsilon=0.9)]


@pytest.mark.parametrize("loss", SMOOTH, ids=repr)
@pytest.mark.parametrize(
    "extra", [{}, {"beta": 0.3}, {"beta": 0.3, "kl": K1(gradient="ratio")}, {"entropy_coef": 0.2}], ids=str
)
def test_gradients_numerically(loss: PolicyLoss, extra: dict[str, Any]) -> None:
    """In FP64, against differences. Forms that detach something have a gradient that is not their value's."""
    loss, inputs = dataclasses.replace(loss, **extra), double(random_inputs([2, 6, 0, 4]))

    def value(policy: Tensor, entropy: Tensor) -> Tensor:
        return loss(dataclasses.replace(inputs, policy_logprobs_BT=policy, entropy_BT=entropy)).loss

    assert inputs.entropy_BT is not None
    arguments = (inputs.policy_logprobs_BT.requires_grad_(), inputs.entropy_BT.requires_grad_())
    assert torch.autograd.gradcheck(value, arguments)


@pytest.mark.parametrize("kind", [GSPOToken, GSPO])
def test_the_two_forms_of_gspo_have_one_gradient_without_weights(kind: type[GSPO]) -> None:
    inputs = random_inputs([2, 6, 3])
    inputs.weights_BT = None
    wide = {"epsilon": 0.9, "epsilon_high": 9.0}
    reference = gradient(GSPO(**wide), inputs)
    torch.testing.assert_close(gradient(kind(**wide), inputs), reference, atol=1e-7, rtol=1e-5)
    assert reference.norm() > 0


@pytest.mark.parametrize("loss", [RLOO(), GSPO(), GSPOToken(), CISPO(), CISPOBand(), SAPO(), PPO()], ids=repr)
def test_new_losses_at_ratio_one_are_reinforce(loss: PolicyLoss) -> None:
    inputs = random_inputs([2, 6, 4])
    inputs.old_logprobs_BT, inputs.weights_BT = inputs.policy_logprobs_BT.detach(), None
    mask, lengths = inputs.mask_BT.float(), inputs.mask_BT.sum(-1, keepdim=True)
    per_sequence = isinstance(loss, GSPO | SAPO)
    share = mask / 3 if isinstance(loss, RLOO) else mask / lengths / 3 if per_sequence else mask / 12
    torch.testing.assert_close(gradient(loss, inputs), -share * inputs.advantages_B[:, None])


def test_the_entropy_bonus_is_a_token_mean_under_every_loss() -> None:
    for loss in (GRPO(), DrGRPO(), RLOO(), CISPO()):
        inputs = random_inputs([2, 6])
        inputs.entropy_BT = torch.full_like(inputs.mask_BT, 3.0, dtype=torch.float32).requires_grad_()
        with_bonus = dataclasses.replace(loss, entropy_coef=0.5)(inputs).loss
        assert (with_bonus - loss(inputs).loss).item() == pytest.approx(-1.5, abs=1e-5)
        (grad,) = torch.autograd.grad(with_bonus, inputs.entropy_BT)
        torch.testing.assert_close(grad, -0.5 * inputs.mask_BT / 8)


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
    for loss in (GRPO(beta=0.1), CISPO(beta=0.1), RLOO(beta=0.1)):
        with pytest.raises(ValueError, match="reference log-probs"):
            loss(good)
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs entropy_BT"):
        SAPO(entropy_coef=0.1)(good)
    with pytest.raises(ValueError, match=r"loss\.kl\.gradient='k4': expected value, k2, ratio"):
        K1(gradient="k4")  # type: ignore[arg-type]
    for settings in ({"cap": 0.5}, {"floor": 1.5}):
        with pytest.raises(ValueError, match="0 <= floor < 1 <= cap"):
            CISPO(**settings)
    with pytest.raises(ValueError, match=r"For the largest weight itself use CISPO\(cap"):
        CISPOBand(epsilon=5.0)
    with pytest.raises(ValueError, match=r"loss\.tau"):
        SAPO(tau=0.0)
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
        (["--loss=GSPO", "--loss.epsilon=1e-3"], GSPO(epsilon=1e-3)),
        (
            ["--loss=GRPO", "--loss.beta=0.1", "--loss.kl=K1", "--loss.kl.gradient=ratio"],
            GRPO(beta=0.1, kl=K1("ratio")),
        ),
        (["--loss=CISPO", "--loss.entropy_coef=0.01"], CISPO(entropy_coef=0.01)),
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
