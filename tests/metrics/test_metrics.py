"""Metrics against the formulas written out, and merged over unequal batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from trace_lightning.metrics import (
    CompletionMetrics,
    DivergenceMetrics,
    PositionMetrics,
    RewardMetrics,
    ThroughputMetrics,
    argmax_agreement,
)
from trace_lightning.metrics.functional import merge_moments, moments
from trace_lightning.metrics.histogram import QUANTILES

NAN = float("nan")


def over_ranks(*ranks: Metric) -> dict[str, Tensor]:
    """What rank 0 computes when torchmetrics gathers the states of all ranks (the gather itself is replaced)."""
    first, *others = ranks
    states = iter([tuple(getattr(rank, name) for rank in others) for name in first._reductions])
    first.dist_sync_fn = lambda tensor, group=None: [tensor, *next(states)]
    first.distributed_available_fn = lambda: True
    return first.compute()


def over_time(*parts: Metric) -> dict[str, Tensor]:
    first, *others = parts
    for other in others:
        first.merge_state(other)
    return first.compute()


def assert_same(got: dict[str, Tensor], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], torch.as_tensor(value).float(), atol=1e-6, rtol=rtol, msg=name)


def logprob_batch(rows: int, scale: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    rollout = -3 * torch.rand(rows, 9)
    return rollout + scale * torch.randn(rows, 9), rollout, torch.rand(rows, 9) < 0.7


@pytest.mark.parametrize("scale", [0.001, 0.2, 1.5])
def test_divergence_formulas(scale: float) -> None:
    policy, rollout, mask = logprob_batch(40, scale)
    metric = DivergenceMetrics()
    metric.update(policy.masked_fill(~mask, NAN), rollout, mask)
    delta = (policy - rollout)[mask].double()
    rho = delta.exp()
    gaps = torch.stack([row[keep].mean() for row, keep in zip(policy - rollout, mask, strict=True) if keep.any()])
    probabilities = torch.stack([policy[mask], rollout[mask]]).exp()
    expected = {
        "sampling/sampling_logp_difference/mean": delta.abs().mean(),
        "sampling/sampling_logp_difference/max": delta.abs().max(),
        "sampling/importance_sampling_ratio/min": rho.min(),
        "sampling/importance_sampling_ratio/mean": rho.mean(),
        "sampling/importance_sampling_ratio/max": rho.max(),
        "sampling/probability_pearson": torch.corrcoef(probabilities)[0, 1],
        "rollout_corr/kl": -delta.mean(),
        "rollout_corr/k3_kl": (rho - rho.log() - 1).mean(),
        "rollout_corr/reverse_kl": (rho * delta).mean(),
        "rollout_corr/reverse_k3_kl": (rho * delta - rho + 1).mean(),
        "rollout_corr/chi2_token": rho.square().mean() - 1,
        "rollout_corr/ess": 1 / (rho / rho.mean()).square().mean(),
        "rollout_corr/token_mult_prob_error": delta.abs().exp().mean(),
        "rollout_corr/sequence_gap/mean": gaps.abs().mean(),
        "rollout_corr/sequence_gap/max": gaps.abs().max(),
        "rollout_corr/ppl_ratio": (-gaps.double()).mean().exp(),
    }
    got = metric.compute()
    for name, share in QUANTILES.items():  # exact to half a bin of log rho
        ratio = got.pop(f"sampling/importance_sampling_ratio/{name}").log().item()
        assert ratio == pytest.approx(delta.sort().values[math.ceil(share * len(delta)) - 1].item(), rel=0.04, abs=1e-6)
    assert_same(got, expected)


def test_both_directions_of_kl_estimate_the_kl_of_the_two_distributions() -> None:
    """Tokens drawn from a known rollout distribution: the weighted estimate is that of KL(trainer, rollout)."""
    rollout, policy = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.3, 0.4, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(rollout.exp(), 400_000, replacement=True, generator=generator).view(-1, 8)
    metric = DivergenceMetrics()
    metric.update(policy[drawn], rollout[drawn], torch.ones_like(drawn, dtype=torch.bool))
    got = {name: value.item() for name, value in metric.compute().items()}
    forward, reverse = ((p.exp() * (p - q)).sum().item() for p, q in ((rollout, policy), (policy, rollout)))
    assert abs(forward - reverse) > 0.01  # or the test could not tell them apart
    for name, exact in {"kl": forward, "k3_kl": forward, "reverse_kl": reverse, "reverse_k3_kl": reverse}.items():
        assert got[f"rollout_corr/{name}"] == pytest.approx(exact, abs=0.005), name


def test_correlation_of_nearly_certain_policies_keeps_its_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = -1e-5 * torch.rand(1000, generator=generator)
    policy = rollout - 1e-6 * torch.rand(1000, generator=generator)
    metric = DivergenceMetrics()
    metric.update(policy, rollout, torch.ones(1000, dtype=torch.bool))
    exact = torch.corrcoef(torch.stack([policy, rollout]).double().exp())[0, 1].item()
    assert exact < 0.9999
    assert metric.compute()["sampling/probability_pearson"].item() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, -1e-4, -2.0, -30.0])
def test_correlation_with_a_side_that_does_not_vary_is_not_logged(value: float) -> None:
    policy = -torch.rand(1000)
    metric = DivergenceMetrics()
    metric.update(policy, torch.full((1000,), value), torch.ones(1000, dtype=torch.bool))
    assert "sampling/probability_pearson" not in metric.compute()
    assert metric.compute()["rollout_corr/ess"] > 0


def test_tiny_gaps_are_not_lost_in_fp32() -> None:
    delta = 1e-4 * torch.randn(100_000)
    metric = DivergenceMetrics()
    metric.update(delta, torch.zeros_like(delta), torch.ones_like(delta, dtype=torch.bool))
    got, exact = metric.compute(), delta.double()
    assert got["rollout_corr/k3_kl"].item() == pytest.approx((exact.exp() - exact - 1).mean().item(), rel=1e-3)
    assert got["rollout_corr/chi2_token"].item() == pytest.approx((2 * exact).expm1().mean().item(), rel=1e-3)
    reverse = (exact.exp() * exact - exact.expm1()).mean().item()
    assert got["rollout_corr/reverse_k3_kl"].item() == pytest.approx(reverse, rel=1e-3)


def test_equal_policies_have_no_divergence() -> None:
    policy, _, mask = logprob_batch(3)
    metric = DivergenceMetrics()
    metric.update(policy, policy, mask)
    for name, value in metric.compute().items():
        perfect = 1.0 if "ratio" in name or name.endswith(("ess", "prob_error", "pearson")) else 0.0
        assert value == (pytest.approx(1, abs=1e-6) if name.endswith("pearson") else perfect), name


def test_extreme_gaps_stay_finite_and_the_maximum_stays_true() -> None:
    metric = DivergenceMetrics()
    metric.update(torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, -300.0]), torch.tensor([True, True]))
    got = metric.compute()
    assert all(value.isfinite() for value in got.values())
    assert got["sampling/sampling_logp_difference/max"] == 499.0


@pytest.mark.parametrize("merge", [over_ranks, over_time])
def test_divergence_merges_over_unequal_parts(merge: Callable[..., dict[str, Tensor]]) -> None:
    batches = [logprob_batch(1), logprob_batch(17, 1.0), logprob_batch(0), logprob_batch(4)]
    union = DivergenceMetrics()
    union.update(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))
    parts = []
    for batch in batches:
        part = DivergenceMetrics()
        part.update(*batch)
        parts.append(part)
    assert_same(merge(*parts), union.compute())


def test_agreement_counts_what_is_proven() -> None:
    nothing = -math.inf
    topk_BTK = torch.tensor(
        [
            [0.6, 0.3],  # no other token can have more than .1
            [0.3, 0.6],  # another recorded token is likelier
            [0.3, 0.2],  # one that was not recorded may have .5
            [0.9, 0.05],  # not a drawn token
        ]
    ).log()[None]
    topk_BTK = torch.cat([topk_BTK, torch.full((1, 4, 1), nothing)], dim=-1)
    mask_BT = torch.tensor([[True, True, True, False]])
    assert [value.item() for value in argmax_agreement(topk_BTK, mask_BT)] == [1, 3]


def test_divergence_of_several_updates_and_after_reset() -> None:
    first, second = logprob_batch(2), logprob_batch(5)
    both, union = DivergenceMetrics(), DivergenceMetrics()
    both.update(*first)
    both.update(*second)
    union.update(*(torch.cat(tensors) for tensors in zip(first, second, strict=True)))
    assert_same(both.compute(), union.compute())
    both.reset()
    both.update(*first)
    union.reset()
    union.update(*first)
    assert_same(both.compute(), union.compute())


def test_forward_returns_the_batch_and_accumulates() -> None:
    metric, batch = DivergenceMetrics(), logprob_batch(5)
    metric.update(*logprob_batch(2))
    alone = DivergenceMetrics()
    alone.update(*batch)
    assert_same(metric(*batch), alone.compute())
    assert metric.num_tokens > alone.num_tokens


def test_divergence_of_no_tokens_is_not_logged() -> None:
    metric = DivergenceMetrics()
    metric.update(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert metric.compute() == {}


def test_divergence_needs_a_logprob_on_both_sides() -> None:
    with pytest.raises(ValueError, match=r"shapes \(1, 3\), \(1, 2\), \(1, 3\)"):
        DivergenceMetrics().update(torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))


def test_rewards_by_hand() -> None:
    metric = RewardMetrics(["accuracy", "format"])
    metric.update(
        torch.tensor([[1.0, 0.0, NAN], [2.0, 2.0, 2.0], [5.0, NAN, NAN]]),
        {"accuracy": [1.0, 0.0, NAN, 2.0, 2.0, 2.0, 5.0, NAN, NAN], "format": [NAN] * 8 + [0.5]},
    )
    expected = {
        "reward": 12 / 6,
        "reward_std": (0.5**0.5 + 0.0) / 2,  # the third group has one score, hence no std
        "frac_reward_zero_std": 2 / 3,
        "rewards/unscored_share": 3 / 9,
        "rewards/accuracy/mean": 2.0,
        "rewards/accuracy/std": torch.tensor([1.0, 0, 2, 2, 2, 5]).std(),
        "rewards/format/mean": 0.5,  # one score: a mean, no std
    }
    assert_same(metric.compute(), expected)


@pytest.mark.parametrize("merge", [over_ranks, over_time])
def test_rewards_merge_over_unequal_parts(merge: Callable[..., dict[str, Tensor]]) -> None:
    parts, union = [], RewardMetrics(["a"])
    everything = []
    for prompts, offset in ((1, 1000.0), (6, 1000.01), (3, 999.5)):
        rewards = offset + 0.01 * torch.randn(prompts, 4)
        rewards[0, 0] = NAN
        part = RewardMetrics(["a"])
        part.update(rewards, {"a": rewards.flatten()})
        parts.append(part)
        everything.append(rewards)
    union.update(torch.cat(everything), {"a": torch.cat(everything).flatten()})
    got = merge(*parts)
    # Rewards near 1000 with a std of 0.2: in FP32, sums of squares would be off by more than the variance itself.
    assert_same(got, union.compute(), rtol=1e-3)
    values = torch.cat(everything).flatten().double()
    assert got["rewards/a/std"].item() == pytest.approx(values[~values.isnan()].std().item(), rel=1e-3)


def test_rewards_of_a_batch_that_nobody_scored() -> None:
    metric = RewardMetrics(["a"])
    metric.update(torch.full((2, 2), NAN), {"a": [NAN] * 4})
    assert_same(metric.compute(), {"frac_reward_zero_std": 1.0, "rewards/unscored_share": 1.0})


def test_reward_names_are_checked() -> None:
    with pytest.raises(ValueError, match="must differ"):
        RewardMetrics(["a", "a"])
    with pytest.raises(ValueError, match=r"rewards named \['b'\], but RewardMetrics expects \['a'\]"):
        RewardMetrics(["a"]).update(torch.ones(1, 2), {"b": [1.0, 1.0]})


def test_moments_merge_like_one_sample() -> None:
    values = torch.randn(50) + 100
    parts = torch.stack([moments(values[:3]), moments(values[3:3]), moments(values[3:])])
    torch.testing.assert_close(merge_moments(parts), moments(values), atol=1e-3, rtol=1e-5)


def test_completions_by_hand_and_merged() -> None:
    lengths, terminated = torch.tensor([3, 8, 8, 5]), torch.tensor([True, False, True, True])
    expected = {
        "completions/mean_length": 6.0,
        "completions/min_length": 3,
        "completions/max_length": 8,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 16 / 3,
    }
    for merge in (over_ranks, over_time):
        parts = []
        for rows in (slice(0, 1), slice(1, 4), slice(4, 4)):
            part = CompletionMetrics()
            part.update(lengths[rows], terminated[rows])
            parts.append(part)
        assert_same(merge(*parts), expected)


def test_completions_that_never_end_have_no_terminated_length() -> None:
    metric = CompletionMetrics()
    metric.update(torch.tensor([4, 4]), torch.tensor([False, False]))
    got = metric.compute()
    assert got["completions/clipped_ratio"] == 1
    assert "completions/mean_terminated_length" not in got
    empty = CompletionMetrics()
    empty.update(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool))
    assert empty.compute() == {}
    with pytest.raises(ValueError, match="terminated flags"):
        metric.update(torch.tensor([4, 4]), torch.tensor([False]))


def test_throughput_of_two_steps() -> None:
    metric = ThroughputMetrics()
    metric.update(100, rollout_seconds=2.0, train_seconds=1.0, sync_seconds=1.0)
    metric.update(
        300, rollout_seconds=2.0, train_seconds=1.0, sync_seconds=0.0, step_seconds=4.0, rollout_wait_seconds=0.5
    )
    expected = {
        "timing/rollout_s": 2.0,
        "timing/train_s": 1.0,
        "timing/sync_s": 0.5,
        "timing/step_s": 4.0,
        "timing/rollout_wait_s": 0.25,
        "throughput/rollout_tokens_per_s": 100.0,
        "throughput/step_tokens_per_s": 50.0,
        "throughput/rollout_share": 0.5,
    }
    assert_same(metric.compute(), expected)  # reward_seconds was never measured


def test_throughput_over_ranks_adds_tokens_and_waits_for_the_slowest() -> None:
    fast, slow = ThroughputMetrics(), ThroughputMetrics()
    for _ in range(2):
        fast.update(100, rollout_seconds=1.0, train_seconds=1.0)
        slow.update(60, rollout_seconds=2.0, train_seconds=1.0)
    got = over_ranks(fast, slow)
    assert got["throughput/rollout_tokens_per_s"] == 320 / 4
    assert got["timing/step_s"] == 3.0
    with pytest.raises(RuntimeError, match="merge_state"):
        fast.merge_state(slow)


def test_throughput_forward_adds_up_over_time() -> None:
    metric = ThroughputMetrics()
    metric(10, rollout_seconds=1.0)
    metric(30, rollout_seconds=3.0)
    assert metric.compute()["timing/rollout_s"] == 2.0


def test_throughput_of_nothing_is_not_logged() -> None:
    metric = ThroughputMetrics()
    metric.update(0)
    assert metric.compute() == {}


@pytest.mark.parametrize(
    "make", [DivergenceMetrics, PositionMetrics, RewardMetrics, CompletionMetrics, ThroughputMetrics]
)
def test_states_are_tensors_of_fixed_shape(make: Callable[[], Metric]) -> None:
    # Lists of unequal length across ranks hang or crash the gather.
    metric = make()
    assert metric._defaults
    assert all(isinstance(state, Tensor) for state in metric._defaults.values())
    assert all(reduction is not None for reduction in metric._reductions.values())
