"""Guidance during one `generate`: which token gets which row, and when its rounding is stored.

    pass of its own (prefill; decode without graphs)   rows announced, kernels write, rows stored
    window of graphed decode steps                     kernels write to fixed rows, the ring is stored after the window
    K and V                                            read back from the pages: after a prompt's prefill, and when a
                                                       sequence ends; what a preempted one had is fed and read again

If only K and V are guided (the recipe for GPUs without FP4 arithmetic), decoding does nothing for the record at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.quantization.guidance import GuidanceRecord, Key
from trace_lightning.quantization.record_views import SiteViews, StepRecorder
from trace_lightning.quantization.recorder import GuidanceRecorder, PackedKV
from trace_lightning.rollout import scheduler
from trace_lightning.rollout.kv_pool import PagedKV

_TOKENS_AT_ONCE = 32_768  # read back together; unpacked, a token of a large model takes a few KB per layer


@dataclass(frozen=True)
class _Span:
    """Tokens `start ... end - 1` of a sequence, in its pages."""

    pages: list[int]
    start: int
    end: int
    audited: bool
    rows: Tensor | None  # their rows, or None where reading back assigns them


class RolloutRecording:
    """Writes the record of one `generate` into `recorder`; `steps` serves graphed decode steps, if there are any."""

    def __init__(self, recorder: GuidanceRecorder, kv: PagedKV, steps: StepRecorder | None) -> None:
        self.recorder, self.kv, self.steps = recorder, kv, steps
        if steps is not None:
            steps.restart()  # a call that was interrupted may have left steps in the ring
        self._host_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def finish(self, policy_version: int) -> GuidanceRecord:
        """The record of everything since the beginning."""
        return self.recorder.finish(policy_version)

    @property
    def seconds(self) -> float:
        """Time spent on storing and reading back; what kernels spend on writing is part of the kernels' time."""
        if not self._events:
            return self._host_seconds
        self._events[-1][1].synchronize()  # not the device, on which the trainer may be at work
        return sum(begin.elapsed_time(end) for begin, end in self._events) * 1e-3

    def begin_prefill(
        self, owners: Sequence[scheduler.Group | scheduler.Sequence], lengths: list[int]
    ) -> SiteViews | None:
        """Announce a prefill pass of `lengths[i]` tokens of owner i, in flat order; where its kernels write."""
        if not self.recorder.rows_when_fed:
            return None
        parts = zip(owners, lengths, strict=True)
        audited = torch.cat([torch.full((n,), owner.audited) for owner, n in parts])
        rows, views = self.recorder.begin(audited, self.kv.device)
        for owner, part in zip(owners, rows.split(lengths), strict=True):
            owner.rows.append(part)
        return views

    def begin_step(self, running: Sequence[scheduler.Sequence]) -> SiteViews | None:
        """Announce one decode step without a graph."""
        if not self.recorder.rows_when_fed:
            return None
        rows, views = self.recorder.begin(_audited(running), self.kv.device)
        for sequence, row in zip(running, rows, strict=True):
            sequence.rows.append(row.reshape(1))
        return views

    def end_pass(self, views: SiteViews | None) -> None:
        """Store the pass that was announced last."""
        if views is not None:
            with self._timed():
                self.recorder.end()

    def end_window(self, running: Sequence[scheduler.Sequence], fed: list[int], window: int) -> None:
        """Store a window of graphed steps; `fed[i]` of them fed the sequence in row i, the first ones."""
        if self.steps is None:
            return
        with self._timed():
            rows = self.recorder.add_steps(self.steps, window, _audited(running))
        for i, (sequence, count) in enumerate(zip(running, fed, strict=True)):
            sequence.rows.append(rows[:count, i])

    def read_prompts(self, groups: list[scheduler.Group]) -> None:
        """Read back K and V of prefilled groups."""
        spans = [_Span(g.pages, 0, len(g.token_ids), g.audited, torch.cat(g.rows) if g.rows else None) for g in groups]
        for group, rows in zip(groups, self._read(spans), strict=True):
            group.rows = [rows]

    def read_sequences(self, sequences: Sequence[scheduler.Sequence]) -> None:
        """Read back K and V of what sequences were fed since they began, before their pages are given away."""
        spans = []
        for sequence in sequences:
            end = sequence.prompt_length + sequence.num_drawn - 1  # the last drawn token was never fed
            own = torch.cat(sequence.rows[1:]) if self.recorder.rows_when_fed and sequence.rows[1:] else None
            spans.append(_Span(sequence.pages, sequence.prefilled, end, sequence.audited, own))
        for sequence, rows in zip(sequences, self._read(spans), strict=True):
            sequence.rows = [sequence.rows[0], rows]

    def _read(self, spans: list[_Span]) -> list[Tensor]:
        """Rows of each span; K and V of all of them are stored."""
        lengths = [span.end - span.start for span in spans]
        empty = torch.zeros(0, dtype=torch.int64)
        known = [empty if n == 0 else span.rows for n, span in zip(lengths, spans, strict=True)]
        if not self.recorder.kv_sites or not sum(lengths):
            return [empty if rows is None else rows for rows in known]
        if not self.recorder.rows_when_fed:
            parts = zip(lengths, spans, strict=True)
            audited = torch.cat([torch.full((n,), span.audited) for n, span in parts])
            known = list(self.recorder.number(audited).split(lengths))
        rows = torch.cat([part for part in known if part is not None])
        slots = torch.cat([self._slots(span) for span in spans])
        with self._timed():
            for first in range(0, len(rows), _TOKENS_AT_ONCE):
                part = slice(first, first + _TOKENS_AT_ONCE)
                self._store(rows[part], slots[part].to(self.kv.device))
        return [part for part in known if part is not None]

    def _slots(self, span: _Span) -> Tensor:
        position = torch.arange(span.start, span.end)
        size = self.kv.page_size
        return torch.tensor(span.pages)[position // size] * size + position % size

    def _store(self, rows: Tensor, slots: Tensor) -> None:
        def read(key: Key) -> PackedKV:
            pages = self.kv.layers[key[0]][0 if key[1] == "k" else 1]
            return PackedKV(*pages.packed(slots), pages.outer)

        self.recorder.add_kv(rows, read, self.kv.device)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if self.kv.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            begin_seconds = time.perf_counter()
            yield
            self._host_seconds += time.perf_counter() - begin_seconds


def _audited(running: Sequence[scheduler.Sequence]) -> Tensor:
    return torch.tensor([sequence.audited for sequence in running])
