"""reasoning-gym's 106 procedural tasks as ours. The package is optional (extra `gym`) and 310 MB, so imported late.

Three of its habits would mislead an RL run, and are dealt with here:
  * Item i is drawn from `Random(seed + i)`, so seeds 42 and 43 share all but one of their items. The held-out items
    have a seed of their own that is refused if the two ranges meet.
  * Small configurations have few distinct questions, so far seeds still repeat them. Held-out questions are therefore
    distinct, and training items that ask one of them are dropped.
  * `score_answer` gives wrong answers a little (0.01, or more for partial credit). Group normalisation turns such a
    difference into a full-sized advantage, so by default a score counts as 1 from 0.999 on and as 0 below.

`difficulty` sets every attribute of the task's own curriculum to that level. Several levels or tasks together are a
`Mixture`, and `SuccessCurriculum` moves along them. What was left out: the package's composite data set, which mixes
scores of different meaning, and its coach, which changes tasks in the middle of an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.types import Problem

HELDOUT_SEED_DISTANCE = 10**9  # beyond any training size, so the held-out set stays the same when the size changes
INSTRUCTION = "Write the final answer between <answer> and </answer>."


def _at_difficulty(name: str, level: int) -> dict[str, Any]:
    """Options of a task at one level of its curriculum; attributes with fewer levels stay at their last."""
    _create(name, 1, 0, {})  # complains about an unknown name, and about a package that is missing
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(name):
        raise ValueError(f"ReasoningGym: {name!r} has no levels of difficulty; set its options in config")
    curriculum = create_curriculum(name)
    highest = max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)
    if not 0 <= level <= highest:
        raise ValueError(f"ReasoningGym: difficulty={level}, but {name!r} has the levels 0 to {highest}")
    curriculum.set_global_level(level)
    options = curriculum.generate_configuration()
    fields = ("field_name", "lower_field_name", "upper_field_name")
    names = {getattr(a, field) for a in curriculum.attributes.values() for field in fields if hasattr(a, field)}
    return {name: getattr(options, name) for name in names}


def _create(name: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("ReasoningGym needs reasoning-gym: pip install 'trace-lightning[gym]'") from error
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
    except (TypeError, AssertionError, ValueError) as error:  # an unknown option, a value out of range, an unknown name
        raise ValueError(f"reasoning-gym does not make {name!r} with config {config}: {error}") from error


class GymScore(RewardFn):
    """What the task's own `score_answer` gives the completion's answer.

    Args:
        dataset: name of the reasoning-gym task.
        config: options of the task.
        threshold: a score counts as 1.0 from here on and as 0.0 below; None passes partial credit through.
        answer_tag: the answer is what the last `<tag>...</tag>` holds, and a completion without one scores 0.0; None
            takes the whole completion, stripped.

    Raises:
        ValueError: `threshold` outside (0, 1].
    """

    name = "gym_score"

    def __init__(
        self, dataset: str, config: dict[str, Any], threshold: float | None = 0.999, answer_tag: str | None = "answer"
    ) -> None:
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"ReasoningGym: threshold={threshold} must be above 0 and at most 1, or null")
        self.dataset = dataset
        self.config = config
        self.threshold = threshold
        self.answer_tag = answer_tag
        self._scorer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # some data sets hold lambdas and cannot be sent to a reward worker, which makes its own
        return {**self.__dict__, "_scorer": None}

    def prepare(self) -> None:
        """Import the package (2 seconds) and make the task, so that no call pays."""
        if self._scorer is None:
            self._scorer = _create(self.dataset, 1, 0, self.config)

    def __call__(self, completion: str, problem: Problem) -> float:
        answer = self._answer(completion)
        if answer is None:
            return 0.0
        self.prepare()
        score = float(self._scorer.score_answer(answer, problem.info["entry"]))
        return score if self.threshold is None else float(score >= self.threshold)

    def _answer(self, completion: str) -> str | None:
        if self.answer_tag is None:
            return completion.strip()
        tag = re.escape(self.answer_tag)
        found = re.findall(f"<{tag}>(.*?)</{tag}>", completion, flags=re.DOTALL)
        return str(found[-1]).strip() if found else None


class ReasoningGym(Task):
    """A task of reasoning-gym; `problem.info["entry"]` is its item, and `answer` may be None where many are right.

    Args:
        name: task name, e.g. `gsm_symbolic` or `chain_sum`.
        size: items to train on, before those that ask a held-out question are dropped.
        heldout_size: distinct held-out questions; fewer if the configuration does not have as many.
        seed: seed of the training items, which use `seed` to `seed + size - 1`.
        heldout_seed: seed of the held-out items; the default is far from any training size.
        difficulty: level of the task's curriculum, from 0; null leaves the package's defaults. Where an attribute is a
            range, it reaches from the lowest level's value to this level's.
        config: options of the task; they override those of the difficulty.
        threshold: score that counts as right; null passes partial credit through.
        instruction: added to each question after a blank line; empty adds nothing.
        answer_tag: where the answer is looked for; null takes the whole completion.
        chat: prompts are one user message; false makes them plain text.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: sizes or seeds out of range, seed ranges that meet, a name or option that reasoning-gym does not
            know, or a configuration with so few questions that none is left to train on.
    """

    def __init__(
        self,
        name: str,
        size: int = 10_000,
        heldout_size: int = 200,
        seed: int = 0,
        heldout_seed: int | None = None,
        difficulty: int | None = None,
        config: dict[str, Any] | None = None,
        threshold: float | None = 0.999,
        instruction: str = INSTRUCTION,
        answer_tag: str | None = "answer",
        chat: bool = True,
    ) -> None:
        if size < 1 or heldout_size < 0:
            raise ValueError(f"ReasoningGym: size={size} must be at least 1 and heldout_size={heldout_size} at least 0")
        config = ({} if difficulty is None else _at_difficulty(name, difficulty)) | (config or {})
        heldout_seed = seed + HELDOUT_SEED_DISTANCE if heldout_seed is None else heldout_seed
        if seed < heldout_seed + heldout_size and heldout_seed < seed + size:
            raise ValueError(
                f"ReasoningGym: seed={seed} with size={size} and heldout_seed={heldout_seed} with heldout_size="
                f"{heldout_size} share items: item i is drawn from seed + i. Set heldout_seed={seed + size} or more"
            )
        self._instruction = instruction
        self._chat = chat
        self._reward = GymScore(name, config, threshold, answer_tag)
        # a data set of size 0 is refused by some tasks, hence the slice
        heldout = {
            item["question"]: item for item in _items(name, max(heldout_size, 1), heldout_seed, config)[:heldout_size]
        }
        train = [item for item in _items(name, size, seed, config) if item["question"] not in heldout]
        if not train:
            raise ValueError(
                f"ReasoningGym: {name!r} with config {config} has so few distinct questions that all {size} training "
                f"items are held out as well. Make heldout_size={heldout_size} smaller or the task larger"
            )
        self._train = [self._problem(item) for item in train]
        self._heldout = [self._problem(item) for item in heldout.values()]

    def _problem(self, item: dict[str, Any]) -> Problem:
        text = "\n\n".join(part for part in (item["question"], self._instruction) if part)
        prompt: str | list[dict[str, str]] = [{"role": "user", "content": text}] if self._chat else text
        return Problem(prompt=prompt, answer=item["answer"], info={"entry": item})

    def train_problems(self) -> Sequence[Problem]:
        """Training items in the order of their seeds, without those that ask a held-out question."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Held-out items, each question once."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """The task's own score."""
        return [self._reward]


def _items(name: str, size: int, seed: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    dataset = _create(name, size, seed, config)
    return [dataset[index] for index in range(size)]
