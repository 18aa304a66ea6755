"""One call of `generate`: the loop that prefills, starts, decodes and retires until every sample is done."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from trace_lightning.quantization.guidance import GuidanceRecorder
from trace_lightning.quantization.rounding import NearestRounding
from trace_lightning.rollout.base import Generation, Progress
from trace_lightning.rollout.batch import decode_batch, prefill_batch
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.rollout.sampler import sample
from trace_lightning.rollout.scheduler import Group, Scheduler, Sequence
from trace_lightning.types import Completion, SamplingParams


class GenerationRun:
    """State of one `generate`: what is drawn, from which snapshot, and what is recorded on the way."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        params: SamplingParams,
        stop_ids: set[int],
        recorder: GuidanceRecorder | None,
        policy_version: int,
    ) -> None:
        self.decoder, self.kv, self.params, self.stop_ids = decoder, kv, params, stop_ids
        self.recorder, self.rounding = recorder, NearestRounding(recorder)
        self.policy_version = policy_version
        self._page_table: Tensor | None = None
        self._table_of: list[Sequence] = []

    def run(self, scheduler: Scheduler, prefill_tokens: int, progress: Progress | None) -> Generation:
        """Run until the scheduler has no work left; completions come back prompt by prompt."""
        total = sum(group.num_samples for group in scheduler.waiting)
        num_samples = scheduler.waiting[0].num_samples
        done: dict[int, Completion] = {}
        prefill_seconds, begin = 0.0, time.perf_counter()
        while scheduler.has_work:
            before = time.perf_counter()
            while groups := scheduler.admit(prefill_tokens):
                self._prefill(groups)
            started, copies = scheduler.start()
            self.kv.copy_pages(copies)
            if started:
                self._draw(started, torch.stack([_first_logits(s.group) for s in started]))
            prefill_seconds += time.perf_counter() - before
            for sequence in scheduler.retire():
                done[sequence.group.index * num_samples + sequence.sample] = self._completion(sequence)
            assert started or scheduler.running, "work is left, but no sequence can start: pages are missing"
            if scheduler.running:
                self._decode(scheduler.running)
            for sequence in scheduler.retire():
                done[sequence.group.index * num_samples + sequence.sample] = self._completion(sequence)
            if progress is not None:
                progress(len(done), total)
        completions = [done[i] for i in range(total)]
        stats = {
            "seconds": time.perf_counter() - begin,
            "prefill_seconds": prefill_seconds,
            "generated_tokens": float(sum(len(c.token_ids) for c in completions)),
        }
        record = None if self.recorder is None else self.recorder.finish(self.policy_version)
        return Generation(completions=completions, guidance=record, stats=stats)

    def _prefill(self, groups: list[Group]) -> None:
        ids = [group.prompt.token_ids for group in groups]
        if self.recorder is not None:
            audited = torch.tensor([group.audited_samples > 0 for group in groups for _ in group.prompt.token_ids])
            rows = self.recorder.begin(audited).split([len(row) for row in ids])
            for group, part in zip(groups, rows, strict=True):
                group.rows = part
        pages = [group.pages for group in groups]
        batch = prefill_batch(ids, pages, self.kv.page_size, self.kv.device, self.rounding)
        logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
        for group, row in zip(groups, logits, strict=True):
            group.first_logits = row

    def _decode(self, running: list[Sequence]) -> None:
        if self.recorder is not None:
            rows = self.recorder.begin(torch.tensor([sequence.audited for sequence in running]))
            for sequence, row in zip(running, rows, strict=True):
                sequence.rows.append(row)
        last = [sequence.token_ids[-1] for sequence in running]
        positions = [sequence.position for sequence in running]
        batch = decode_batch(last, positions, self._pages_of(running), self.kv.page_size, self.rounding)
        self._draw(running, self.decoder.logits(self.decoder.forward(batch, self.kv)))

    def _pages_of(self, running: list[Sequence]) -> Tensor:
        if self._page_table is None or running != self._table_of:
            longest = max(len(sequence.pages) for sequence in running)
            table = [s.pages + [s.pages[0]] * (longest - len(s.pages)) for s in running]
            self._page_table, self._table_of = torch.tensor(table, device=self.kv.device), list(running)
        return self._page_table

    def _draw(self, sequences: list[Sequence], logits_BV: Tensor) -> None:
        counters = (
            torch.tensor(values, device=logits_BV.device)
            for values in (
                [sequence.group.prompt.uid for sequence in sequences],
                [sequence.sample for sequence in sequences],
                [sequence.position + 1 for sequence in sequences],
            )
        )
        drawn = sample(logits_BV, self.params, *counters)
        support = None if drawn.support_ids is None else drawn.support_ids.cpu()
        pairs = zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True)
        for i, (sequence, (token, logprob)) in enumerate(zip(sequences, pairs, strict=True)):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            if support is not None:
                sequence.support.append(support[i])
            if token in self.stop_ids:
                sequence.finish_reason = "stop"
            elif len(sequence.token_ids) >= self.params.max_new_tokens:
                sequence.finish_reason = "length"

    def _completion(self, sequence: Sequence) -> Completion:
        return Completion(
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
            policy_version=self.policy_version,
            guidance_rows=sequence.all_rows(),
            support_ids=torch.stack(sequence.support) if sequence.support else None,
        )


def _first_logits(group: Group) -> Tensor:
    assert group.first_logits is not None, "a group is opened only after its prefill"
    return group.first_logits
