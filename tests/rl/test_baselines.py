"""TBPO and Score Centering by hand, their gradients, and what centring is for: equal advantages cause no drift."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trace_lightning.rl import TBPO, GlobalCounts, LossInputs, ScoreCentering

ONE_ROW = torch.ones(1, 3, dtype=torch.bool)


def three_tokens(step: list[float], gap: list[float], advantage: float, **kwargs: Any) -> LossInputs:
    """`step`: log pi_policy / pi_old, `gap`: log pi_old / pi_rollout, per token; in FP64."""
    old = torch.full((1, 3), -2.0, dtype=torch.float64)
    return LossInputs(
        policy_logprobs_BT=(old + torch.tensor([step])).requires_grad_(),
        old_logprobs_BT=old,
        rollout_logprobs_BT=old - torch.tensor([gap]),
        advantages_B=torch.tensor([advantage], dtype=torch.float64),
        mask_BT=ONE_ROW,
        counts=GlobalCounts(3, 1, 10),
        **kwargs,
    )


def value(metrics: dict, name: str) -> float:
    total, count = metrics[name]
    return (total / count).item()


class TestTBPO:
    INSIDE, HIGHER, HIGHEST, LOWER = ([0.0, mean * 2, mean] for mean in (1e-4, 6e-4, 9e-4, -4e-4))

    @pytest.mark.parametrize(
        ("step", "gap", "advantage", "expected"),
        [
            (INSIDE, [0.3, 0.0, 0.0], 2.0, -math.exp(0.1) * math.exp(1e-4) * 2),
            (HIGHER, [0.3, 0.0, 0.0], 2.0, -math.exp(0.1) * 1.0004 * 2),
            (LOWER, [0.0, 0.0, 0.0], 2.0, -math.exp(-4e-4) * 2),
            (INSIDE, [9.0, 0.0, 0.0], 2.0, -2.0 * math.exp(1e-4) * 2),  # exp(3), capped
            (INSIDE, [0.3, 0.0, 0.0], -2.0, math.exp(0.1) * math.exp(1e-4) * 2),
            (HIGHER, [0.0, 0.0, 0.0], -2.0, math.exp(6e-4) * 2),
            (HIGHEST, [0.0, 0.0, 0.0], -2.0, 0.0),
            (LOWER, [0.0, 0.0, 0.0], -2.0, 0.0),
        ],
    )
    def test_by_hand(self, step: list[float], gap: list[float], advantage: float, expected: float) -> None:
        inputs = three_tokens(step, gap, advantage)
        assert TBPO()(inputs).loss.item() == pytest.approx(expected, rel=1e-6)
        TBPO()(inputs).loss.backward()
        moves = expected != 0 and not (advantage > 0 and step == self.HIGHER)
        gradient = torch.full((1, 3), expected / 3 if moves else 0.0, dtype=torch.float64)
        torch.testing.assert_close(inputs.policy_logprobs_BT.grad, gradient, rtol=1e-6, atol=1e-12)

    @pytest.mark.parametrize("advantage", [1.5, -1.5])
    def test_gradient_numerically(self, advantage: float) -> None:
        inputs = three_tokens(self.INSIDE, [0.2, -0.1, 0.4], advantage)

        def loss(policy: Tensor) -> Tensor:
            inputs.policy_logprobs_BT = policy
            return TBPO()(inputs).loss

        assert torch.autograd.gradcheck(loss, inputs.policy_logprobs_BT, eps=1e-6)

    def test_metrics_by_hand(self) -> None:
        dropped = TBPO()(three_tokens(self.LOWER, [9.0, 0.0, 0.0], -1.0)).metrics
        assert {name: value(dropped, name) for name in dropped} == {
            "clip_ratio/low_mean": 1,
            "clip_ratio/high_mean": 0,
            "clip_ratio/region_mean": 1,
            "rollout_corr/tbpo/mean_weight": 2,
            "rollout_corr/tbpo/capped_share": 1,
        }
        clipped = TBPO()(three_tokens(self.HIGHER, [0.3, 0.0, 0.0], 1.0)).metrics
        assert value(clipped, "clip_ratio/high_mean") == 1
        assert value(clipped, "rollout_corr/tbpo/mean_weight") == pytest.approx(math.exp(0.1))
        assert value(clipped, "rollout_corr/tbpo/capped_share") == 0

    def test_a_rejected_sequence_is_dropped_and_a_kept_one_is_not_touched(self) -> None:
        for weight in (0.0, 1.0):
            inputs = three_tokens(self.INSIDE, [0.0] * 3, 1.0, weights_BT=torch.full((1, 3), weight))
            assert TBPO()(inputs).loss.item() == pytest.approx(-weight * math.exp(1e-4))

    def test_at_ratio_one_it_is_the_policy_gradient_of_sequence_means(self) -> None:
        mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
        policy = (-torch.rand(2, 4)).requires_grad_()
        advantages = torch.tensor([1.0, -2.0])
        inputs = LossInputs(
            policy_logprobs_BT=policy,
            old_logprobs_BT=policy.detach(),
            rollout_logprobs_BT=policy.detach(),
            advantages_B=advantages,
            mask_BT=mask,
            counts=GlobalCounts.from_mask(mask, 9),
        )
        TBPO()(inputs).loss.backward()
        expected = -advantages[:, None] * mask / mask.sum(-1, keepdim=True) / 2
        torch.testing.assert_close(policy.grad, expected)

    def test_bad_settings_are_named(self) -> None:
        for name in ("positive_high", "negative_low", "negative_high", "cap"):
            with pytest.raises(ValueError, match=rf"loss\.{name}=0"):
                TBPO(**{name: 0})


def distribution(logits: Tensor, rollout: Tensor, drawn: Tensor, k: int, advantage: float = 1.0) -> LossInputs:
    """One token per row, `drawn` [N], with the rollout's k most likely tokens recorded."""
    p, q = logits.log_softmax(-1), rollout.log_softmax(-1)
    values, order = q.topk(k)
    mask = torch.ones(len(drawn), 1, dtype=torch.bool)
    return LossInputs(
        policy_logprobs_BT=p[drawn][:, None],
        old_logprobs_BT=p.detach()[drawn][:, None],
        rollout_logprobs_BT=q[drawn][:, None],
        advantages_B=torch.full((len(drawn),), advantage),
        mask_BT=mask,
        counts=GlobalCounts(len(drawn), len(drawn), 1),
        topk_logprobs_BTK=p[order].expand(len(drawn), 1, k),
        rollout_topk_logprobs_BTK=values.expand(len(drawn), 1, k),
    )


class TestScoreCentering:
    P, Q = [0.2, 0.1, 0.3], [0.4, 0.1, 0.1]  # of three recorded tokens; the rest is .4 on both sides

    def inputs(self, drawn: int, advantage: float = 2.0, q: list[float] | None = None) -> LossInputs:
        """The same distributions at three positions; token `drawn` was drawn at each."""
        p, q_ = torch.tensor(self.P).log(), torch.tensor(q or self.Q).log()
        return LossInputs(
            policy_logprobs_BT=p[drawn].expand(1, 3).clone().requires_grad_(),
            old_logprobs_BT=torch.zeros(1, 3),
            rollout_logprobs_BT=q_[drawn].expand(1, 3),
            advantages_B=torch.tensor([advantage]),
            mask_BT=ONE_ROW,
            counts=GlobalCounts(3, 1, 3),
            topk_logprobs_BTK=p.expand(1, 3, 3).clone().requires_grad_(),
            rollout_topk_logprobs_BTK=q_.expand(1, 3, 3),
        )

    @pytest.mark.parametrize(("drawn", "weight"), [(0, 0.5), (1, 1.0), (2, 2.0)])  # p / q = .5, 1 and 3, capped at 2
    def test_by_hand(self, drawn: int, weight: float) -> None:
        # rho = .4 / .4 = 1, alpha = 1, q w - alpha p = .4 * .5 - .2, .1 - .1, .1 * 2 - .3 = 0, 0, -.1
        inputs = self.inputs(drawn)
        outputs = ScoreCentering()(inputs)
        centred = weight * math.log(self.P[drawn]) + 0.1 * math.log(0.3)
        assert outputs.loss.item() == pytest.approx(-2 * centred, rel=1e-5)
        outputs.loss.backward()
        assert inputs.topk_logprobs_BTK is not None
        torch.testing.assert_close(inputs.policy_logprobs_BT.grad, torch.full((1, 3), -2 * weight / 3))
        expected = torch.tensor([0.0, 0.0, -0.1]) * 2 / 3
        torch.testing.assert_close(inputs.topk_logprobs_BTK.grad, expected.expand(1, 3, 3), atol=1e-6, rtol=1e-5)
        assert value(outputs.metrics, "rollout_corr/scorecentering/mean_weight") == pytest.approx(weight)
        assert value(outputs.metrics, "rollout_corr/scorecentering/capped_share") == (drawn == 2)
        assert value(outputs.metrics, "rollout_corr/scorecentering/recorded_mass") == pytest.approx(0.6)

    @pytest.mark.parametrize(("cap", "alpha"), [(0.5, 0.1), (2.0, 0.4), (8.0, 1.0), (None, 0.2)])
    def test_the_tail_by_hand(self, cap: float | None, alpha: float) -> None:
        # p's tail is .4 and q's .08: rho = .2, and alpha = .2 min(5, cap), or .2 without weights
        inputs = self.inputs(1, q=[0.4, 0.1, 0.42])
        ScoreCentering(cap)(inputs).loss.backward()
        assert inputs.topk_logprobs_BTK is not None
        p, q = torch.tensor(self.P), torch.tensor([0.4, 0.1, 0.42])
        weights = torch.ones(3) if cap is None else (p / q).clamp(max=cap)
        expected = (q * weights - alpha * p) * 2 / 3
        torch.testing.assert_close(inputs.topk_logprobs_BTK.grad, expected.expand(1, 3, 3), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("cap", [2.0, 0.7, None])
    @pytest.mark.parametrize("k", [12, 5], ids=["whole vocabulary", "tail of p's shape"])
    def test_equal_advantages_move_nothing_on_average(self, cap: float | None, k: int) -> None:
        """The mean over the rollout's draws of a gradient with A = 1 is the drift; centred, it is gone."""
        head = torch.arange(12) < 5
        logits = (0.5 * torch.randn(12) + 4.0 * head).requires_grad_()  # the first five are likely on both sides
        gap = torch.zeros(12)
        gap[:5] = torch.tensor([-1.6, 1.6, 0.0, -0.8, 0.8])
        rollout = logits.detach() + gap
        q = rollout.softmax(-1)
        losses = [ScoreCentering(cap)(distribution(logits, rollout, torch.tensor([y]), k)).loss for y in range(12)]
        (centred,) = torch.autograd.grad((torch.stack(losses) * q).sum(), logits)
        ratio = logits.detach().softmax(-1) / q
        weight = torch.ones(12) if cap is None else ratio.clamp(max=cap)
        (drift,) = torch.autograd.grad((q * weight * logits.log_softmax(-1)).sum(), logits)
        assert centred.abs().max() < 1e-5
        assert drift.abs().max() > 1e-3  # what was removed

    def test_at_ratio_one_it_is_the_policy_gradient(self) -> None:
        logits = torch.randn(12, requires_grad=True)
        drawn = torch.tensor([3, 7, 1])
        loss = ScoreCentering()(distribution(logits, logits.detach(), drawn, 6, advantage=1.5)).loss
        (got,) = torch.autograd.grad(loss, logits)
        (expected,) = torch.autograd.grad(-1.5 * logits.log_softmax(-1)[drawn].mean(), logits)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)

    def test_padding_of_a_small_vocabulary_changes_nothing(self) -> None:
        logits, rollout, drawn = torch.randn(6, requires_grad=True), torch.randn(6), torch.tensor([2])
        plain = distribution(logits, rollout, drawn, 6)
        padded = distribution(logits, rollout, drawn, 6)
        for name in ("topk_logprobs_BTK", "rollout_topk_logprobs_BTK"):
            setattr(padded, name, torch.nn.functional.pad(getattr(padded, name), (0, 3), value=-torch.inf))
        results = [torch.autograd.grad(ScoreCentering()(each).loss, logits)[0] for each in (plain, padded)]
        assert results[0].isfinite().all()
        assert torch.equal(*results)

    def test_without_a_record_it_says_what_to_set(self) -> None:
        with pytest.raises(ValueError, match=r"set rollout\.sampling\.record_logprobs"):
            ScoreCentering()(three_tokens([0.0] * 3, [0.0] * 3, 1.0))

    def test_bad_settings_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"loss\.cap=0"):
            ScoreCentering(cap=0)
