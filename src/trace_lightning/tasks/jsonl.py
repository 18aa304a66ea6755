"""Prompts from a JSONL file: one object a line with a prompt, usually an answer, and whatever else the reward needs.

    {"prompt": "12+34=", "answer": "46"}
    {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46", "source": "mine"}

The whole file is read and checked at the start: a bad row 40,000 should not stop a run in its second hour. Keys other
than the two are kept in `problem.info`. What was left out: streaming and other containers; prompts are small, and a
`Task` is three methods for whoever has them elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.rewards import ExactMatch
from trace_lightning.tasks.split import split_by_question
from trace_lightning.types import Problem


class JsonlTask(Task):
    """Problems from JSONL files, split by prompt unless the held-out ones have a file of their own.

    Args:
        path: the JSONL file. All prompts are plain text, or all are lists of chat messages.
        heldout_path: file of held-out problems; `heldout_fraction` is then unused.
        heldout_fraction: share of the rows of `path` to hold out, at least one row unless 0. Rows with equal prompts
            stay together.
        prompt_key: key of the prompt.
        answer_key: key of the answer, any JSON value; null for problems without one.
        reward: one reward or several; the default is `ExactMatch`.

    Raises:
        ValueError: a file that is missing, empty or not JSONL, a row without a key or of another kind than the first, a
            fraction outside [0, 1), no training problem left, or neither an answer nor a reward. The message names
            file, line and key.
    """

    def __init__(
        self,
        path: str,
        heldout_path: str | None = None,
        heldout_fraction: float = 0.05,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        reward: RewardFn | list[RewardFn] | None = None,
    ) -> None:
        if not 0 <= heldout_fraction < 1:
            raise ValueError(f"JsonlTask: heldout_fraction={heldout_fraction} must be at least 0 and below 1")
        if answer_key is None and not reward:
            raise ValueError("JsonlTask: answer_key=null leaves ExactMatch nothing to compare with; set reward as well")
        self._rewards = list(reward) if isinstance(reward, list) else [reward or ExactMatch()]
        problems = _read(Path(path), prompt_key, answer_key)
        if heldout_path is not None:
            heldout = _read(Path(heldout_path), prompt_key, answer_key)
            kind, heldout_kind = _kind(problems[0].prompt), _kind(heldout[0].prompt)
            if kind != heldout_kind:
                raise ValueError(f"{heldout_path}: prompts are {heldout_kind}, those of {path} are {kind}")
            self._train, self._heldout = problems, heldout
        else:
            wanted = max(1, round(len(problems) * heldout_fraction)) if heldout_fraction else 0
            self._train, self._heldout = split_by_question(
                problems, wanted, key=lambda problem: json.dumps(problem.prompt)
            )
        if not self._train:
            raise ValueError(f"{path}: its {len(problems)} row(s) are all held out; set heldout_fraction=0 or add rows")

    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on: in hash order after a split, else in the file's order."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Held-out problems; no prompt of theirs is in a training problem of the same file."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """The rewards given, or `ExactMatch`."""
        return self._rewards


def _read(path: Path, prompt_key: str, answer_key: str | None) -> list[Problem]:
    problems: list[Problem] = []
    for where, row in _rows(path):
        for key in (prompt_key, answer_key):
            if key is not None and key not in row:
                raise ValueError(f"{where}: no key {key!r}; the row has {', '.join(map(repr, row)) or 'none'}")
        prompt = _checked_prompt(row[prompt_key], f"{where}: key {prompt_key!r}")
        if problems and _kind(prompt) != _kind(problems[0].prompt):
            raise ValueError(
                f"{where}: key {prompt_key!r} is {_kind(prompt)}, but the rows before it have "
                f"{_kind(problems[0].prompt)}; a file holds one kind"
            )
        info = {key: value for key, value in row.items() if key not in (prompt_key, answer_key)}
        problems.append(Problem(prompt=prompt, answer=row[answer_key] if answer_key is not None else None, info=info))
    if not problems:
        raise ValueError(f"{path}: the file has no rows")
    return problems


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`file, line n` and object of each row; blank lines are skipped."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file ({path.resolve()})")
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object with keys, found {type(row).__name__}")
        yield where, row


def _kind(prompt: str | list[dict[str, str]]) -> str:
    return "plain text" if isinstance(prompt, str) else "chat messages"


def _checked_prompt(prompt: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        if prompt:
            return prompt
        raise ValueError(f"{where} is empty")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where} must be text or a list of chat messages, found {json.dumps(prompt)[:60]}")
    for index, message in enumerate(prompt):
        fine = isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))
        if not fine:
            raise ValueError(
                f"{where}: message {index} needs the texts 'role' and 'content', found {json.dumps(message)[:60]}"
            )
    return prompt
