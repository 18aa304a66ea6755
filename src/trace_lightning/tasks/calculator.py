r"""A tool to call: products that are too hard to do in one's head, and a calculator.

    prompt       37*48?
    policy       <37*48>        ends at ">": sample with stop=[">"]
    calculator   1776\n
    policy       1776           ends at EOS; right or wrong

Whatever has no call at its end is the answer. All characters are in the vocabulary of the embedded policies, of which
`builtin:tiny-qwen3-tools` has seen such conversations; in most of its demonstrations it answered by heart, though.
"""

from __future__ import annotations

import math
import re

from trace_lightning.tasks.arithmetic import OperandTask
from trace_lightning.tasks.environment import Environment, Step
from trace_lightning.tasks.rewards import ExactMatch, LastTurn
from trace_lightning.types import Problem

_CALL = re.compile(r"<([^<>]*)>\Z")
_EXPRESSION = re.compile(r"[0-9]{1,6}(?:[-+*][0-9]{1,6}){0,7}")


class Calculator(Environment):
    """Answers a turn that ends in `<expression>` with its value, or with `?`; any other turn is the last."""

    def step(self, text: str) -> Step:
        """Value and line end."""
        call = _CALL.search(text)
        if call is None:
            return Step(done=True)
        value = evaluate(call[1])
        return Step("?\n" if value is None else f"{value}\n")


def evaluate(expression: str) -> int | None:
    """The value of sums, differences and products of integers, such as `12+3*4`; None for anything else."""
    if _EXPRESSION.fullmatch(expression) is None:
        return None
    terms = re.findall(r"[-+]?[^-+]+", expression)
    return sum((-1 if term[0] == "-" else 1) * math.prod(map(int, re.findall(r"\d+", term))) for term in terms)


class CalculatorProducts(OperandTask):
    """Products of two numbers from 10 to 99, `37*48?`, with a calculator at hand; right is the exact last turn.

    Args:
        heldout_size: questions held out.

    Raises:
        ValueError: `heldout_size` leaves nothing to train on.
    """

    environments_in_process = True

    def __init__(self, heldout_size: int = 512) -> None:
        pairs = ((a, b) for a in range(10, 100) for b in range(10, 100))
        problems = (Problem(prompt=f"{a}*{b}?", answer=str(a * b), info={"operands": (a, b)}) for a, b in pairs)
        super().__init__(problems, heldout_size, LastTurn(ExactMatch()))

    def environment(self, problem: Problem) -> Calculator:
        """The same calculator for every problem."""
        return Calculator()
