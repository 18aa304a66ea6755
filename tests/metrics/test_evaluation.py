"""pass@k against counting all subsets, and what a held-out batch is judged by."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from trace_lightning.metrics import evaluation_values, pass_at_k
from trace_lightning.types import Completion, EvalSpec, Problem, Prompt, RolloutBatch, SamplingParams


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        rewards = torch.tensor([[1.0] * right + [0.0] * (n - right)])
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            wanted = sum(any(i < right for i in subset) for subset in subsets) / len(subsets)
            assert pass_at_k(rewards, 1.0, k).item() == pytest.approx(wanted, abs=1e-12)


def test_pass_at_k_does_not_overflow_and_is_not_the_biased_estimate() -> None:
    rewards = torch.zeros(1, 2000)
    rewards[0, :3] = 1.0
    value = pass_at_k(rewards, 1.0, 1000).item()
    assert value == pytest.approx(1 - (1000 * 999 * 998) / (2000 * 1999 * 1998), abs=1e-12)
    assert value != pytest.approx(1 - (1 - 3 / 2000) ** 1000, abs=1e-3)


def test_unscored_completions_are_no_wrong_ones() -> None:
    rewards = torch.tensor([[1.0, math.nan, 0.0, math.nan], [math.nan, math.nan, math.nan, 1.0]])
    assert pass_at_k(rewards, 1.0, 1).tolist() == [0.5, 1.0]
    two = pass_at_k(rewards, 1.0, 2)
    assert two[0] == 1.0
    assert two[1].isnan()


def batch(rewards_PG: list[list[float]], spec: EvalSpec | None) -> RolloutBatch:
    rewards = torch.tensor(rewards_PG)
    completions = [
        Completion(token_ids=[1] * (i + 1), logprobs=[0.0] * (i + 1), finish_reason="stop", policy_version=0)
        for i in range(rewards.numel())
    ]
    prompts = [Prompt(token_ids=[1], problem=Problem(prompt=""), uid=i) for i in range(len(rewards))]
    return RolloutBatch(
        prompts=prompts,
        num_generations=rewards.shape[1],
        completions=completions,
        rewards_B=rewards.flatten(),
        evaluation=spec,
    )


def test_values_of_a_held_out_set() -> None:
    spec = EvalSpec(name="hard", num_generations=2, pass_at=[1, 2], correct_from=0.5)
    values = evaluation_values(batch([[0.6, 0.0], [0.2, 0.1], [0.7, math.nan]], spec))
    found = {name: (value.item(), count) for name, (value, count) in values.items()}
    assert found["reward"] == (pytest.approx(1.6 / 5), 5)
    assert found["mean_length"] == (3.5, 6)
    assert found["mean@2"] == (pytest.approx((0.5 + 0 + 1) / 3), 3)
    assert found["pass@1"] == found["mean@2"]
    assert found["pass@2"] == (0.5, 2)  # the third has too few scored completions
    assert values["pass@2"][0].dtype == torch.float32


def test_without_a_set_only_reward_and_length_and_nothing_that_was_not_measured() -> None:
    assert set(evaluation_values(batch([[1.0, 0.0]], None))) == {"reward", "mean_length"}
    spec = EvalSpec(name="hard", num_generations=2, pass_at=[2])
    assert set(evaluation_values(batch([[math.nan, math.nan]], spec))) == {"mean_length"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a/b"}, "'a/b' is no name"),
        ({"name": ""}, "'' is no name"),
        ({"num_generations": 0}, "num_generations=0"),
        ({"num_generations": 2, "pass_at": [1, 4]}, "pass_at has 4, but 2 completions.*num_generations=4"),
        ({"pass_at": [0]}, "pass_at has 0"),
        (
            {"num_generations": 2, "sampling": SamplingParams(temperature=0.0)},
            "temperature=0 draws the same completion 2",
        ),
    ],
)
def test_bad_specs(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        EvalSpec(**({"name": "set"} | arguments))
