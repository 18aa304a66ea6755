"""Dynamic sampling: which groups stay, how many are drawn, and that the batch is one again, guidance included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_engine, make_policy, make_prompts, sampling
from trace_lightning.quantization.record_join import join_records
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rollout.microbatch import collate_rollout, take
from trace_lightning.rollout.refill import DynamicSampling
from trace_lightning.rollout.scoring import score
from trace_lightning.types import Completion, Problem, Prompt, RolloutBatch

NAN = float("nan")
SIZE = 2


def prompt_of(uid: int) -> Prompt:
    return Prompt(token_ids=[uid], problem=Problem(prompt=str(uid)), uid=uid)


POOL = [prompt_of(uid) for uid in range(40)]


class Drawer:
    """Draws one-token answers; `reward(uid)` gives the rewards of a group."""

    def __init__(self, reward: Callable[[int], list[float]]) -> None:
        self.reward, self.asked = reward, []

    def __call__(self, batch: RolloutBatch) -> None:
        self.asked.append([prompt.uid for prompt in batch.prompts])
        rewards = [value for prompt in batch.prompts for value in self.reward(prompt.uid)]
        batch.num_generations = SIZE
        completions = [
            Completion(token_ids=[100 + prompt.uid], logprobs=[-0.01 * j], finish_reason="stop", policy_version=3)
            for prompt in batch.prompts
            for j in range(SIZE)
        ]
        collate_rollout(batch, completions, 0)
        batch.rewards_B = torch.tensor(rewards)
        batch.rewards_by_name = {"exact": rewards, "twice": [2 * value for value in rewards]}
        batch.seconds = {"sync": 1.0, "rollout": 2.0, "reward": 0.5}
        batch.stats = {"preempted": 1.0}


def refilled(reward: Callable[[int], list[float]], wanted: int = 4, **settings: Any) -> tuple[RolloutBatch, Drawer]:
    drawer, batch = Drawer(reward), RolloutBatch(prompts=POOL[:wanted])
    drawer(batch)
    pool, seed = settings.pop("pool", POOL), settings.pop("seed", 7)
    DynamicSampling(**settings).refill(batch, drawer, pool, seed=seed, pad_token_id=0)
    return batch, drawer


def even_teach(uid: int) -> list[float]:
    return [0.0, 1.0] if uid % 2 == 0 else [1.0, 1.0]


def stats(batch: RolloutBatch) -> dict[str, float]:
    return {k.removeprefix("dynamic_sampling/"): v for k, v in batch.stats.items() if k.startswith("dynamic_sampling/")}


def test_a_batch_that_teaches_is_left_alone() -> None:
    batch, drawer = refilled(lambda uid: [0.0, 1.0])
    assert drawer.asked == [[0, 1, 2, 3]]
    assert [prompt.uid for prompt in batch.prompts] == [0, 1, 2, 3]
    assert stats(batch) == {
        "refills": 0,
        "groups_drawn": 4,
        "mixed_share": 1,
        "flat_groups_left": 0,
        "dropped_tokens": 0,
        "reward_drawn": 0.5,
    }


def test_flat_groups_give_way_to_others() -> None:
    batch, drawer = refilled(even_teach, max_refills=10)
    uids = [prompt.uid for prompt in batch.prompts]
    assert len(uids) == 4
    assert all(uid % 2 == 0 for uid in uids)
    assert uids[:2] == [0, 2]
    drawn = [uid for asked in drawer.asked for uid in asked]
    assert len(set(drawn)) == len(drawn), "no prompt is drawn twice"
    assert len(drawer.asked[1]) == 4, "two are missing and every second one teaches, so four"
    # whole groups, in the order of their prompts, in every field
    assert [c.token_ids for c in batch.completions] == [[100 + uid] for uid in uids for _ in range(SIZE)]
    assert batch.rewards_B is not None
    assert batch.rewards_B.tolist() == [0.0, 1.0] * 4
    assert batch.rewards_by_name == {"exact": [0.0, 1.0] * 4, "twice": [0.0, 2.0] * 4}
    assert batch.token_ids_BT is not None
    assert batch.token_ids_BT[:, 0].tolist() == [uid for uid in uids for _ in range(SIZE)]
    assert batch.rollout_logprobs_BT is not None
    torch.testing.assert_close(batch.rollout_logprobs_BT[:, 1], torch.tensor([0.0, -0.01] * 4))
    rounds = len(drawer.asked)
    assert batch.seconds == {"sync": rounds, "rollout": 2.0 * rounds, "reward": 0.5 * rounds}
    assert batch.stats["preempted"] == rounds
    found = stats(batch)
    assert found["refills"] == rounds - 1
    assert found["groups_drawn"] == len(drawn)
    assert found["dropped_tokens"] == SIZE * (len(drawn) - 4)
    assert found["reward_drawn"] == pytest.approx(sum(sum(even_teach(uid)) for uid in drawn) / (2 * len(drawn)))


@pytest.mark.parametrize("max_refills", [1, 3])
def test_refills_are_bounded_and_flat_groups_then_fill_the_batch(max_refills: int) -> None:
    batch, drawer = refilled(lambda uid: [1.0, 1.0] if uid else [0.0, 1.0], max_refills=max_refills)
    assert len(drawer.asked) == 1 + max_refills
    assert all(len(asked) == 4 for asked in drawer.asked), "never more than the batch has"
    assert [prompt.uid for prompt in batch.prompts] == [0, 1, 2, 3]
    assert stats(batch)["flat_groups_left"] == 3
    assert stats(batch)["refills"] == max_refills


def test_groups_that_were_not_scored_count_as_flat() -> None:
    batch, _ = refilled(lambda uid: [NAN, NAN] if uid == 0 else [0.0, 1.0])
    assert [prompt.uid for prompt in batch.prompts][:3] == [1, 2, 3]
    assert stats(batch)["refills"] == 1
    batch, _ = refilled(lambda uid: [NAN, NAN], max_refills=1)
    assert "reward_drawn" not in stats(batch)


def test_a_pool_that_runs_dry_ends_the_refills() -> None:
    batch, drawer = refilled(even_teach, max_refills=9, pool=POOL[:6])
    assert sorted(uid for asked in drawer.asked for uid in asked) == list(range(6))
    assert {prompt.uid for prompt in batch.prompts} >= {0, 2, 4}
    assert stats(batch)["flat_groups_left"] == 1


def test_the_choice_depends_on_the_seed_alone() -> None:
    first, second = (refilled(even_teach)[1].asked for _ in range(2))
    assert first == second
    large = refilled(even_teach, seed=10**24)[1].asked
    assert large[1] != first[1]
    assert large == refilled(even_teach, seed=10**24)[1].asked


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"max_refills=0 must be at least 1; null switches"):
        DynamicSampling(max_refills=0)


class TestGuidance:
    """Records of two draws become one; what the trainer scores by it is what it scored by each."""

    @staticmethod
    def drawn(mode: str, scales: str) -> tuple[Any, list[RolloutBatch]]:
        config = GuidanceConfig(mode=mode, scales=scales, audit_sequences=2)  # type: ignore[arg-type]
        config = GuidanceConfig(**(vars(config) | {"sites": ["attn_in", "o_in", "mlp_in", "down_in", "k", "v"]}))
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=config)
        policy = make_policy("qwen3", recipe)
        engine, batches = make_engine(policy, recipe), []
        for seed, lengths in ((1, (5, 9)), (2, (7, 4))):
            prompts = make_prompts(*lengths, seed=seed)
            generation = engine.generate(prompts, sampling(seed=seed), num_samples=SIZE, record_guidance=True)
            batch = RolloutBatch(prompts=prompts, num_generations=SIZE, guidance=generation.guidance)
            collate_rollout(batch, generation.completions, 0)
            batch.advantages_B = torch.zeros(len(batch.completions))
            batches.append(batch)
        return policy, batches

    @staticmethod
    def logprobs(policy: Any, batch: RolloutBatch, indices: list[int]) -> tuple[list[Tensor], float]:
        micro = take(batch, indices, torch.device("cpu"))
        values, _ = score(policy, micro, temperature=0.8)
        assert micro.guidance is not None
        elements = sum(float(sums[0]) for sums in micro.guidance.mismatch.sums.values())
        assert sum(float(sums[3]) for sums in micro.guidance.mismatch.sums.values()) == 0, (
            "codes differ from the record"
        )
        return [row[mask] for row, mask in zip(values, micro.mask_BT, strict=True)], elements

    @pytest.mark.parametrize(("mode", "scales"), [("parity", "whole"), ("full", "whole"), ("syndrome", "parity")])
    def test_joined_records_guide_as_each_did(self, mode: str, scales: str) -> None:
        policy, (first, second) = self.drawn(mode, scales)
        before = self.logprobs(policy, first, [2, 3])[0] + self.logprobs(policy, second, [0, 1])[0]
        kept = first.completions[2:] + second.completions[:2]
        assert first.guidance is not None
        assert second.guidance is not None
        sizes = [first.guidance.num_rows, second.guidance.num_rows]
        joined = RolloutBatch(prompts=[first.prompts[1], second.prompts[0]], num_generations=SIZE)
        joined.guidance = join_records([(first.guidance, kept[:2]), (second.guidance, kept[2:])])
        collate_rollout(joined, kept, 0)
        joined.advantages_B = torch.zeros(4)
        after, elements = self.logprobs(policy, joined, [0, 1, 2, 3])
        assert elements > 0, "audited rows came along"
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old, atol=1e-5, rtol=0)
        assert joined.guidance.num_rows < sum(sizes), "what was dropped takes no memory"
        used = torch.cat([c.guidance_rows for c in kept]).unique()
        assert used.tolist() == list(range(joined.guidance.num_rows))

    def test_versions_and_modes_do_not_mix(self) -> None:
        _, (first, second) = self.drawn("parity", "whole")
        assert second.guidance is not None
        config = second.guidance.config
        second.guidance.config = replace(config, mode="syndrome")
        with pytest.raises(ValueError, match="different sites or modes"):
            join_records([(first.guidance, first.completions), (second.guidance, second.completions)])  # type: ignore[list-item]
        second.guidance.config = config
        second.guidance.policy_version = 9
        with pytest.raises(ValueError, match="policy versions 0 and 9"):
            join_records([(first.guidance, first.completions), (second.guidance, second.completions)])  # type: ignore[list-item]
