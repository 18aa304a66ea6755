r"""Answers that are mathematics, compared by value: 1/2 and 0.5, \sqrt{8} and 2\sqrt{2}, {1, 2} and {2, 1}.

The work is math-verify's (extra `math`). Three of its habits are dealt with here:
  * Its time limits use signals, which work in a main thread alone; they are switched off, and the worker's holds.
  * It does not read `<answer>42</answer>`; the tags are taken off first.
  * From plain text it takes the last number, so "41 or 42" would pass for 42. Only a final answer counts here, in a tag
    or in \boxed{}, and two values in it are a set, which equals neither.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from trace_lightning.tasks.base import RewardFn, Score
from trace_lightning.types import Problem


class MathVerify(RewardFn):
    r"""1.0 if the final answer equals the problem's as mathematics, else 0.0.

    Args:
        answer_tag: the final answer is what the last `<tag>...</tag>` holds; without one, or with null, what the last
            `\boxed{...}` holds.
        anywhere: without either, let math-verify look through the text. It takes the last number there.

    Raises:
        ImportError: math-verify is not installed.
    """

    name = "math_verify"

    def __init__(self, answer_tag: str | None = "answer", anywhere: bool = False) -> None:
        self.answer_tag, self.anywhere = answer_tag, anywhere
        _library()

    def prepare(self) -> None:
        """Import it (about a second), so that no call pays."""
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # one line per call about the limits switched off
        _parsed(r"\boxed{\frac{1}{2}}")

    def __call__(self, completion: str, problem: Problem) -> Score:
        wanted = _parsed(_boxed(_last_box(str(problem.answer)) or str(problem.answer)))
        if not wanted:
            raise ValueError(f"the answer {problem.answer!r} of the problem is not read as mathematics")
        final = self._final(completion)
        if final is None and not self.anywhere:
            where = f"<{self.answer_tag}> or \\boxed" if self.answer_tag else "\\boxed"
            return Score(0.0, f"no final answer in {where}")
        given = _parsed(completion if final is None else _boxed(final))
        if not given:
            return Score(0.0, "the final answer is not read as mathematics")
        right = _library().verify(wanted, given, timeout_seconds=None)
        return Score(float(right), f"read as {given[-1]}")

    def _final(self, completion: str) -> str | None:
        if self.answer_tag:
            tag = re.escape(self.answer_tag)
            found = re.findall(f"<{tag}>(.*?)</{tag}>", completion, flags=re.DOTALL)
            if found:
                return _last_box(found[-1]) or str(found[-1])
        return _last_box(completion)


def _last_box(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : end]
        start = text.rfind(r"\boxed{", 0, start)
    return None


def _boxed(text: str) -> str:
    return rf"\boxed{{{text.strip().strip('$').strip()}}}"


def _parsed(text: str) -> list[Any]:
    parsed: list[Any] = _library().parse(text, parsing_timeout=None)
    return parsed


def _library() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ImportError("MathVerify needs math-verify: pip install 'trace-lightning[math]'") from error
    return math_verify
