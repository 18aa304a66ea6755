r"""Arithmetic tasks whose questions we can list in full: no data set, an exact reward, a held-out split by question.

`TwoDigitAddition` is what the packaged tiny model was warm-started on. `OneDigitProducts` and `Gcd` suit a small
pretrained model (SmolLM2-135M): zero-shot chat with a bare answer gets about 0 %, one worked example in a raw prompt
gets 25 to 55 % sampled, which leaves RL something to take.

    TwoDigitAddition    "12+34="                 "46"      operands zero-padded to two digits, the sum is not: 03+04=7
    OneDigitProducts    "1 * 4 = 4\n4 * 5 ="     " 20\n"   sample with stop=["\n"] and about 4 new tokens
    Gcd                 "gcd(4, 6) = 2\ngcd(12, 18) ="     likewise

What was left out: options for the prompt's wording. The accuracies a warm start has depend on it, so another wording is
another task, and a JSONL file (`JsonlTask`) writes it down.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.rewards import ExactMatch, IntegerMatch
from trace_lightning.tasks.split import split_by_question
from trace_lightning.types import Problem


def _unordered(operands: tuple[int, int]) -> str:
    """Operands in either order are one question: all three operations commute."""
    return "{} {}".format(*sorted(operands))


class OperandTask(Task):
    """Problems with `info["operands"]`, split so that (a, b) and (b, a) are on the same side.

    `example` are the operands of the worked example: its answer stands in every prompt, so it is never held out.
    """

    @abstractmethod  # a base to call, no task to choose
    def __init__(
        self,
        problems: Iterable[Problem],
        heldout_size: int,
        reward: RewardFn,
        example: tuple[int, int] | None = None,
    ) -> None:
        problems = list(problems)
        name = type(self).__name__
        if not 0 <= heldout_size < len(problems):
            raise ValueError(
                f"{name}: heldout_size={heldout_size} must be 0 to {len(problems) - 1}, of the "
                f"{len(problems)} questions there are"
            )
        told = [p for p in problems if example and _unordered(p.info["operands"]) == _unordered(example)]
        untold = [problem for problem in problems if problem not in told]
        train, self._heldout = split_by_question(untold, heldout_size, key=lambda p: _unordered(p.info["operands"]))
        self._train = train + told
        self._reward = reward

    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on, in hash order."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Problems whose operands are never trained on, in either order."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """One reward of 0 or 1."""
        return [self._reward]


class TwoDigitAddition(OperandTask):
    """All 10,000 sums of two numbers below 100, `12+34=` to `46`; the answer is the plain number, one to three digits.

    The reward is the exact string, so that a zero-padded or signed answer counts as wrong.

    Args:
        heldout_size: questions held out. The packaged checkpoint has not seen the 512 of the default.

    Raises:
        ValueError: `heldout_size` leaves nothing to train on.
    """

    def __init__(self, heldout_size: int = 512) -> None:
        pairs = ((a, b) for a in range(100) for b in range(100))
        problems = (Problem(prompt=f"{a:02d}+{b:02d}=", answer=str(a + b), info={"operands": (a, b)}) for a, b in pairs)
        super().__init__(problems, heldout_size, ExactMatch())


class OneDigitProducts(OperandTask):
    r"""The 100 products of two digits after one worked example, `1 * 4 = 4`; sample with `stop=["\n"]`.

    Args:
        heldout_size: questions held out.

    Raises:
        ValueError: `heldout_size` leaves nothing to train on.
    """

    def __init__(self, heldout_size: int = 20) -> None:
        pairs = ((a, b) for a in range(10) for b in range(10))
        problems = (
            Problem(prompt=f"1 * 4 = 4\n{a} * {b} =", answer=a * b, info={"operands": (a, b)}) for a, b in pairs
        )
        super().__init__(problems, heldout_size, IntegerMatch(), example=(1, 4))


class Gcd(OperandTask):
    r"""Greatest common divisors of two numbers from 1 to `largest` after one worked example; `stop=["\n"]`.

    Of pairs up to 20, 64 % have 1: a policy that says nothing else has learned no more than that.

    Args:
        largest: largest operand, at least 2.
        heldout_size: questions held out.

    Raises:
        ValueError: `largest` below 2, or `heldout_size` leaves nothing to train on.
    """

    def __init__(self, largest: int = 20, heldout_size: int = 80) -> None:
        if largest < 2:
            raise ValueError(f"Gcd: largest={largest} leaves a single question; use at least 2")
        pairs = ((a, b) for a in range(1, largest + 1) for b in range(1, largest + 1))
        problems = (
            Problem(prompt=f"gcd(4, 6) = 2\ngcd({a}, {b}) =", answer=math.gcd(a, b), info={"operands": (a, b)})
            for a, b in pairs
        )
        super().__init__(problems, heldout_size, IntegerMatch(), example=(4, 6))
