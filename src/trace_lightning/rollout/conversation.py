"""Conversations of a rollout: sends ended turns to their environments, and appends what comes back.

    turn of the policy ends (EOS, a stop)  --> step of its environment --> observation appended, the next turn begins
                                                                       '-> done, out of turns or of room: it is over
    turn cut by its limit                  --> over; the environment is not asked about half a turn

Token in, token out: what the policy drew stays as it is, an observation's tokens are put behind it with log-prob 0, and
`Turn`s say whose tokens are whose. The generation loop never waits here while a sequence can be decoded.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trace_lightning.rollout.observations import ObservationEncoder
from trace_lightning.rollout.scheduler import Sequence
from trace_lightning.tasks.base import Failure, Task
from trace_lightning.tasks.environment import Step
from trace_lightning.tasks.environment_pool import environment_pool
from trace_lightning.types import Turn, TurnLimits

log = logging.getLogger(__name__)
_LOOK_UP_SECONDS = 1.0  # a loop that waits still has to notice Ctrl-C


class Conversations:
    """The environments of a task, for a whole run; `begin` starts a rollout.

    Args:
        task: makes the environments.
        tokenizer: of the policy.
        limits: of each conversation.
        template_variables: for the chat template.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        limits: TurnLimits,
        template_variables: dict[str, Any] | None = None,
    ) -> None:
        self.limits, self.tokenizer = limits, tokenizer
        self.encode = ObservationEncoder(tokenizer, task.observation_role, template_variables)
        self.pool = environment_pool(task, limits.max_environments)
        self.failures = {"errors": 0, "timeouts": 0}  # over the whole run
        self._asked: dict[int, Sequence] = {}
        self._alive: set[int] = set()

    def begin(self, context_limit: int | None) -> None:
        """A rollout begins; `context_limit` is the number of positions there are, None if none is in reach."""
        if self._alive:  # after a rollout that was interrupted
            self.pool.close()
        self._context = context_limit
        self._asked, self._alive, self._spent = {}, set(), defaultdict[int, float](float)
        self.num_steps, self.step_seconds, self.wait_seconds = 0, 0.0, 0.0

    def start(self, sequence: Sequence) -> None:
        """A sequence draws its first token: its environment may get ready."""
        self._alive.add(sequence.number)
        self.pool.start(sequence.number, sequence.group.prompt.problem)

    def ask(self, sequence: Sequence, *, cut: bool) -> None:
        """The turn of a sequence has ended: its environment has the word, or the conversation is over (`cut`)."""
        start, end = sequence.turn_start, sequence.num_drawn
        text = str(self.tokenizer.decode(sequence.token_ids[start:end], skip_special_tokens=True))
        sequence.turns.append(Turn(source="policy", start=start, end=end, text=text))
        number = sequence.number
        if cut:
            self._end(sequence, "length")
            return
        left = self.limits.timeout_s - self._spent[number]
        self.pool.step(number, text, max(0.0, min(self.limits.step_timeout_s, left)))
        self._asked[number] = sequence

    def answers(self, *, wait: bool) -> list[Sequence]:
        """Sequences whose environments have answered; those that are over have a `finish_reason`."""
        if not self._asked:
            return []
        begin = time.monotonic()
        answers = self.pool.answers(_LOOK_UP_SECONDS if wait else 0.0)
        self.wait_seconds += (time.monotonic() - begin) * wait
        answered = []
        for number, answer, seconds in answers:
            sequence = self._asked.pop(number)
            self.num_steps += 1
            self.step_seconds += seconds
            self._spent[number] += seconds
            self._take(sequence, answer)
            answered.append(sequence)
        return answered

    def _take(self, sequence: Sequence, answer: Step | Failure) -> None:
        if isinstance(answer, Failure):
            self._failure(sequence, answer)
            return
        sequence.turns[-1] = dataclasses.replace(sequence.turns[-1], reward=answer.reward)
        said = answer.observation
        last_turn = answer.done or self._num_turns(sequence) == self.limits.max_turns
        ids = [] if last_turn else self.encode(sequence.group.prompt.problem, said, sequence.token_ids[-1])
        start = sequence.num_drawn
        if not last_turn and start + len(ids) < self.room(sequence):
            _append(sequence, ids)
            sequence.turns.append(Turn(source="environment", start=start, end=start + len(ids), text=said))
            return
        if said:
            sequence.turns.append(Turn(source="environment", start=start, end=start, text=said))
        self._end(sequence, "stop" if answer.done else "length")

    def room(self, sequence: Sequence) -> int:
        """Tokens that a sequence may have behind its prompt."""
        longest = self.limits.max_total_tokens
        return longest if self._context is None else min(longest, self._context - sequence.prompt_length)

    def _num_turns(self, sequence: Sequence) -> int:
        return sum(turn.source == "policy" for turn in sequence.turns)

    def _failure(self, sequence: Sequence, failure: Failure) -> None:
        limits = f" (rollout.turns: step_timeout_s={self.limits.step_timeout_s:g}, timeout_s={self.limits.timeout_s:g})"
        sequence.error = f"environment: {failure.reason}{limits * failure.timed_out}"
        kind = "timeouts" if failure.timed_out else "errors"
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            text = sequence.turns[-1].text[:80]
            log.warning("%s on %r; the completion is not scored\n%s", sequence.error, text, failure.traceback)
        self._end(sequence, "stop")

    def _end(self, sequence: Sequence, finish_reason: str) -> None:
        sequence.finish_reason = finish_reason
        self._alive.remove(sequence.number)
        self.pool.end(sequence.number)

    @property
    def stats(self) -> dict[str, float]:
        """Steps of environments in this rollout, the seconds they took, and seconds with nothing to do but wait."""
        seconds = {"env_seconds": self.step_seconds, "env_wait_seconds": self.wait_seconds}
        return {"env_steps": float(self.num_steps)} | seconds

    def close(self) -> None:
        """End the processes; another rollout starts new ones."""
        self.pool.close()


def _append(sequence: Sequence, ids: list[int]) -> None:
    """Put an observation's tokens behind what was drawn; nothing was drawn for them, so records are filled up."""
    count = len(ids)
    sequence.token_ids = sequence.token_ids + ids
    sequence.logprobs = sequence.logprobs + [0.0] * count
    sequence.num_drawn += count
    if sequence.support is not None:
        sequence.support = _padded(sequence.support, count, -1)
    if sequence.topk is not None:
        sequence.topk = _padded(sequence.topk[0], count, -1), _padded(sequence.topk[1], count, -torch.inf)


def _padded(table_TK: torch.Tensor, count: int, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(table_TK, (0, 0, 0, count), value=value)
