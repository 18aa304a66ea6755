"""The arithmetic tasks: right answers, the documented wording, and no question on both sides of the split."""

from __future__ import annotations

import math
import re

import pytest

from trace_lightning.tasks import ExactMatch, Gcd, IntegerMatch, OneDigitProducts, Task, TwoDigitAddition
from trace_lightning.types import Problem

TASKS = [TwoDigitAddition, OneDigitProducts, Gcd]


def everything(task: Task) -> list[Problem]:
    return [*task.train_problems(), *task.heldout_problems()]


@pytest.mark.parametrize(
    ("task", "train", "heldout"), [(TwoDigitAddition, 9488, 512), (OneDigitProducts, 80, 20), (Gcd, 320, 80)]
)
def test_sizes_and_split(task: type[Task], train: int, heldout: int) -> None:
    made = task()
    assert (len(made.train_problems()), len(made.heldout_problems())) == (train, heldout)
    assert len({problem.prompt for problem in everything(made)}) == train + heldout
    unordered = [
        {frozenset(p.info["operands"]) for p in side} for side in (made.train_problems(), made.heldout_problems())
    ]
    assert not unordered[0] & unordered[1]


@pytest.mark.parametrize("task", TASKS)
def test_the_split_is_the_same_every_time(task: type[Task]) -> None:
    assert task().heldout_problems() == task().heldout_problems()
    assert task().train_problems() == task().train_problems()


def test_the_packaged_checkpoint_relies_on_these_held_out_questions() -> None:
    # the packaged model was trained on the rest; if these change, its held-out accuracy is no longer one
    assert [p.prompt for p in TwoDigitAddition().heldout_problems()[:4]] == ["49+79=", "79+49=", "10+89=", "89+10="]


def test_addition_wording() -> None:
    by_prompt = {problem.prompt: problem.answer for problem in everything(TwoDigitAddition())}
    assert by_prompt["12+34="] == "46"
    assert by_prompt["03+04="] == "7"
    assert by_prompt["99+99="] == "198"
    for prompt, answer in by_prompt.items():
        a, b = re.fullmatch(r"(\d\d)\+(\d\d)=", prompt).groups()
        assert int(a) + int(b) == int(answer)


def test_products_and_gcd_wording() -> None:
    products = {problem.prompt: problem.answer for problem in everything(OneDigitProducts())}
    assert len(products) == 100
    assert products["1 * 4 = 4\n4 * 5 ="] == 20
    gcds = {problem.prompt: problem.answer for problem in everything(Gcd())}
    assert gcds["gcd(4, 6) = 2\ngcd(12, 18) ="] == 6
    for problem in everything(Gcd(largest=9, heldout_size=5)):
        assert problem.answer == math.gcd(*problem.info["operands"])


@pytest.mark.parametrize(("task", "example"), [(OneDigitProducts, {1, 4}), (Gcd, {4, 6})])
def test_the_worked_example_is_never_held_out(task: type[Task], example: set[int]) -> None:
    made = task(heldout_size=90 if task is OneDigitProducts else 380)
    assert example not in [set(problem.info["operands"]) for problem in made.heldout_problems()]
    assert [set(problem.info["operands"]) for problem in made.train_problems()].count(example) == 2


@pytest.mark.parametrize("task", TASKS)
def test_each_answer_gets_its_reward(task: type[Task]) -> None:
    made = task()
    (reward,) = made.rewards()
    for problem in made.heldout_problems():
        assert reward(str(problem.answer), problem) == 1.0
        assert reward(str(int(problem.answer) + 1), problem) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("20", 1), (" 20\n", 1), (" 20\n5 * 5 = 25", 1), ("+20", 1), ("\t20 ", 1),
        ("", 0), ("\n20", 0), ("20 or 21", 0), ("20.", 0), ("20.0", 0), ("2 0", 0), ("= 20", 0), ("-20", 0), ("²0", 0),
    ],
)  # fmt: skip
def test_integer_match(completion: str, expected: int) -> None:
    assert IntegerMatch()(completion, Problem(prompt="", answer=20)) == expected
    assert IntegerMatch()(completion, Problem(prompt="", answer="20")) == expected


def test_addition_wants_the_plain_number() -> None:
    problem = Problem(prompt="12+34=", answer="46")
    assert [ExactMatch()(text, problem) for text in ("46", "046", "+46", "464")] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("heldout_size", [-1, 10_000])
def test_a_split_that_leaves_nothing_is_refused(task: type[Task], heldout_size: int) -> None:
    with pytest.raises(ValueError, match=f"heldout_size={heldout_size}"):
        task(heldout_size=heldout_size)


def test_gcd_of_one_number_is_refused() -> None:
    with pytest.raises(ValueError, match="largest=1"):
        Gcd(largest=1)


def test_no_held_out_questions_is_allowed() -> None:
    assert len(OneDigitProducts(heldout_size=0).train_problems()) == 100
