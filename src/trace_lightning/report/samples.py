"""The completions that a page shows, chosen while `completions.jsonl` is read line by line, once, and goes on growing.

100,000 completions neither fit a page nor are read by anybody. Kept are a few rollouts of each split, evenly spaced
over the run, and of each of them the best, the worst and some in between. How many lines will follow is never known, so
what is kept is thinned as the file grows: every second one goes, and from then on only every second one is taken.
Long texts lose their middle, since answers stand at the end.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from trace_lightning.report.files import complete_lines

TRAIN_ROLLOUTS, OTHER_ROLLOUTS, PER_ROLLOUT = 12, 6, 14
HEAD, TAIL = 600, 400  # tokens of a completion that are shown
PROMPT_HEAD, PROMPT_TAIL = 3000, 1000  # characters
SAMPLING_RULE = (
    f"Of the training split at most {TRAIN_ROLLOUTS} logged rollouts evenly spaced over the run and the last one, of "
    f"every other split {OTHER_ROLLOUTS} and the last one; of each rollout the best completion, the worst and at most "
    f"{PER_ROLLOUT} evenly spaced ones. Completions of more than {HEAD + TAIL:,} tokens and prompts of more than "
    f"{PROMPT_HEAD + PROMPT_TAIL:,} characters lose their middle. All of them are in completions.jsonl."
)
_HEAD = re.compile(rb'\{"step": (\d+), "split": "([\w./-]+)", "reward": (null|-?\d[\d.e+-]*), .*\}\n', re.DOTALL)
Item = TypeVar("Item")
Sample = dict[str, Any]


@dataclass
class Spread(Generic[Item]):
    """Between `limit / 2` and `limit` evenly spaced items of a stream of unknown length, the first one included."""

    limit: int
    kept: list[Item] = field(default_factory=list)
    _seen: int = 0
    _stride: int = 1

    def takes_next(self) -> bool:
        """Count one more item; whether it is to be kept."""
        taken = self._seen % self._stride == 0
        self._seen += 1
        return taken

    def keep(self, item: Item) -> None:
        """Keep the item just counted."""
        self.kept.append(item)
        if len(self.kept) > self.limit:
            self.kept, self._stride = self.kept[::2], 2 * self._stride


@dataclass(frozen=True)
class _Line:
    """Where a completion stands: its number, its first byte, and its reward."""

    number: int
    offset: int
    reward: float | None


@dataclass(eq=False)
class _Rollout:
    """The completions of one step and split."""

    step: int
    split: str
    best: _Line | None = None
    worst: _Line | None = None
    spread: Spread[_Line] = field(default_factory=lambda: Spread(PER_ROLLOUT))

    def add(self, line: _Line) -> None:
        if self.spread.takes_next():
            self.spread.keep(line)
        if line.reward is not None:
            if self.best is None or line.reward > (self.best.reward or 0.0):
                self.best = line
            if self.worst is None or line.reward < (self.worst.reward or 0.0):
                self.worst = line

    def lines(self) -> list[_Line]:
        return [line for line in (self.best, self.worst, *self.spread.kept) if line is not None]


class SampleReader:
    """Reads a growing `completions.jsonl`; each `update` goes on where the last one ended.

    Args:
        path: of the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start()

    def _start(self) -> None:
        self.lines = self._offset = 0
        self.half_line = False
        self._broken: set[int] = set()  # numbers of lines
        self._current: dict[str, _Rollout] = {}
        self._rollouts: dict[str, Spread[_Rollout]] = {}

    def update(self) -> None:
        """Read what was added; all of it again if the file is another one."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < self._offset:
            self._start()
        if size == 0:
            return
        for line, end in complete_lines(self.path, self._offset):
            self.lines += 1
            try:
                step, split, reward = _head(line)
            except (ValueError, KeyError, TypeError):
                self._broken.add(self.lines)
            else:
                self._rollout(step, split).add(_Line(self.lines, self._offset, reward))
            self._offset = end
        self.half_line = size > self._offset

    def _rollout(self, step: int, split: str) -> _Rollout:
        current = self._current.get(split)
        if current is not None and current.step == step:
            return current
        spread = self._rollouts.setdefault(split, Spread(TRAIN_ROLLOUTS if split == "train" else OTHER_ROLLOUTS))
        self._current[split] = rollout = _Rollout(step, split)
        if spread.takes_next():
            spread.keep(rollout)
        return rollout

    def samples(self) -> list[Sample]:
        """What to show, in the order of the file; only here are whole lines parsed."""
        rollouts = {id(rollout): rollout for spread in self._rollouts.values() for rollout in spread.kept}
        rollouts |= {id(rollout): rollout for rollout in self._current.values()}
        lines = {line.number: line.offset for rollout in rollouts.values() for line in rollout.lines()}
        samples: list[Sample] = []
        if not lines:
            return samples
        with self.path.open("rb") as file:
            for number, offset in sorted(lines.items()):
                file.seek(offset)
                try:
                    samples.append(compact(json.loads(file.readline()), number))
                except (ValueError, KeyError, TypeError, AttributeError):
                    self._broken.add(number)
        return samples

    def notes(self) -> list[str]:
        """Lines that could not be read."""
        found, count = [], len(self._broken)
        if count:
            found.append(f"{count} broken line{'s' * (count > 1)} of {self.path.name} left out")
        if self.half_line:
            found.append(f"the last line of {self.path.name} is half written and was left out")
        return found


def _head(line: bytes) -> tuple[int, str, float | None]:
    """Step, split and reward. Of most lines nothing else is read: parsing all their tokens takes ten times as long."""
    found = _HEAD.match(line)
    if found:
        reward = found[3]
        return int(found[1]), found[2].decode(), None if reward == b"null" else float(reward)
    entry = json.loads(line)
    reward = entry["reward"]
    return int(entry["step"]), str(entry["split"]), reward if isinstance(reward, int | float) else None


def compact(entry: dict[str, Any], line: int) -> Sample:
    """What the page needs of a line: `turns` of [text, log-prob] pieces, or of text where no tokens were logged."""
    copied = ("step", "split", "reward", "rewards", "reasons", "finish_reason", "policy_version", "num_tokens")
    sample = {name: entry[name] for name in (*copied, "mean_logprob") if entry.get(name) not in (None, {})}
    turns = entry.get("turns") or [
        {"source": "policy", "text": entry["completion"], "tokens": entry.get("tokens")},
    ]
    return sample | {
        "id": line,
        "reward": entry.get("reward"),
        "prompt": [{"role": role, "text": _cut_text(text)} for role, text in _messages(entry["prompt"])],
        "turns": list(_cut_turns(turns)),
    }


def _messages(prompt: Any) -> Iterator[tuple[str, str]]:
    if isinstance(prompt, str):
        yield "prompt", prompt
        return
    for message in prompt:
        content = message["content"]
        yield str(message["role"]), content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _cut_text(text: str) -> str:
    left_out = len(text) - PROMPT_HEAD - PROMPT_TAIL
    if left_out <= 0:
        return text
    return f"{text[:PROMPT_HEAD]}\n[... {left_out:,} characters ...]\n{text[-PROMPT_TAIL:]}"


def _cut_turns(turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The turns, with the middle of the whole trajectory left out."""
    pieces = [_pieces(turn) for turn in turns]
    total, at = sum(map(len, pieces)), 0
    for turn, own in zip(turns, pieces, strict=True):
        head = own[: max(0, HEAD - at)] if total > HEAD + TAIL else own
        tail = own[max(len(head), total - TAIL - at) :]
        cut = len(own) - len(head) - len(tail)
        at += len(own)
        gap = [[f" [... {cut:,} tokens ...] ", None]] if cut else []
        kept = {"source": turn["source"], "tokens": list(_merged([*head, *gap, *tail]))}
        yield kept if turn.get("reward") is None else kept | {"reward": turn["reward"]}


def _merged(pieces: list[list[Any]]) -> Iterator[list[Any]]:
    """Neighbours without a log-prob as one piece."""
    for has_none, group in itertools.groupby(pieces, key=lambda piece: piece[1] is None):
        if has_none:
            yield ["".join(text for text, _ in group), None]
        else:
            yield from group


def _pieces(turn: dict[str, Any]) -> list[list[Any]]:
    """Pieces of [text, log-prob or None]; a text without tokens is cut into runs of a token's length."""
    if turn.get("tokens"):
        return [[str(text), _rounded(logprob)] for text, logprob in turn["tokens"]]
    text = str(turn["text"])
    return [[text[i : i + 4], None] for i in range(0, len(text), 4)]


def _rounded(logprob: Any) -> float | None:
    return round(logprob, 3) if isinstance(logprob, int | float) and math.isfinite(logprob) else None
