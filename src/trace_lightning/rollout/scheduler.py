"""Which sequences run now: continuous batching over a page pool, with each group's prompt prefilled once.

    waiting groups --admit: prompt pages, prefill once--> open groups --start: own pages--> running --finish--> done

A sequence reserves the pages of its longest possible completion when it starts, so nothing is ever preempted and a
run of `generate` needs no recovery; in exchange fewer sequences run side by side than pages would allow on average.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_lightning.rollout.kv_pool import PagePool
from trace_lightning.types import Prompt


@dataclass(eq=False)
class Group:
    """A prompt and the samples still to be drawn from it."""

    prompt: Prompt
    index: int
    num_samples: int
    audited_samples: int  # full codes are recorded for so many of its samples, and for its prompt if any
    pages: list[int] = field(default_factory=list)
    started: int = 0
    first_logits: Tensor | None = None  # FP32 [V], after the prompt
    rows: Tensor | None = None  # guidance rows of the prompt's tokens


@dataclass(eq=False)
class Sequence:
    """One completion in the making. `pages` covers prompt and completion; the first ones are shared."""

    group: Group
    sample: int
    pages: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    support: list[Tensor] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def position(self) -> int:
        """Position of the last drawn token, which is fed next."""
        return len(self.group.prompt.token_ids) + len(self.token_ids) - 1

    @property
    def audited(self) -> bool:
        return self.sample < self.group.audited_samples

    def all_rows(self) -> Tensor | None:
        if self.group.rows is None:
            return None
        return torch.cat([self.group.rows, *(row.reshape(1) for row in self.rows)])


class Scheduler:
    """Admits, starts and finishes sequences under the page budget."""

    def __init__(self, groups: list[Group], pool: PagePool, *, max_num_seqs: int, max_new_tokens: int) -> None:
        self.pool, self.max_num_seqs, self.max_new_tokens = pool, max_num_seqs, max_new_tokens
        self.waiting, self.open = deque(groups), deque[Group]()
        self.running: list[Sequence] = []
        for group in groups:
            self._check_fits(len(group.prompt.token_ids))

    def _check_fits(self, prompt_length: int) -> None:
        needed = self.pool.pages_for(prompt_length) + self._own_pages(prompt_length)
        if needed > self.pool.num_pages:
            fits = max(0, (self.pool.num_pages - 1) * self.pool.page_size)
            raise ValueError(
                f"one sequence of {prompt_length} prompt and {self.max_new_tokens} new tokens does not fit the KV "
                f"cache, which holds {fits} tokens. Raise the engine's memory_fraction or kv_cache_tokens, or lower "
                "max_new_tokens."
            )

    def _own_pages(self, prompt_length: int) -> int:
        """Pages of one sample beyond the shared full prompt pages. The last drawn token is never fed."""
        total = self.pool.pages_for(prompt_length + self.max_new_tokens - 1)
        return total - prompt_length // self.pool.page_size

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.open or self.running)

    def admit(self, max_tokens: int) -> list[Group]:
        """Groups to prefill now, at most `max_tokens` prompt tokens in all (but at least one group), pages taken."""
        admitted: list[Group] = []
        tokens, pages = 0, self.pool.num_free - sum(self._remaining_pages(group) for group in self.open)
        seats = self.max_num_seqs - len(self.running) - sum(g.num_samples - g.started for g in self.open)
        while self.waiting and seats > 0:
            length = len(self.waiting[0].prompt.token_ids)
            pages -= self.pool.pages_for(length) + self._own_pages(length)
            if pages < 0 or (admitted and tokens + length > max_tokens):
                break
            group = self.waiting.popleft()
            group.pages = self.pool.allocate(self.pool.pages_for(length))
            tokens, seats = tokens + length, seats - group.num_samples
            pages -= (group.num_samples - 1) * self._own_pages(length)
            admitted.append(group)
        self.open.extend(admitted)
        return admitted

    def _remaining_pages(self, group: Group) -> int:
        return (group.num_samples - group.started) * self._own_pages(len(group.prompt.token_ids))

    def start(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Start as many samples of prefilled groups as fit; returns them and the (source, target) pages to copy."""
        started: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        while self.open and len(self.running) < self.max_num_seqs:
            group = self.open[0]
            length = len(group.prompt.token_ids)
            own, full = self._own_pages(length), length // self.pool.page_size
            if own > self.pool.num_free:
                break
            pages = self.pool.allocate(own)
            self.pool.share(group.pages[:full])
            if length % self.pool.page_size and own:
                copies.append((group.pages[full], pages[0]))
            sequence = Sequence(group, group.started, group.pages[:full] + pages)
            group.started += 1
            started.append(sequence)
            self.running.append(sequence)
            if group.started == group.num_samples:
                self.open.popleft()
                # One of its pages may be the source of a copy that has yet to run, and be handed out again as the
                # target of another: `copy_pages` reads all sources before it writes.
                self.pool.release(group.pages)
        return started, copies

    def retire(self) -> list[Sequence]:
        """Take finished sequences out of the batch and return their pages."""
        done = [sequence for sequence in self.running if sequence.finish_reason]
        self.running = [sequence for sequence in self.running if not sequence.finish_reason]
        for sequence in done:
            self.pool.release(sequence.pages)
        return done
