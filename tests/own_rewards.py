"""Rewards as users write them, good and bad: importable, so that worker processes find them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence

from trace_lightning.tasks import BatchReward, RewardFn, Sample, Score
from trace_lightning.types import Problem


def length(completion: str, problem: Problem) -> float:
    return float(len(completion))


def catastrophic(completion: str, problem: Problem) -> float:
    """A pattern that backtracks for years on one of the completions, holding the interpreter's lock."""
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 40 if completion == "hang" else "ab")))


def raising(completion: str, problem: Problem) -> float:
    if completion == "raise":
        raise KeyError("answer")
    return 1.0


def dying(completion: str, problem: Problem) -> float:
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def silent(completion: str, problem: Problem) -> float | None:
    return {"none": None, "nan": float("nan")}.get(completion, 1.0)


def listed(completion: str, problem: Problem) -> list[float]:
    return [1.0, 2.0]


def infinite(completion: str, problem: Problem) -> float:
    return float("inf")


def process_id(completion: str, problem: Problem) -> float:
    return float(os.getpid())


async def judge(completion: str, problem: Problem) -> float:
    await asyncio.sleep(60 if completion == "hang" else 0.2)
    return 1.0


async def blocking(completion: str, problem: Problem) -> float:
    """Asynchronous in name: it never lets go of the loop."""
    if completion == "hang":
        time.sleep(60)
    return 1.0


def trl_style(prompts: list[str], completions: list[str], level: list[int], **columns: object) -> list[float]:
    return [len(prompt) + len(completion) + own for prompt, completion, own in zip(prompts, completions, level)]  # noqa: B905


def too_few(completions: list[str], **columns: object) -> list[float]:
    return [1.0] * (len(completions) - 1)


class Slow(RewardFn):
    """Imports and loads for longer than a call may take."""

    name = "slow"

    def prepare(self) -> None:
        time.sleep(1.0)
        self.ready = True

    def __call__(self, completion: str, problem: Problem) -> Score:
        return Score(float(self.ready), f"saw {completion}")


class Broken(RewardFn):
    name = "broken"

    def prepare(self) -> None:
        raise ImportError("no module named judge_of_mine")

    def __call__(self, completion: str, problem: Problem) -> float:
        return 1.0


class HangsOnce(RewardFn):
    """Its first call on rank one never ends. A marker says that it was made: the worker that made it is killed."""

    name = "hangs_once"

    def __call__(self, completion: str, problem: Problem) -> float:
        if os.environ["RANK"] == "1":
            try:
                os.close(os.open(os.environ["HANGS_ONCE"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return float(len(completion))
            time.sleep(600)
        return float(len(completion))


class Ranked(BatchReward):
    name = "ranked"

    def score_batch(self, samples: Sequence[Sample]) -> list[float]:
        lengths = sorted(len(sample.text) for sample in samples)
        return [float(lengths.index(len(sample.text))) for sample in samples]
