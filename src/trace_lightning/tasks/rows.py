"""Prompts from files: one row with a prompt, usually an answer, and whatever else the reward needs.

    {"prompt": "12+34=", "answer": "46"}
    {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46", "source": "mine"}

`RowsTask` makes problems of rows; a subclass says where the rows come from (JSONL, Parquet, a saved `Dataset`). All of
it is read and checked at the start: a bad row 40,000 should not stop a run in its second hour. Columns other than
the two are kept in `problem.info`. What was left out: streaming, and hubs; prompts are small.
"""

from __future__ import annotations

import json
import logging
import string
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_lightning.tasks.base import RewardFn, Task
from trace_lightning.tasks.rewards import ExactMatch
from trace_lightning.tasks.split import split_by_question
from trace_lightning.types import Problem

log = logging.getLogger(__name__)
Row = tuple[str, Mapping[str, Any]]  # where it stands, for messages; its columns


class RowsTask(Task):
    r"""Problems from the rows of a file, split by prompt unless the held-out ones have a file of their own.

    Args:
        path: where the rows are. All prompts are plain text, or all are lists of chat messages.
        heldout_path: where the held-out rows are; `heldout_fraction` is then unused.
        heldout_fraction: share of the rows of `path` to hold out, at least one row unless 0. Rows with equal prompts
            stay together.
        prompt_key: column of the prompt.
        answer_key: column of the answer, any value; null for problems without one.
        template: text with columns in braces that makes the prompt, e.g. `"{question}\nAnswer:"`; `prompt_key` is then
            unused. Double braces stand for themselves.
        chat: make plain prompts one user message each.
        system: a system message put before the messages.
        reward: one reward or several; the default is `ExactMatch`.

    Raises:
        ValueError: a file that is missing, empty or not of its kind, a row without a column or of another kind than the
            first, a fraction outside [0, 1), no training problem left, neither an answer nor a reward, or a system
            message without chat. The message names file, row and column.
    """

    def __init__(
        self,
        path: str,
        heldout_path: str | None = None,
        heldout_fraction: float = 0.05,
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        template: str | None = None,
        chat: bool = False,
        system: str | None = None,
        reward: RewardFn | list[RewardFn] | None = None,
    ) -> None:
        who = type(self).__name__
        if not 0 <= heldout_fraction < 1:
            raise ValueError(f"{who}: heldout_fraction={heldout_fraction} must be at least 0 and below 1")
        if answer_key is None and not reward:
            raise ValueError(f"{who}: answer_key=null leaves ExactMatch nothing to compare with; set reward as well")
        self._rewards = list(reward) if isinstance(reward, list) else [reward or ExactMatch()]
        self._prompt_key, self._answer_key, self._template = prompt_key, answer_key, template
        self._chat, self._system = chat, system
        self._used = [prompt_key] if template is None else _fields(who, template)
        problems = self._read(path)
        if heldout_path is not None:
            heldout = self._read(heldout_path)
            kind, heldout_kind = _kind(problems[0].prompt), _kind(heldout[0].prompt)
            if kind != heldout_kind:
                raise ValueError(f"{heldout_path}: prompts are {heldout_kind}, those of {path} are {kind}")
            self._train, self._heldout = problems, heldout
            known = {json.dumps(problem.prompt) for problem in problems}
            if leaked := sum(json.dumps(problem.prompt) in known for problem in heldout):
                log.warning(
                    "%d of the %d held-out prompts in %s are trained on: they are in %s as well",
                    leaked,
                    len(heldout),
                    heldout_path,
                    path,
                )
        else:
            wanted = max(1, round(len(problems) * heldout_fraction)) if heldout_fraction else 0
            self._train, self._heldout = split_by_question(
                problems, wanted, key=lambda problem: json.dumps(problem.prompt)
            )
        if not self._train:
            raise ValueError(f"{path}: its {len(problems)} row(s) are all held out; set heldout_fraction=0 or add rows")

    @abstractmethod
    def rows(self, path: str) -> Iterator[Row]:
        """Each row of a file with the place it stands at, e.g. `a.jsonl, line 3`."""

    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on: in hash order after a split, else in the file's order."""
        return self._train

    def heldout_problems(self) -> Sequence[Problem]:
        """Held-out problems; no prompt of theirs is in a training problem of the same file."""
        return self._heldout

    def rewards(self) -> Sequence[RewardFn]:
        """The rewards given, or `ExactMatch`."""
        return self._rewards

    def _read(self, path: str) -> list[Problem]:
        problems: list[Problem] = []
        for where, row in self.rows(path):
            for key in (*self._used, self._answer_key):
                if key is not None and key not in row:
                    raise ValueError(f"{where}: no key {key!r}; the row has {', '.join(map(repr, row)) or 'none'}")
            prompt = self._prompt(where, row)
            if problems and _kind(prompt) != _kind(problems[0].prompt):
                raise ValueError(
                    f"{where}: key {self._prompt_key!r} is {_kind(prompt)}, but the rows before it have "
                    f"{_kind(problems[0].prompt)}; a file holds one kind"
                )
            answer = row[self._answer_key] if self._answer_key is not None else None
            if answer is None and self._answer_key is not None:
                raise ValueError(f"{where}: key {self._answer_key!r} is null; set answer_key=null if there are none")
            shown = (self._answer_key, None if self._template else self._prompt_key)
            info = {key: value for key, value in row.items() if key not in shown}
            problems.append(Problem(prompt=prompt, answer=answer, info=info))
        if not problems:
            raise ValueError(f"{path}: the file has no rows")
        return problems

    def _prompt(self, where: str, row: Mapping[str, Any]) -> str | list[dict[str, str]]:
        if self._template is not None:
            prompt: str | list[dict[str, str]] = self._template.format(**{key: row[key] for key in self._used})
        else:
            prompt = _checked_prompt(row[self._prompt_key], f"{where}: key {self._prompt_key!r}")
        if self._chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if self._system is None:
            return prompt
        if isinstance(prompt, str):
            raise ValueError(f"{where}: system={self._system[:40]!r} needs chat messages; set chat=true")
        return [{"role": "system", "content": self._system}, *prompt]


class JsonlTask(RowsTask):
    """Problems from JSONL files, UTF-8, one object a line; blank lines are skipped. See `RowsTask`."""

    def rows(self, path: str) -> Iterator[Row]:
        for number, line in enumerate(_existing(path).read_bytes().split(b"\n"), start=1):
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


class ParquetTask(RowsTask):
    """Problems from Parquet files, or folders of them (extra `data`). See `RowsTask`."""

    def rows(self, path: str) -> Iterator[Row]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError("ParquetTask needs pyarrow: pip install 'trace-lightning[data]'") from error
        place = Path(path)
        files = sorted(place.glob("*.parquet")) if place.is_dir() else [_existing(path)]
        for file in files:
            try:
                table = parquet.read_table(file)
            except pyarrow.ArrowInvalid as error:
                raise ValueError(f"{file}: not a Parquet file ({error})") from error
            for number, row in enumerate(table.to_pylist()):
                yield f"{file}, row {number}", row


class DatasetTask(RowsTask):
    """Problems from a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote (extra `data`).

    Nothing is fetched from a hub. A split of a `DatasetDict` is named behind a colon: `path/to/folder:train`.
    See `RowsTask`.
    """

    def rows(self, path: str) -> Iterator[Row]:
        try:
            import datasets
        except ImportError as error:
            raise ImportError("DatasetTask needs datasets: pip install 'trace-lightning[data]'") from error
        folder, split = path, ""
        if not Path(path).is_dir() and ":" in path:
            folder, split = path.rsplit(":", 1)
        if not Path(folder).is_dir():
            raise ValueError(f"{path}: no such folder; save the data set with save_to_disk and name it here")
        try:
            loaded = datasets.load_from_disk(folder)
        except FileNotFoundError as error:
            raise ValueError(f"{folder}: not a folder that `save_to_disk` wrote ({error})") from error
        except IndexError as error:  # what datasets 5 makes of a folder without rows
            raise ValueError(f"{folder}: the data set has no rows") from error
        if isinstance(loaded, datasets.DatasetDict) != bool(split) or (split and split not in loaded):
            there = f"the splits {', '.join(loaded)}" if isinstance(loaded, datasets.DatasetDict) else "no splits"
            raise ValueError(
                f"{path}: {folder} has {there}; write FOLDER:SPLIT to choose one, FOLDER if there are none"
            )
        for number, row in enumerate(loaded[split] if split else loaded):
            yield f"{path}, row {number}", row


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file ({Path(path).resolve()})")
    return Path(path)


def _fields(who: str, template: str) -> list[str]:
    """Columns that a template names."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{who}: template={template!r}: {error}; double braces stand for themselves") from error
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError(
            f"{who}: template={template!r} must name columns in braces, like {{question}}; double braces stand for "
            "themselves"
        )
    return list(dict.fromkeys(names))


def _kind(prompt: str | list[dict[str, str]]) -> str:
    return "plain text" if isinstance(prompt, str) else "chat messages"


def _checked_prompt(prompt: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        if prompt:
            return prompt
        raise ValueError(f"{where} is empty")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where} must be text or a list of chat messages, found {_shown(prompt)}")
    for index, message in enumerate(prompt):
        fine = isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))
        if not fine:
            raise ValueError(f"{where}: message {index} needs the texts 'role' and 'content', found {_shown(message)}")
    return prompt


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
