r"""`CodeTests`: runs the program in a completion against the problem's tests, in a confined process.

Three kinds of test, in `problem.info["tests"]`:

    {"stdin": "3 4\n", "stdout": "7"}          the whole program, once per test; output compared line by line
    {"call": "add(3, 4)", "returns": 7}         evaluated after the program; the value is compared on this side
    {"check": "assert add(3, 4) == 7"}          executed after the program; a bare text is a check as well

The answers of the first two never reach the process that runs the program. A check does: a program that searches its
own interpreter can find it and report success. Prefer calls where there is a choice.

Ending early is no way to pass: what was not reached does not count.
"""

from __future__ import annotations

import ast
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from trace_lightning.tasks.base import RewardFn, Score
from trace_lightning.tasks.sandbox import Ending, Limits, Program, protection, run
from trace_lightning.types import Problem

log = logging.getLogger(__name__)
_KINDS = ({"stdin", "stdout"}, {"call", "returns"}, {"check"})


class CodeTests(RewardFn):
    """1.0 if the program passes all tests, else 0.0, with the reason.

    The program is the last block fenced as Python, or as nothing.

    Args:
        limits: of one program.
        partial: the share of tests passed instead. A policy can collect much of it with trivial programs.
        fenced: a completion without a fenced block scores 0; false takes the whole completion for the program.
        max_programs: tests with `stdin` that are run; each starts a program.
        tests_key: where `problem.info` has the tests.
        unconfined: run with resource limits alone where programs cannot be confined, or anywhere. Network and files are
            then open to whatever the policy writes.

    Raises:
        ValueError: this machine cannot confine programs and `unconfined` is not set, or an argument is out of range.
    """

    name = "code_tests"

    def __init__(
        self,
        limits: Limits | None = None,
        partial: bool = False,
        fenced: bool = True,
        max_programs: int = 10,
        tests_key: str = "tests",
        unconfined: bool = False,
    ) -> None:
        if max_programs < 1:
            raise ValueError(f"CodeTests: max_programs={max_programs} must be at least 1")
        self.limits = limits or Limits()
        self.partial, self.fenced, self.max_programs = partial, fenced, max_programs
        self.tests_key, self.unconfined = tests_key, unconfined
        # the calls and the checks are one program more; starting and reading take part of a second each
        self.time_limit = (max_programs + 1) * (self.limits.seconds + 1)
        log.info("CodeTests: programs have %s", "NO PROTECTION but limits" if unconfined else protection()[1])

    def prepare(self) -> None:
        """Find out how programs can be confined here, which takes starting one."""
        if not self.unconfined:
            protection()

    def __call__(self, completion: str, problem: Problem) -> Score:
        tests = self._tests(problem)
        source = program_of(completion, fenced=self.fenced)
        if source is None:
            return Score(0.0, "no fenced program")
        passed, reasons = self._run(source, tests)
        total = sum(map(len, tests))
        reason = f"{passed} of {total} tests passed" + (f"; {reasons[0]}" if reasons else "")
        return Score(passed / total if self.partial else float(passed == total), reason)

    def _tests(self, problem: Problem) -> tuple[list[Any], list[Any], list[Any]]:
        given = problem.info.get(self.tests_key)
        if not isinstance(given, list) or not given:
            raise ValueError(f"problem.info[{self.tests_key!r}] must be a list of tests, found {str(given)[:60]}")
        kinds: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for index, test in enumerate(given):
            test = {"check": test} if isinstance(test, str) else test
            fitting = [i for i, keys in enumerate(_KINDS) if isinstance(test, dict) and keys == set(test)]
            if not fitting:
                raise ValueError(
                    f"problem.info[{self.tests_key!r}][{index}] must have the keys stdin and stdout, call and returns, "
                    f"or check; found {str(test)[:60]}"
                )
            kinds[fitting[0]].append(test)
        return kinds[0][: self.max_programs], kinds[1], kinds[2]

    def _run(self, source: str, tests: tuple[list[Any], list[Any], list[Any]]) -> tuple[int, list[str]]:
        """Tests passed and what went wrong, in the order it did; without partial credit up to the first fault."""
        programs, calls, checks = tests
        passed, reasons = 0, list[str]()
        if calls or checks:
            program = Program(source=source, calls=[t["call"] for t in calls], checks=[t["check"] for t in checks])
            ending = run(program, self.limits, confined=not self.unconfined)
            passed, reasons = _judge(ending, calls, checks)
        for test in programs:
            if reasons and not self.partial:
                break
            program = Program(source=source, stdin=test["stdin"])
            ending = run(program, self.limits, confined=not self.unconfined)
            right = not ending.reason and _lines(ending.stdout) == _lines(test["stdout"])
            passed += right
            if not right:
                reasons.append(ending.reason or "another output")
        return passed, reasons


def program_of(completion: str, *, fenced: bool) -> str | None:
    """The program in a completion: its last block fenced as Python or as nothing; None if a fence is missing."""
    blocks = re.findall(r"^```(?:python|py|python3)?[ \t]*\n(.*?)^```", completion, flags=re.DOTALL | re.MULTILINE)
    if blocks:
        return str(blocks[-1])
    return None if fenced else completion


def _judge(ending: Ending, calls: Sequence[dict[str, Any]], checks: Sequence[dict[str, Any]]) -> tuple[int, list[str]]:
    """Calls and checks passed, and what went wrong."""
    passed, reasons = ending.checks, list[str]()
    for index, (test, value) in enumerate(zip(calls, ending.values, strict=True)):
        if index in ending.errors:
            reasons.append(f"{test['call']}: {ending.errors[index]}")
        elif value is not None and _equal(_literal(value), test["returns"]):
            passed += 1
        elif value is not None:
            reasons.append(f"{test['call']}: returned {value[:80]}")
    for index, test in enumerate(checks):
        if index in ending.check_errors:
            reasons.append(f"{test['check'][:80]}: {ending.check_errors[index]}")
    if ending.reason:
        reasons.append(ending.reason)
    elif passed < len(calls) + len(checks) and not reasons:
        reasons.append("it ended before all tests")
    return passed, reasons


class _Unreadable:
    """A value that is no literal: equal to nothing."""


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _Unreadable()


def _equal(given: Any, wanted: Any) -> bool:
    """By value: JSON has no tuples, so they equal lists; floats to nine digits."""
    if isinstance(given, float) or isinstance(wanted, float):
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (given, wanted))
        return numbers and math.isclose(given, wanted, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[key], wanted[key]) for key in given)
    return type(given) is type(wanted) and bool(given == wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
