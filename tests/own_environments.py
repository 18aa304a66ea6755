"""Environments of a user, which the process of an environment imports under this name; nothing here imports torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.environment import Environment, Step
from trace_lightning.types import Problem


class Counting(Environment):
    """Says how long the turn was; a turn of one token ends the conversation."""

    def step(self, text: str) -> Step:
        return Step(f"[{len(text)}]", done=len(text) < 2, reward=float(len(text)))


class Talk(Task):
    """Conversations with what `make` returns; the problems are the tests' own."""

    def __init__(self, make: Callable[[], Any] = Counting, *, in_process: bool = True) -> None:
        self.make, self.environments_in_process = make, in_process

    def train_problems(self) -> list[Problem]:
        return []

    heldout_problems = train_problems

    def rewards(self) -> list[RewardFn]:
        return []

    def environment(self, problem: Problem) -> Any:
        return self.make()


class Misbehaving(Counting):
    """Does what `problem.info["how"]` says, from its first step on."""

    def reset(self, problem: Problem) -> Any:
        self.how = problem.info.get("how")
        if self.how == "raise in reset":
            raise KeyError("no such game")
        if self.how == "hang in reset":
            time.sleep(3600)
        return "a first word" if self.how == "say something in reset" else None

    def step(self, text: str) -> Any:
        self.harm_its_process()
        match self.how:
            case "raise":
                raise RuntimeError("the tool broke")
            case "hang":
                time.sleep(3600)
            case "dawdle":
                time.sleep(0.4)
            case "number":
                return Step(12, reward=1.0)  # type: ignore[arg-type]
            case "text":
                return "no step"
            case "surrogate":
                return Step(os.fsdecode(b"\xff"))
            case "infinite":
                return Step("fine", reward=float("inf"))
        return super().step(text)

    def harm_its_process(self) -> None:
        if self.how == "break off":  # in the middle of its answer
            for descriptor in range(3, 100):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"\0\0\1\0 and no more")
        if self.how in ("die", "break off"):
            os._exit(3)
        if self.how == "hang up":  # its pipe, and nothing else
            os.closerange(3, 1000)
            time.sleep(3600)


class Rendezvous(Counting):
    """The slow one answers its first turn once others have taken as many turns as it was told to wait for."""

    def reset(self, problem: Problem) -> None:
        self.folder, self.wait_for = Path(problem.info["folder"]), problem.info.get("wait_for", 0)

    def step(self, text: str) -> Step:
        (self.folder / f"{os.getpid()}.{time.monotonic_ns()}").touch()
        while len(list(self.folder.iterdir())) < self.wait_for:
            time.sleep(0.005)
        self.wait_for = 0
        return super().step(text)
