"""One call of `generate`: the loop that prefills, starts, decodes and retires until every sample is done.

    admit      prompts of new groups, in passes of `prefill_tokens`; a long prompt takes several
    start      the first token of each sample, from its group's logits
    decode     `window` steps without looking at what came out; on a GPU, replays of a graph
    retire     read which sequences ended, fetch what they drew, free their pages, close the gaps in the rows

The host waits for the device once per window, to read the status of the rows. In a conversation (conversation.py) a
sequence whose turn has ended is parked with its pages; once its environment has answered, the last drawn token and the
observation are prefilled behind them, in the same passes as new prompts, and it takes a seat again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_lightning.quantization.record_views import SiteViews
from trace_lightning.rollout.base import Generation, Progress
from trace_lightning.rollout.batch import PrefillBatch, Segment, prefill_passes
from trace_lightning.rollout.conversation import Conversations
from trace_lightning.rollout.decode_state import EMPTY, LENGTH, RUNNING, DecodeState
from trace_lightning.rollout.decode_step import decode_step, draw
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.graphs import GraphCache, length_bucket, row_bucket
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.rollout.prefixes import PrefixTable
from trace_lightning.rollout.recording import RolloutRecording
from trace_lightning.rollout.scheduler import Group, Scheduler, Sequence, rows_of
from trace_lightning.types import Completion, SamplingParams

Owner = Group | Sequence  # whose tokens are fed


@dataclass(kw_only=True)
class GenerationRun:
    """State of one `generate`: what is drawn, from which snapshot, and what is recorded on the way."""

    decoder: Decoder
    kv: PagedKV
    state: DecodeState
    scheduler: Scheduler
    params: SamplingParams
    policy_version: int
    prefill_tokens: int
    context_limit: int | None
    recording: RolloutRecording | None = None
    graphs: GraphCache | None = None  # None: every step runs as it is
    window: int = 1  # decode steps between two looks at the status
    prefixes: PrefixTable | None = None
    conversations: Conversations | None = None

    def run(self, progress: Progress | None) -> Generation:
        """Run until the scheduler has no work left; completions come back prompt by prompt."""
        waiting = self.scheduler.waiting
        total = sum(group.num_samples for group in waiting)
        done: dict[int, Completion] = {}
        self.num_steps, self.prefill_seconds, begin = 0, 0.0, time.perf_counter()
        self._unstored = 0  # graphed decode steps whose record waits in the ring
        self.scheduler.before_eviction = self._before_eviction
        if self.conversations is not None:
            self.conversations.begin(self.context_limit)
        while self.scheduler.has_work:
            ended = self._take_answers(wait=False)
            if self._start():
                ended += self._retire()
            if self.scheduler.running:
                self._decode()
                ended += self._retire()
            elif self.scheduler.parked:
                ended += self._take_answers(wait=True)
            for sequence in ended:
                done[sequence.number] = self._completion(sequence)
            if progress is not None:
                progress(len(done), total)
        seconds = time.perf_counter() - begin
        completions = [done[i] for i in range(total)]
        stats = {
            "seconds": seconds,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": seconds - self.prefill_seconds,
            "decode_steps": float(self.num_steps),
            "generated_tokens": float(sum(c.num_drawn for c in completions)),
            "preempted": float(self.scheduler.num_preempted),
        }
        if self.recording is not None:
            stats["guidance_seconds"] = self.recording.seconds
        if self.conversations is not None:
            stats |= self.conversations.stats
        record = None if self.recording is None else self.recording.finish(self.policy_version)
        return Generation(completions=completions, guidance=record, stats=stats)

    def _start(self) -> bool:
        """Prefill what fits and draw the next token of every sample that finds a seat; whether any did."""
        begin = time.perf_counter()
        before = len(self.scheduler.running)
        resumed = self.scheduler.resume()
        groups = self.scheduler.admit()
        self._prefill(groups, resumed)
        started, copies = self.scheduler.start()
        self.kv.copy_pages(copies)
        if self.conversations is not None:
            for sequence in started:
                if not sequence.num_drawn:
                    self.conversations.start(sequence)
        started = resumed + started
        if started:
            self._seat(started, before)
            logits = torch.stack([_first_logits(sequence) for sequence in started])
            draw(self.state, self.params, before, before + len(started), logits)
            for sequence in started:
                sequence.num_drawn, sequence.first_logits = sequence.num_drawn + 1, None
            if self.kv.device.type == "cuda":
                torch.cuda.current_stream(self.kv.device).synchronize()  # not the trainer's, which may be at work
            self.prefill_seconds += time.perf_counter() - begin
        busy = self.scheduler.running or self.scheduler.parked or not self.scheduler.has_work
        assert busy, "work is left, but nothing can start: pages are missing"
        return bool(started)

    def _prefill(self, groups: list[Group], resumed: list[Sequence]) -> None:
        """Feed whole prompts, and what sequences that go on have not been fed of their tokens."""
        unfed: list[tuple[Owner, Segment]] = [(g, Segment(g.token_ids, 0, g.pages)) for g in groups]
        for sequence in resumed:
            start = sequence.turns[-1].start - 1  # the last token drawn before the observation
            ids = sequence.token_ids[start:]
            unfed.append((sequence, Segment(ids, sequence.prompt_length + start, sequence.pages)))
        for passed in prefill_passes(unfed, self.prefill_tokens):
            passed.sort(key=lambda item: item[1].shape)
            segments = [segment for _, segment in passed]
            views = None
            if self.recording is not None:
                views = self.recording.begin_prefill([o for o, _ in passed], [len(s.token_ids) for s in segments])
            batch = PrefillBatch.of(segments, self.kv.page_size, self.kv.device, views)
            logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
            if self.recording is not None:
                self.recording.end_pass(views)
            for (owner, _), row in zip(passed, logits, strict=True):
                owner.first_logits = row
        if self.recording is not None and groups:
            self.recording.read_prompts(groups)

    def _seat(self, started: list[Sequence], first: int) -> None:
        """Fill the rows `first ...` for sequences that begin, or that come back after a preemption."""
        state, device = self.state, self.kv.device
        rows = slice(first, first + len(started))

        def column(values: list[Any]) -> Tensor:
            return torch.tensor(values, device=device)

        state.uid[rows] = column([s.group.prompt.uid for s in started])
        state.sample[rows] = column([s.sample for s in started])
        state.position[rows] = column([s.position for s in started])
        state.count[rows] = column([s.num_drawn for s in started])
        state.limit[rows] = column([self._limit(s) for s in started])
        state.status[rows] = RUNNING
        width = max(len(s.pages) for s in started) or 1
        state.page_table[rows, :width] = column([s.pages + [0] * (width - len(s.pages)) for s in started]).int()
        back = [(row, sequence) for row, sequence in enumerate(started, first) if sequence.token_ids]
        if back:
            fields = ("token_ids", "logprobs", "support", "topk")
            state.restore([row for row, _ in back], *([getattr(s, name) for _, s in back] for name in fields))
        if self.prefixes is not None:
            self.prefixes.dirty = True

    def _limit(self, sequence: Sequence) -> int:
        if self.conversations is not None:
            return min(sequence.turn_start + self.params.max_new_tokens, self.conversations.room(sequence))
        limit = self.params.max_new_tokens
        return limit if self.context_limit is None else min(limit, self.context_limit - sequence.prompt_length)

    def _decode(self) -> None:
        self._grow()
        running = self.scheduler.running
        if not running:
            return
        rows = len(running) if self.graphs is None else row_bucket(len(running))
        rows = min(rows, self.state.shape.rows)
        longest = max(sequence.position for sequence in running) + self.window
        if self.prefixes is not None:
            self.prefixes.update(running)
        shared = 0 if self.prefixes is None else self.prefixes.max_prefix_len
        max_len = (
            longest if self.graphs is None else min(length_bucket(longest), self.state.capacity(self.kv.page_size))
        )
        views = self._views(running)
        key = (rows, max_len, shared, self.params.distribution, views is not None)

        def step() -> None:
            shared_pages = None if self.prefixes is None else self.prefixes.head(rows)
            decode_step(
                *(self.decoder, self.kv, self.state, self.params),
                rows=rows,
                max_len=max_len,
                prefix=shared_pages,
                recorder=views,
            )

        for _ in range(self.window):
            if self.graphs is None:
                step()
            else:
                self.graphs.run(key, step)
        self.num_steps += self.window
        if self.recording is not None and self.graphs is None:
            self.recording.end_pass(views)
        self._unstored = self.window if self.graphs is not None else 0

    def _views(self, running: list[Sequence]) -> SiteViews | None:
        """Where the steps of the coming window write what they round to."""
        if self.recording is None:
            return None
        return self.recording.begin_step(running) if self.graphs is None else self.recording.steps

    def _grow(self) -> None:
        """Pages for the next window; where they run out, the sequences in the last rows give way."""
        scheduler = self.scheduler
        held = [len(sequence.pages) for sequence in scheduler.running]
        before = list(scheduler.running)
        preempted = scheduler.grow(self.window)
        if preempted:
            first = len(scheduler.running)
            assert before[first:] == preempted[::-1]
            self._fetch(preempted, [before.index(sequence) for sequence in preempted])
            self.state.status[first : len(before)] = EMPTY
            scheduler.requeue(preempted)
            if self.prefixes is not None:
                self.prefixes.dirty = True
        new = [
            (row, column, page)
            for row, (sequence, old) in enumerate(zip(scheduler.running, held, strict=False))
            for column, page in enumerate(sequence.pages[old:], old)
        ]
        if new:
            row, column, page = torch.tensor(new, device=self.kv.device).unbind(1)
            self.state.page_table[row, column] = page.int()

    def _retire(self) -> list[Sequence]:
        """Sequences that ended; their rows are closed up."""
        running = list(self.scheduler.running)
        status, count = torch.stack((self.state.status, self.state.count))[:, : len(running)].tolist()
        if self.recording is not None and self._unstored:
            fed = [drawn - sequence.num_drawn for sequence, drawn in zip(running, count, strict=True)]
            self.recording.end_window(running, fed, self._unstored)
        self._unstored = 0
        for sequence, drawn in zip(running, count, strict=True):
            sequence.num_drawn = drawn
        rows = [row for row, code in enumerate(status) if code != RUNNING]
        if not rows:
            return []
        self._fetch([running[row] for row in rows], rows)
        for row in rows:
            self._end_turn(running[row], cut=status[row] == LENGTH)
        self.scheduler.park([running[row] for row in rows if not running[row].finish_reason])
        if self.recording is not None:
            self.recording.read_sequences([running[row] for row in rows if running[row].finish_reason])
        retired = self.scheduler.retire()
        self._close_gaps(running, rows)
        if self.prefixes is not None:
            self.prefixes.dirty = True
        return retired

    def _end_turn(self, sequence: Sequence, *, cut: bool) -> None:
        """A sequence has come to a stop, or to its limit: it is done, unless its environment has the word."""
        if self.conversations is None:
            sequence.finish_reason = "length" if cut else "stop"
        else:
            self.conversations.ask(sequence, cut=cut)

    def _take_answers(self, *, wait: bool) -> list[Sequence]:
        """Let sequences go on whose environments have answered; returns those whose conversation is over."""
        answered = [] if self.conversations is None else self.conversations.answers(wait=wait)
        over = [sequence for sequence in answered if sequence.finish_reason]
        if self.recording is not None:
            self.recording.read_sequences([sequence for sequence in over if sequence.pages])
        for sequence in answered:
            if sequence.finish_reason:
                self.scheduler.leave(sequence)
            else:
                self.scheduler.answered(sequence)
        return over

    def _before_eviction(self, sequence: Sequence) -> None:
        if self.recording is not None:
            self.recording.read_sequences([sequence])

    def _close_gaps(self, running: list[Sequence], done: list[int]) -> None:
        """Move the last rows into the freed ones, and the scheduler's list with them."""
        kept = len(running) - len(done)
        free = [row for row in done if row < kept]
        ended = set(done)
        last = [row for row in range(kept, len(running)) if row not in ended]
        self.state.status[torch.tensor(done, device=self.kv.device)] = EMPTY
        if last:
            self.state.move(last, free)
        order = running[:kept]
        for source, target in zip(last, free, strict=True):
            order[target] = running[source]
        self.scheduler.running = order

    def _fetch(self, sequences: list[Sequence], rows: list[int]) -> None:
        """Copy what the sequences drew from the device."""
        index = torch.tensor(rows, device=self.kv.device)
        longest = max(sequence.num_drawn for sequence in sequences)
        tokens = self.state.tokens[index, :longest].tolist()
        logprobs = self.state.logprobs[index, :longest].tolist()
        support = None if self.state.support is None else self.state.support[index, :longest].cpu().long()
        topk_ids, topk_logprobs = self.state.topk_ids, self.state.topk_logprobs
        if topk_ids is not None and topk_logprobs is not None:
            ids, values = topk_ids[index, :longest].cpu().long(), topk_logprobs[index, :longest].cpu()
            for i, sequence in enumerate(sequences):
                sequence.topk = ids[i, : sequence.num_drawn], values[i, : sequence.num_drawn]
        for i, sequence in enumerate(sequences):
            sequence.token_ids = tokens[i][: sequence.num_drawn]
            sequence.logprobs = logprobs[i][: sequence.num_drawn]
            sequence.support = None if support is None else support[i, : sequence.num_drawn]

    def _completion(self, sequence: Sequence) -> Completion:
        return Completion(
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
            policy_version=self.policy_version,
            turns=sequence.turns,
            error=sequence.error,
            guidance_rows=rows_of(sequence),
            support_ids=sequence.support,
            topk_ids=None if sequence.topk is None else sequence.topk[0],
            topk_logprobs=None if sequence.topk is None else sequence.topk[1],
        )


def _first_logits(sequence: Sequence) -> Tensor:
    """Logits after the tokens a sequence starts from, kept by the group that was prefilled for it."""
    logits = sequence.first_logits
    assert logits is not None, "a sequence starts only after its prefill"
    return logits
