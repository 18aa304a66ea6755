"""Which sequences run now: continuous batching over a page pool, with each group's prompt prefilled once.

    waiting groups --admit: prompt pages, prefill once--> open groups --start--> running --finish--> done
                   <------ reclaim: pages have run out ------'  <----'

Pages are taken as a sequence grows, not reserved for its longest possible end, so as many sequences run side by side as
really fit. When the pool runs dry, the last in line give their pages back: prefilled groups that wait for a seat
first, then the last of the running. Nothing that was drawn is lost: a preempted sequence comes back as a group of its
own whose prompt is all its tokens so far, is prefilled again, and goes on where it stopped.

In a conversation a sequence whose turn has ended leaves its seat and keeps its pages, until it can go on:

    running --park: its environment has the word--> parked --answered--> ready --resume--> running
                                                       '--leave: the conversation is over--> done

Pages of parked and ready sequences are taken back before those of running ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_lightning.rollout.kv_pool import PagePool
from trace_lightning.types import Prompt, Turn


@dataclass(eq=False)
class Group:
    """A prompt and the samples still to be drawn from it; or, with `resumes`, a preempted sequence."""

    prompt: Prompt
    index: int
    num_samples: int
    audited_samples: int  # full codes are recorded for so many of its samples, and for its prompt if any
    resumes: Sequence | None = None
    pages: list[int] = field(default_factory=list)
    started: int = 0
    first_logits: Tensor | None = None  # [V], after the last token
    rows: list[Tensor] = field(default_factory=list)  # guidance rows of the prefilled tokens

    @property
    def token_ids(self) -> list[int]:
        """What is prefilled: the prompt, and what a preempted sequence had drawn."""
        return self.prompt.token_ids + (self.resumes.token_ids if self.resumes else [])

    @property
    def audited(self) -> bool:
        return self.audited_samples > 0

    @property
    def num_waiting(self) -> int:
        return self.num_samples - self.started


@dataclass(eq=False)
class Sequence:
    """One completion in the making. `pages` covers prompt and completion; the first ones may be shared.

    `num_drawn` is kept up by the generation loop. What was drawn lies on the device; `token_ids`, `logprobs` and
    `support` or `topk` (ids and log-probs) are filled when the sequence or its turn ends, or it is preempted. In a
    conversation they and `num_drawn` count the environment's tokens as well.
    """

    group: Group
    sample: int
    pages: list[int]
    num_drawn: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: Tensor | None = None
    topk: tuple[Tensor, Tensor] | None = None
    rows: list[Tensor] = field(default_factory=list)
    was_preempted: bool = False
    prefilled: int = 0  # tokens it began with: the prompt, and what it had drawn before a preemption
    first_logits: Tensor | None = None  # [V], what its next token is drawn from, until it is
    finish_reason: str = ""
    turns: list[Turn] = field(default_factory=list)  # that have ended
    error: str = ""  # of its environment

    @property
    def number(self) -> int:
        """Of the sequence in its rollout, sample by sample, prompt by prompt."""
        return self.group.index * self.group.num_samples + self.sample

    @property
    def turn_start(self) -> int:
        """Index of the first token of the turn that is being drawn."""
        return self.turns[-1].end if self.turns else 0

    @property
    def prompt_length(self) -> int:
        return len(self.group.prompt.token_ids)

    @property
    def position(self) -> int:
        """Position of its last token, which is fed next."""
        return self.prompt_length + self.num_drawn - 1

    @property
    def audited(self) -> bool:
        return self.sample < self.group.audited_samples


class Scheduler:
    """Admits, starts, grows and finishes sequences under the page budget."""

    def __init__(self, groups: list[Group], pool: PagePool, *, max_num_seqs: int, max_new_tokens: int) -> None:
        self.pool, self.max_num_seqs, self.max_new_tokens = pool, max_num_seqs, max_new_tokens
        self.waiting, self.open = deque(groups), deque[Group]()
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.ready = deque[Sequence]()
        self.before_eviction: Callable[[Sequence], None] = lambda sequence: None  # of a parked one
        self.num_preempted = 0
        for group in groups:
            self._check_fits(len(group.prompt.token_ids))

    def _check_fits(self, prompt_length: int) -> None:
        # Beside its own pages, a lone sequence needs the shared prompt's last page, of which it holds a copy.
        needed = self.pool.pages_for(prompt_length + self.max_new_tokens - 1) + 1
        if needed > self.pool.num_pages:
            fits = max(0, (self.pool.num_pages - 1) * self.pool.page_size)
            raise ValueError(
                f"one sequence of {prompt_length} prompt and {self.max_new_tokens} new tokens does not fit the KV "
                f"cache, which holds {fits} tokens. Raise the engine's memory_fraction or kv_cache_tokens, or lower "
                "max_new_tokens."
            )

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.open or self.running or self.parked or self.ready)

    def admit(self) -> list[Group]:
        """Groups to prefill now, their pages taken.

        A page per running and per coming sequence is left free: each of them will soon ask for one.
        """
        admitted: list[Group] = []
        taken = len(self.running) + len(self.ready) + sum(group.num_waiting for group in self.open)
        seats, spare = self.max_num_seqs - taken, self.pool.num_free - taken
        while self.waiting and seats > 0 and not self.ready:  # those that are under way have the next free pages
            group = self.waiting[0]
            needed = self.pool.pages_for(len(group.token_ids))
            alone = not (self.running or self.open)
            while alone and needed + 1 > self.pool.num_free and self._holding:  # a slow environment keeps nobody out
                self._evict_parked()
            if needed > self.pool.num_free or (needed + min(seats, group.num_waiting) > spare and not alone):
                break
            self.waiting.popleft()
            group.pages = self.pool.allocate(needed)
            seats -= group.num_waiting
            spare -= needed + group.num_waiting
            self.open.append(group)
            admitted.append(group)
        return admitted

    def start(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Start as many samples of prefilled groups as fit; returns them and the (source, target) pages to copy."""
        started: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        while self.open and len(self.running) < self.max_num_seqs:
            group = self.open[0]
            full, partial = divmod(len(group.token_ids), self.pool.page_size)
            if partial and not self.pool.num_free:
                break
            pages = group.pages[:full]
            self.pool.share(pages)
            if partial:
                pages += self.pool.allocate(1)
                copies.append((group.pages[full], pages[full]))
            sequence = group.resumes or Sequence(group, group.started, [])
            sequence.pages, sequence.rows, sequence.first_logits = pages, list(group.rows), group.first_logits
            sequence.prefilled = len(group.token_ids)
            group.started += 1
            started.append(sequence)
            self.running.append(sequence)
            if group.started == group.num_samples:
                self.open.popleft()
                # One of its pages may be the source of a copy that has yet to run, and be handed out again as the
                # target of another: `copy_pages` reads all sources before it writes.
                self.pool.release(group.pages)
        return started, copies

    def grow(self, steps: int) -> list[Sequence]:
        """Give every running sequence the pages of its next `steps` tokens; returns those preempted for it.

        A preempted sequence has lost its pages and its place; `requeue` takes it up again once its tokens are known.
        """
        preempted: list[Sequence] = []
        for sequence in list(self.running):
            if sequence in preempted:
                continue
            missing = self._missing_pages(sequence, steps)
            while missing > self.pool.num_free and sequence not in preempted:
                preempted += self._reclaim()
            if sequence not in preempted and missing > 0:
                sequence.pages += self.pool.allocate(missing)
        return preempted

    def _missing_pages(self, sequence: Sequence, steps: int) -> int:
        # The last drawn token is never fed, so it needs no place.
        end = min(sequence.position + steps, sequence.prompt_length + self.max_new_tokens - 1)
        return self.pool.pages_for(end) - len(sequence.pages)

    def _reclaim(self) -> list[Sequence]:
        """Take back the pages of the last in line; returns it if it was running.

        That is an open group, else a sequence that does not run, else the last running one.
        """
        if self.open:
            group = self.open.pop()
            self.pool.release(group.pages)
            group.pages, group.rows, group.first_logits = [], [], None
            self.waiting.appendleft(group)
            return []
        if self._holding:
            self._evict_parked()
            return []
        if self.ready:
            sequence = self.ready.pop()
            self._evict(sequence)
            self.requeue([sequence])
            return []
        assert len(self.running) > 1, "a sequence that fits alone needs nobody's pages"
        sequence = self.running.pop()
        self.pool.release(sequence.pages)
        sequence.pages, sequence.was_preempted = [], True
        self.num_preempted += 1
        return [sequence]

    @property
    def _holding(self) -> list[Sequence]:
        return [sequence for sequence in self.parked if sequence.pages]

    def _evict_parked(self) -> None:
        sequence = self._holding[-1]
        self.before_eviction(sequence)
        self._evict(sequence)

    def _evict(self, sequence: Sequence) -> None:
        """Take back the pages of a sequence that does not run; if it goes on, all its tokens are prefilled again."""
        self.pool.release(sequence.pages)
        sequence.pages, sequence.was_preempted = [], True
        self.num_preempted += 1

    def park(self, sequences: list[Sequence]) -> None:
        """The turn of these running sequences is over; their `token_ids` are filled in."""
        self.running = [sequence for sequence in self.running if sequence not in sequences]
        self.parked += sequences

    def answered(self, sequence: Sequence) -> None:
        """A parked sequence has heard its environment, whose tokens it holds already, and wants to go on."""
        self.parked.remove(sequence)
        if sequence.pages:
            self.ready.append(sequence)
        else:
            self.requeue([sequence])

    def leave(self, sequence: Sequence) -> None:
        """The conversation of a parked sequence is over."""
        self.parked.remove(sequence)
        self.pool.release(sequence.pages)

    def resume(self) -> list[Sequence]:
        """Seat ready sequences, with pages for all their tokens; those from the last drawn one on are not yet fed."""
        resumed: list[Sequence] = []
        while self.ready and len(self.running) < self.max_num_seqs:
            sequence = self.ready.popleft()
            missing = self.pool.pages_for(sequence.position + 1) - len(sequence.pages)
            while missing > self.pool.num_free and not self.running and (self.open or self._holding or self.ready):
                self._reclaim()
            if missing > self.pool.num_free:
                self.ready.appendleft(sequence)
                break
            sequence.pages += self.pool.allocate(max(0, missing))
            self.running.append(sequence)
            resumed.append(sequence)
        return resumed

    def requeue(self, sequences: list[Sequence]) -> None:
        """Put preempted sequences, their `token_ids` filled in, before all others that wait."""
        for sequence in sequences:
            origin = sequence.group
            group = Group(origin.prompt, origin.index, 1, int(sequence.audited), resumes=sequence)
            self.waiting.appendleft(group)

    def retire(self) -> list[Sequence]:
        """Take finished sequences out of the batch and return their pages."""
        done = [sequence for sequence in self.running if sequence.finish_reason]
        self.running = [sequence for sequence in self.running if not sequence.finish_reason]
        for sequence in done:
            self.pool.release(sequence.pages)
        return done


def rows_of(sequence: Sequence) -> Tensor | None:
    """Guidance rows of all tokens a sequence was fed, or None when nothing is recorded."""
    return torch.cat([row.reshape(-1) for row in sequence.rows]) if sequence.rows else None
