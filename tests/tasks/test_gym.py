"""The reasoning-gym adapter, against a stand-in with the habits of the real package (0.1.25)."""

from __future__ import annotations

import pickle
import sys
import types
from random import Random
from typing import Any

import pytest

from trace_lightning.tasks import GymScore, ReasoningGym


class Sums:
    """Like a ProceduralDataset: item i from Random(seed + i), a little credit for wrong answers, cannot be pickled."""

    def __init__(self, size: int, seed: int, largest: int = 10**6) -> None:
        assert largest > 0, "largest must be positive"
        self.size, self.seed, self.largest = size, seed, largest
        self.unpicklable = lambda: None

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = Random(self.seed + index)
        a, b = rng.randrange(self.largest), rng.randrange(self.largest)
        return {"question": f"{a} + {b} = ?", "answer": None, "metadata": {"sum": a + b}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return 1.0 if answer == str(entry["metadata"]["sum"]) else 0.01


@pytest.fixture(autouse=True)
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dataset(name: str, **config: Any) -> Sums:
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        return Sums(**config)

    module = types.ModuleType("reasoning_gym")
    module.create_dataset = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def right(problem: Any) -> str:
    return f"I think <answer>5</answer>, no: <answer> {problem.info['entry']['metadata']['sum']} </answer>."


def test_problems() -> None:
    task = ReasoningGym("sums", size=300, heldout_size=50, seed=42)
    train, heldout = task.train_problems(), task.heldout_problems()
    assert (len(train), len(heldout)) == (300, 50)
    assert not {str(p.prompt) for p in train} & {str(p.prompt) for p in heldout}
    question = train[0].info["entry"]["question"]
    assert train[0].prompt == [
        {"role": "user", "content": f"{question}\n\nWrite the final answer between <answer> and </answer>."}
    ]
    assert train[0].answer is None
    plain = ReasoningGym("sums", size=1, heldout_size=0, seed=42, chat=False, instruction="")
    assert plain.train_problems()[0].prompt == question
    assert plain.heldout_problems() == []


def test_the_held_out_set_stays_when_the_training_size_changes() -> None:
    small, large = (ReasoningGym("sums", size=size, heldout_size=20) for size in (10, 500))
    assert small.heldout_problems() == large.heldout_problems()


@pytest.mark.parametrize("heldout_seed", [43, 42 - 49, 42 + 299])
def test_seeds_closer_than_the_size_are_refused(heldout_seed: int) -> None:
    with pytest.raises(ValueError, match=r"share items.*Set heldout_seed=342 or more"):
        ReasoningGym("sums", size=300, heldout_size=50, seed=42, heldout_seed=heldout_seed)


@pytest.mark.parametrize("heldout_seed", [42 - 50, 342])
def test_seeds_as_far_as_the_size_share_nothing(heldout_seed: int) -> None:
    task = ReasoningGym("sums", size=300, heldout_size=50, seed=42, heldout_seed=heldout_seed)
    assert len(task.train_problems()) == 300


def test_few_distinct_questions() -> None:
    task = ReasoningGym("sums", size=200, heldout_size=5, config={"largest": 4})
    train, heldout = (
        {p.info["entry"]["question"] for p in side} for side in (task.train_problems(), task.heldout_problems())
    )
    assert len(heldout) == len(task.heldout_problems()) <= 5
    assert train
    assert not train & heldout
    with pytest.raises(ValueError, match="so few distinct questions"):
        ReasoningGym("sums", size=200, heldout_size=200, config={"largest": 2})


def test_score() -> None:
    task = ReasoningGym("sums", size=3, heldout_size=1)
    problem = task.train_problems()[0]
    (reward,) = task.rewards()
    assert reward(right(problem), problem) == 1.0
    assert reward("<answer>no</answer>", problem) == 0.0  # the package gives 0.01
    assert reward(str(problem.info["entry"]["metadata"]["sum"]), problem) == 0.0  # not in the tag


def test_partial_credit_and_untagged_answers() -> None:
    task = ReasoningGym("sums", size=3, heldout_size=1, threshold=None, answer_tag=None)
    problem = task.train_problems()[0]
    (reward,) = task.rewards()
    assert reward("no", problem) == pytest.approx(0.01)
    assert reward(f" {problem.info['entry']['metadata']['sum']}\n", problem) == 1.0


def test_the_reward_travels_to_a_worker_after_use() -> None:
    task = ReasoningGym("sums", size=3, heldout_size=1)
    problem = task.train_problems()[0]
    (reward,) = task.rewards()
    assert reward(right(problem), problem) == 1.0
    sent, received = pickle.loads(pickle.dumps((reward, problem)))
    assert sent(right(problem), received) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "sums", "config": {"nope": 1}},
            "'sums' with config {'nope': 1}: .*unexpected keyword argument 'nope'",
        ),
        ({"name": "sums", "config": {"largest": 0}}, "largest must be positive"),
        ({"name": "summs"}, "'summs'.*not registered"),
        ({"name": "sums", "size": 0}, "size=0"),
        ({"name": "sums", "heldout_size": -1}, "heldout_size=-1"),
        ({"name": "sums", "threshold": 0.0}, "threshold=0.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**arguments)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"trace-lightning\[gym\]"):
        ReasoningGym("sums", size=3, heldout_size=1)
    assert GymScore("sums", {}).name == "gym_score"  # nothing is imported before it is needed


class Attribute:
    """A scalar attribute of a curriculum."""

    def __init__(self, field_name: str, levels: list[int]) -> None:
        self.field_name, self.levels = field_name, levels


class Levels:
    """Like a BaseCurriculum: the operands grow with the level."""

    def __init__(self) -> None:
        self.attributes = {"largest": Attribute("largest", [10, 100, 10**6])}
        self.level = 0

    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(largest=self.attributes["largest"].levels[self.level], seed=None, size=500)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("reasoning_gym.factory")
    module.has_curriculum = lambda name: True
    module.create_curriculum = lambda name: Levels()
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", module)


def largest_operand(task: ReasoningGym) -> int:
    return max(p.info["entry"]["metadata"]["sum"] for p in task.train_problems())


def test_difficulty_is_a_level_of_the_tasks_own_curriculum(factory) -> None:
    sizes = [largest_operand(ReasoningGym("sums", size=50, heldout_size=0, difficulty=level)) for level in (0, 1, 2)]
    assert sizes[0] < 20 < sizes[1] < 200 < sizes[2]
    own = ReasoningGym("sums", size=50, heldout_size=0, difficulty=2, config={"largest": 10})
    assert largest_operand(own) < 20  # what is set goes before the level


@pytest.mark.parametrize("level", [-1, 3])
def test_levels_that_are_not_there_are_refused_with_those_that_are(factory, level: int) -> None:
    with pytest.raises(ValueError, match=rf"difficulty={level}, but 'sums' has the levels 0 to 2"):
        ReasoningGym("sums", size=5, heldout_size=0, difficulty=level)


def test_a_task_without_levels_says_so(factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["reasoning_gym.factory"], "has_curriculum", lambda name: False)
    with pytest.raises(ValueError, match="'sums' has no levels of difficulty"):
        ReasoningGym("sums", size=5, heldout_size=0, difficulty=0)
