"""Advantages of a batch: the penalty is added for them alone, and estimators see every rank's rewards."""

from __future__ import annotations

import pytest
import torch

from tiny import make_batch
from trace_lightning.rl import BatchAdvantage, GroupAdvantage, SoftOverlong
from trace_lightning.rollout.credit import assign_advantages
from trace_lightning.types import RolloutBatch, SamplingParams


def scored() -> RolloutBatch:
    batch = make_batch(lengths=[(3, 4), (3, 2), (3, 5), (3, 1)])
    batch.prompts, batch.num_generations = batch.prompts[:2], 2
    batch.rewards_B, batch.sampling = torch.tensor([1.0, 0.0, 1.0, 1.0]), SamplingParams(max_new_tokens=5)
    return batch


def test_without_a_penalty() -> None:
    batch = scored()
    metrics = assign_advantages(batch, GroupAdvantage(scale="none"), None, gather=lambda x: x, rank=0)
    assert metrics == {}
    assert batch.advantages_B is not None
    assert batch.advantages_B.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_a_penalty_moves_advantages_and_not_rewards() -> None:
    batch = scored()
    penalty = SoftOverlong(cache=2)  # lengths 4, 2, 5, 1 of 5: -.5, 0, -1, 0
    metrics = assign_advantages(batch, GroupAdvantage(scale="none"), penalty, gather=lambda x: x, rank=0)
    assert batch.rewards_B is not None
    assert batch.advantages_B is not None
    assert batch.rewards_B.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert batch.advantages_B.tolist() == [0.25, -0.25, -0.5, 0.5]
    total, count = metrics["length_penalty"]
    assert (total.item(), count.item()) == (-1.5, 4)


@pytest.mark.parametrize("estimator", [GroupAdvantage(scale="batch"), BatchAdvantage(), GroupAdvantage()], ids=repr)
def test_ranks_scale_alike(estimator) -> None:
    """Two ranks of two groups have the advantages of one rank of four."""
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 8.0], [2.0, 4.0]])
    expected = estimator(rewards)
    for rank in (0, 1):
        batch = scored()
        batch.rewards_B = rewards[2 * rank : 2 * rank + 2].flatten()
        assign_advantages(batch, estimator, None, gather=lambda _: rewards.view(2, 2, 2), rank=rank)
        assert batch.advantages_B is not None
        torch.testing.assert_close(batch.advantages_B, expected[2 * rank : 2 * rank + 2].flatten())


@pytest.mark.gpu
def test_the_metric_lies_where_the_others_do() -> None:
    """It is stacked and reduced with those of the loss, which live on the device."""
    batch = scored()
    metrics = assign_advantages(batch, GroupAdvantage(), SoftOverlong(cache=2), gather=lambda x: x.cuda(), rank=0)
    assert all(part.is_cuda for part in metrics["length_penalty"])
    assert batch.advantages_B is not None
    assert batch.advantages_B.device.type == "cpu"
