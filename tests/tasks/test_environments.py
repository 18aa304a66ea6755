"""The tasks that talk: a calculator, a game, and both in one mixture."""

from __future__ import annotations

import pytest

from trace_lightning.tasks import (
    CalculatorProducts,
    ExactMatch,
    GuessNumber,
    LastTurn,
    Mixture,
    Sample,
    TurnRewards,
    TwoDigitAddition,
)
from trace_lightning.tasks.calculator import evaluate
from trace_lightning.tasks.environment import Environment, Step
from trace_lightning.types import Problem, Turn


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*48", 1776),
        ("12+3*4", 24),
        ("7-10-2*3", -9),
        ("007", 7),
        ("999999*999999", 999998000001),
        ("", None),
        ("1+", None),
        ("--1", None),
        ("1/2", None),
        ("9**9", None),
        ("1234567", None),
        ("1+" * 8 + "1", None),
        ("__import__('os')", None),
    ],
)
def test_calculator(expression: str, value: int | None) -> None:
    assert evaluate(expression) == value
    environment = CalculatorProducts().environment(Problem(prompt=""))
    assert environment.step(f"so <1>: <{expression}>") == Step("?\n" if value is None else f"{value}\n")
    assert environment.step("1776") == environment.step("<37*48> or so") == Step(done=True)


def test_products_are_held_out_by_operands() -> None:
    task = CalculatorProducts()
    train, heldout = (
        {frozenset(p.info["operands"]) for p in side} for side in (task.train_problems(), task.heldout_problems())
    )
    assert len(task.heldout_problems()) == 512
    assert not train & heldout
    assert {p.answer for p in [*task.train_problems(), *task.heldout_problems()] if p.prompt == "37*48?"} == {"1776"}


def play(environment: Environment, *guesses: str) -> list[Step]:
    return [environment.step(guess) for guess in guesses]


def test_guessing_by_halves_always_wins() -> None:
    task = GuessNumber()
    for problem in [*task.train_problems(), *task.heldout_problems()]:
        game, low, high = task.environment(problem), 0, 99
        step, before = Step(), -1
        while not step.done:
            middle, before = (low + high) // 2, before + 1
            step = game.step(f"{middle}\n")
            low, high = (middle + 1, high) if step.observation == ">\n" else (low, middle - 1)
        assert step == Step("=\n", done=True, reward=1 - before / 12)


def test_a_lost_round() -> None:
    game = GuessNumber(largest=9, max_guesses=3, heldout_size=0).environment(Problem(prompt="", answer=4))
    expected = [Step("<\n", reward=0.0), Step("?\n", reward=0.0), Step(">\n", done=True, reward=0.0)]
    assert play(game, "5", "-3", "1") == expected


@pytest.mark.parametrize("settings", [{"largest": 0}, {"max_guesses": 0}, {"heldout_size": 100}], ids=str)
def test_no_game(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="GuessNumber"):
        GuessNumber(**settings)


def sample(problem: Problem, *turns: tuple[str, float | None], said: str = "1776\n") -> Sample:
    parts = []
    for text, reward in turns:
        parts += [Turn(source="policy", start=0, end=0, text=text, reward=reward)]
        parts += [Turn(source="environment", start=0, end=0, text=said)]
    return Sample(text="".join(part.text for part in parts), problem=problem, turns=parts[:-1])


def test_rewards_of_conversations() -> None:
    problem = Problem(prompt="37*48?", answer="1776")
    right, wrong = sample(problem, ("<37*48>", 0.5), ("1776", 0.25)), sample(problem, ("1776", None), ("1", None))
    last = LastTurn(ExactMatch())
    assert (last.name, last.in_process) == ("exact_match", True)
    assert [last.score(s) for s in (right, wrong, Sample(text="1776", problem=problem))] == [1.0, 0.0, 1.0]
    assert [TurnRewards().score(s) for s in (right, wrong)] == [0.75, 0.0]


def test_a_mixture_asks_the_problems_own_task() -> None:
    task = Mixture({"sums": TwoDigitAddition(), "tool": CalculatorProducts(), "game": GuessNumber(heldout_size=0)})
    assert task.has_environments
    assert task.environments_in_process
    problems = {p.info["source"]: p for p in task.train_problems()}
    assert task.environment(problems["sums"]) is None
    (reward,) = task.rewards()
    assert reward.counts_turns
    tool = sample(problems["tool"], ("<", 0.5), (str(problems["tool"].answer), None))
    assert reward.score(tool).value == 1.5  # the rewards of turns come in by themselves
    assert reward.score(sample(problems["game"], ("5", 0.0), ("6", 0.75))).value == 0.75  # and not twice
    assert not Mixture({"sums": TwoDigitAddition()}).has_environments


def test_a_mixture_has_one_role() -> None:
    tool = CalculatorProducts()
    tool.observation_role = "tool"
    with pytest.raises(ValueError, match=r"different roles \(tool, user\)"):
        Mixture({"tool": tool, "game": GuessNumber(heldout_size=0)})
