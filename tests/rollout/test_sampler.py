"""Sampling: the right distribution, a draw that no neighbour influences, and the log-prob under which it was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trace_kernels import sampling
from trace_kernels.sampling import counter_uniform
from trace_lightning.rollout.sampler import Sampled, sample, truncate
from trace_lightning.types import SamplingParams

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0, -3.0, 1.5, -0.5])
TRUNCATIONS = [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7}, {"top_k": 6, "min_p": 0.2}]


def seeded(seed: int) -> Tensor:
    return torch.tensor([seed])


def draw(logits: Tensor, params: SamplingParams, *, uid: Tensor | None = None, position: int = 3) -> Sampled:
    """One draw per row; a single row is drawn from 40,000 times, under different uids."""
    if logits.ndim == 1:
        logits = logits.expand(40_000, -1)
    uid = torch.arange(len(logits)) if uid is None else uid
    return sample(logits, params, seeded(params.seed), uid, torch.zeros_like(uid), torch.full_like(uid, position))


def expected_support(probs: Tensor, *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """By hand: sort, cut at k, renormalise, cut at mass p (the token that crosses it stays), cut below min_p."""
    kept = sorted(range(len(probs)), key=lambda i: -probs[i].item())[: top_k if top_k > 0 else None]
    total, mass, result = sum(probs[i].item() for i in kept), 0.0, []
    for i in kept:
        share = probs[i].item() / total
        if mass < top_p and share >= min_p * probs[kept[0]].item() / total:
            result.append(i)
        mass += share
    return sorted(result)


class TestCounter:
    def test_uniform(self) -> None:
        u = counter_uniform(seeded(0), torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64))
        assert u.dtype == torch.float64
        assert u.min() >= 0
        assert u.max() < 1
        gap = (u.sort().values - (torch.arange(100_000) + 0.5) / 100_000).abs().max()
        assert gap < 1.95 / 100_000**0.5, "Kolmogorov-Smirnov at 0.1 %"

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_every_counter_counts_and_neighbours_are_uncorrelated(self, which: int) -> None:
        counters = [torch.full((50_000,), 5) for _ in range(3)]
        counters[which] = torch.arange(50_000)
        u = counter_uniform(seeded(1), *counters)
        assert len(u.unique()) > 49_990
        assert abs(torch.corrcoef(torch.stack((u[1:], u[:-1])))[0, 1].item()) < 0.02

    def test_seed_and_order_of_counters_matter(self) -> None:
        a, b = torch.arange(10), torch.arange(10, 20)
        assert not torch.equal(counter_uniform(seeded(0), a, b), counter_uniform(seeded(1), a, b))
        assert not torch.equal(counter_uniform(seeded(0), a, b), counter_uniform(seeded(0), b, a))

    def test_equals_splitmix64_in_unsigned_integers(self) -> None:
        rows = [(0, 0, 0), (1, 3, 100), (2**40, 1, 5)]
        u = counter_uniform(seeded(7), *torch.tensor(rows).T)
        assert u.tolist() == [uniform_in_python(7, *row) for row in rows]
        # A resumed run must draw what the unbroken one would have drawn, in the next release too.
        assert u.tolist() == [0.33990021265528314, 0.970760537297635, 0.5514989865916613]


def splitmix64(h: int) -> int:
    """The finaliser as published (Steele, Lea, Flood 2014)."""
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) % 2**64
    return h ^ (h >> 31)


def uniform_in_python(seed: int, *counters: int) -> float:
    h = splitmix64(seed + 0x632BE5AB)
    for counter in counters:
        h = splitmix64(h ^ splitmix64(counter + 0x1E3779B97F4A7C15))
    return (h >> 11) * 2.0**-53


class TestDistribution:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("truncation", [{}, *TRUNCATIONS])
    def test_chi_square(self, truncation: Any, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, **truncation)
        counts = torch.bincount(draw(LOGITS, params).token_ids, minlength=8).double()
        kept = expected_support((LOGITS / temperature).softmax(-1), **truncation)
        masked = torch.full((8,), -torch.inf).index_put((torch.tensor(kept),), LOGITS[kept] / temperature)
        expected = 40_000 * masked.double().softmax(-1)
        assert counts[expected == 0].sum() == 0
        terms = ((counts - expected).square() / expected)[expected > 0]
        assert terms.sum() < 29.9, "chi-square of at most 7 degrees of freedom, at 0.01 %"

    @pytest.mark.parametrize("truncation", [{}, *TRUNCATIONS])
    def test_logprobs_are_those_of_the_renormalised_distribution(self, truncation: Any) -> None:
        params = SamplingParams(temperature=0.7, **truncation)
        logits = 2 * torch.randn(500, 64)
        drawn = draw(logits, params)
        probs = (logits / 0.7).softmax(-1)
        for i, token in enumerate(drawn.token_ids.tolist()):
            kept = expected_support(probs[i], **truncation)
            assert token in kept
            assert drawn.logprobs[i].exp() == pytest.approx((probs[i, token] / probs[i, kept].sum()).item(), rel=1e-4)
        assert drawn.logprobs.dtype == torch.float32

    @pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
    @pytest.mark.parametrize("truncation", [{}, {"top_k": 2}, {"top_p": 0.5}])
    def test_ends_of_the_unit_interval_draw_possible_tokens(
        self, truncation: Any, u: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            sampling, "counter_uniform", lambda seed, *counters: torch.full_like(counters[0], u, dtype=torch.float64)
        )
        logits = torch.randn(200, 1000)
        logits[:, [0, -1]] = -torch.inf
        assert draw(logits, SamplingParams(**truncation)).logprobs.isfinite().all()

    def test_tail_of_a_large_vocabulary(self) -> None:
        """150,000 equal tokens: an FP32 sum would lose its increments and starve the tail."""
        tokens = draw(torch.zeros(60, 150_000), SamplingParams()).token_ids.double()
        assert (tokens / 150_000).mean() == pytest.approx(0.5, abs=0.12)
        assert tokens.max() > 140_000

    def test_greedy(self) -> None:
        logits = torch.randn(50, 64)
        drawn = draw(logits, SamplingParams(temperature=0, top_k=3))
        assert torch.equal(drawn.token_ids, logits.argmax(-1))
        assert drawn.logprobs == pytest.approx(logits.log_softmax(-1).max(-1).values)
        assert drawn.support_ids is None


class TestInvariance:
    @pytest.mark.parametrize("truncation", [{}, {"top_k": 5, "record_support": 5}])
    def test_a_row_does_not_depend_on_its_batch(self, truncation: Any) -> None:
        params, logits = SamplingParams(seed=3, **truncation), torch.randn(64, 100)
        uid = torch.arange(64)
        whole = draw(logits, params)
        order = torch.randperm(64)
        shuffled = draw(logits[order], params, uid=uid[order])
        assert torch.equal(shuffled.token_ids, whole.token_ids[order])
        for i in range(0, 64, 9):
            single = draw(logits[i : i + 1], params, uid=uid[i : i + 1])
            assert single.token_ids == whole.token_ids[i]
            assert single.logprobs == whole.logprobs[i]

    def test_seed_sample_and_position_change_the_draw(self) -> None:
        logits, uid = torch.zeros(200, 1000), torch.arange(200)
        reference = draw(logits, SamplingParams()).token_ids
        others = [
            draw(logits, SamplingParams(seed=1)).token_ids,
            draw(logits, SamplingParams(), position=4).token_ids,
            sample(logits, SamplingParams(), seeded(0), uid, torch.ones_like(uid), torch.full_like(uid, 3)).token_ids,
        ]
        for other in others:
            assert (other == reference).double().mean() < 0.05


class TestMostLikely:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_are_of_the_distribution_that_is_drawn_from(self, temperature: float) -> None:
        logits = 3 * torch.randn(50, 40)
        drawn = draw(logits, SamplingParams(temperature=temperature, record_logprobs=6))
        assert drawn.topk_ids is not None
        assert drawn.topk_logprobs is not None
        expected = (logits / temperature).log_softmax(-1).sort(dim=-1, descending=True)
        assert torch.equal(drawn.topk_ids, expected.indices[:, :6])
        torch.testing.assert_close(drawn.topk_logprobs, expected.values[:, :6])
        hit = drawn.topk_ids == drawn.token_ids[:, None]
        assert hit.any()
        recorded = drawn.topk_logprobs[hit]
        torch.testing.assert_close(recorded, drawn.logprobs[hit.any(-1)], atol=1e-5, rtol=1e-5)

    def test_the_draw_does_not_change(self) -> None:
        logits = torch.randn(50, 40)
        plain, recorded = (draw(logits, SamplingParams(record_logprobs=k)) for k in (0, 6))
        assert plain.topk_ids is None
        assert torch.equal(plain.token_ids, recorded.token_ids)
        assert torch.equal(plain.logprobs, recorded.logprobs)

    @pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
    def test_refused_where_a_part_is_drawn_from(self, settings: Any) -> None:
        with pytest.raises(ValueError, match="record_logprobs=6 records the whole distribution"):
            SamplingParams(record_logprobs=6, **settings)


class TestSupport:
    @pytest.mark.parametrize("truncation", TRUNCATIONS)
    def test_holds_the_surviving_tokens(self, truncation: Any) -> None:
        logits = torch.randn(100, 20)
        drawn = draw(logits, SamplingParams(record_support=8, **truncation))
        assert drawn.support_ids is not None
        assert drawn.support_ids.shape == (100, 8)
        limited = truncation | {"top_k": min(8, truncation.get("top_k", 8))}
        for probs, row, token in zip(
            logits.softmax(-1), drawn.support_ids.tolist(), drawn.token_ids.tolist(), strict=True
        ):
            kept = [i for i in row if i >= 0]
            assert sorted(kept) == expected_support(probs, **limited)
            assert row == kept + [-1] * (8 - len(kept))
            assert token in kept

    def test_limits_the_distribution_itself(self) -> None:
        """Tokens beyond the recorded ones are cut from sampling as well, or the trainer could not know of them."""
        kept = truncate(torch.zeros(3, 50), SamplingParams(top_p=0.9, record_support=4))[0].isfinite()
        assert kept.sum(-1).tolist() == [4, 4, 4]

    def test_nothing_is_recorded_without_truncation(self) -> None:
        assert draw(torch.randn(3, 20), SamplingParams(record_support=8)).support_ids is None
        assert draw(torch.randn(3, 20), SamplingParams(top_k=4)).support_ids is None
