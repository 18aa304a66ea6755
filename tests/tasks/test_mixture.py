"""Several tasks as one: problems know their source, each is scored by its own, and nothing held out is trained on."""

from __future__ import annotations

import math

import pytest

import own_rewards
from trace_lightning.tasks import ExactMatch, FunctionReward, Gcd, Mixture, RewardFn, Task, TwoDigitAddition
from trace_lightning.types import Problem


class Listed(Task):
    """Problems from lists of prompts."""

    def __init__(self, train: list[str], heldout: list[str], *rewards: RewardFn) -> None:
        self.train, self.heldout, self.own = train, heldout, rewards or (ExactMatch(),)

    def train_problems(self) -> list[Problem]:
        return [Problem(prompt=text, answer=text, info={"mine": 1}) for text in self.train]

    def heldout_problems(self) -> list[Problem]:
        return [Problem(prompt=text, answer=text) for text in self.heldout]

    def rewards(self) -> list[RewardFn]:
        return list(self.own)


def test_problems_know_where_they_come_from() -> None:
    mixture = Mixture({"a": Listed(["1", "2"], ["x", "y", "z"]), "b": Listed(["3"], ["w"])})
    assert [(p.prompt, p.info) for p in mixture.train_problems()] == [
        ("1", {"mine": 1, "source": "a"}),
        ("2", {"mine": 1, "source": "a"}),
        ("3", {"mine": 1, "source": "b"}),
    ]
    assert [p.prompt for p in mixture.heldout_problems()] == ["x", "w", "y", "z"]  # in turn


def test_what_one_task_holds_out_no_task_trains_on() -> None:
    mixture = Mixture({"a": Listed(["1", "2"], ["3"]), "b": Listed(["3", "4"], ["2"])})
    assert [p.prompt for p in mixture.train_problems()] == ["1", "4"]
    with pytest.raises(ValueError, match="all 1 training questions of 'b' are held out"):
        Mixture({"a": Listed(["1"], ["3"]), "b": Listed(["3"], [])})


def test_each_problem_is_scored_by_the_rewards_of_its_task() -> None:
    both = Listed(["1"], [], ExactMatch(), FunctionReward(own_rewards.length))
    mixture = Mixture({"a": Listed(["1"], []), "b": both})
    (reward,) = mixture.rewards()
    first, second = mixture.train_problems()
    assert reward("1", first).value == 1.0
    assert reward("1", second).value == 2.0
    assert reward("12", second).value == 2.0
    assert not reward.in_process  # one of them is the user's


def test_a_part_that_gives_no_score_gives_none_to_the_whole() -> None:
    mixture = Mixture({"a": Listed(["1"], [], ExactMatch(), FunctionReward(own_rewards.silent))})
    (reward,) = mixture.rewards()
    (problem,) = mixture.train_problems()
    assert reward("none", problem).value is None
    assert math.isnan(reward("nan", problem).value)


def test_trusted_parts_make_a_trusted_whole() -> None:
    (reward,) = Mixture({"sums": TwoDigitAddition(), "gcd": Gcd(largest=5, heldout_size=4)}).rewards()
    assert reward.in_process


def test_bad_mixtures() -> None:
    with pytest.raises(ValueError, match="tasks is empty"):
        Mixture({})
    with pytest.raises(ValueError, match="'judge' is asynchronous"):
        Mixture({"a": Listed(["1"], [], FunctionReward(own_rewards.judge))})
    with pytest.raises(ValueError, match="'ranked' is asynchronous or takes whole batches"):
        Mixture({"a": Listed(["1"], [], own_rewards.Ranked())})
