"""Sequences in mid-answer: B of them decode at a context of L tokens, without B x L tokens having been prefilled.

The cache is filled with random bytes that are valid codes, scales and values, and the sequences are seated as if the
engine had brought them there: by its own scheduler, in its own state, on pages in shuffled order. From there the
engine's own loop goes on (`GenerationRun`), so that the time of a step includes what the host does between steps.

    cached            context - T tokens, random; of these `shared` by the `samples` of a group
    two windows       warm up: compile, capture the graph
    `steps` steps     timed; the last one attends to `context` tokens                       T = both together
"""

from __future__ import annotations

import random
import statistics

import torch

from trace_kernels.kv_pages import KVPages
from trace_lightning.bench.machine import device_seconds, wall_seconds
from trace_lightning.rollout.decode_state import DecodeState, StateShape
from trace_lightning.rollout.decode_step import decode_step
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.generation import GenerationRun
from trace_lightning.rollout.graphs import GraphCache, length_bucket, row_bucket
from trace_lightning.rollout.kv_pool import PagedKV, PagePool
from trace_lightning.rollout.prefixes import MIN_SHARED_TOKENS, PrefixTable
from trace_lightning.rollout.scheduler import Group, Scheduler, Sequence
from trace_lightning.types import Problem, Prompt, SamplingParams

WARM_WINDOWS = 2
# Scales that keep attention in an ordinary range: E4M3 from 1/16 to 1/2, E8M0 from 1/32 to 1 (codes go up to 6).
_SCALE_BYTES = {"nvfp4": (0x18, 0x31), "mxfp4": (122, 128)}


def fill_randomly(pages: KVPages) -> None:
    """Random values in every place of the pages; none is NaN or infinite."""
    if pages.fmt is None:
        pages.data.normal_()
        return
    pages.data.random_(0, 256)
    if pages.scale is None:
        pages.data.bitwise_and_(0xBF)  # E4M3 below 2
    else:
        pages.scale.random_(*_SCALE_BYTES[pages.fmt.name])


class _ShuffledPool(PagePool):
    """Pages in the order in which a long run leaves them: none."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        random.Random(0).shuffle(self._free)


class _SeatedRun(GenerationRun):
    """The engine's loop, entered when its sequences are under way."""

    def seat(self, sequences: list[Sequence]) -> None:
        self.scheduler.running = list(sequences)
        self.num_steps, self.prefill_seconds = 0, 0.0
        self._seat(sequences, 0)

    def decode_window(self) -> None:
        self._decode()
        ended = self._retire()
        assert not ended, "a sequence of the benchmark ended"


class DecodeWorkload:
    """`batch` sequences of up to `context` tokens that decode in `engine`; the engine has its weights.

    Args:
        engine: after `load_weights`.
        vocab: size of the vocabulary.
        batch: sequences, a multiple of `samples`.
        context: tokens in context at the end.
        steps: steps to be timed; whole windows of the engine.
        shared: tokens of a prompt that the `samples` of a group share; 0: nothing is shared.
        samples: sequences per group.

    Raises:
        ValueError: see `cached_tokens` and `check_groups`.
    """

    def __init__(
        self,
        engine: LocalEngine,
        vocab: int,
        *,
        batch: int,
        context: int,
        steps: int,
        shared: int = 0,
        samples: int = 1,
    ) -> None:
        self.engine, self.device, self.steps, self.context = engine, engine.device, steps, context
        page, pages_each = engine.page_size, -(-context // engine.page_size)
        static = engine.decoder.prepare(pages_each * page)
        self.graphs = GraphCache() if static and engine.cuda_graphs and self.device.type == "cuda" else None
        self.window = 1 if self.graphs is None else engine.decode_window
        cached = cached_tokens(context, steps, self.window)
        check_groups(batch, samples, shared, cached)
        self.mean_context = context - (steps - 1) / 2
        prompt = shared if samples > 1 else cached
        drawn = cached - prompt + 1
        self.params = SamplingParams(max_new_tokens=drawn + context - cached + 1, ignore_eos=True)
        pool = _ShuffledPool(batch * pages_each, page)
        self.kv = self._cache(pool.num_pages)
        shape = StateShape(row_bucket(batch), pages_each, self.params.max_new_tokens, 0)
        self.state = DecodeState(shape, vocab, self.device)
        self.state.reset(seed=0, stop_ids=set())
        self.run = self._run(pool, batch, samples if prompt >= MIN_SHARED_TOKENS else 1)
        self.run.seat(self._sequences(pool, batch, samples, prompt, drawn))
        self.state.token.random_(0, vocab)
        self.rows = batch if self.graphs is None else shape.rows

    def _cache(self, num_pages: int) -> PagedKV:
        decoder = self.engine.decoder
        kv = PagedKV(
            decoder.kv_formats,
            num_pages=num_pages,
            page_size=self.engine.page_size,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=self.engine.dtype,
            device=self.device,
        )
        for layer, both in enumerate(kv.layers):
            kv.set_outer(layer, *decoder.kv_outer(layer))
            for pages in both:
                fill_randomly(pages)
        return kv

    def _run(self, pool: PagePool, batch: int, samples: int) -> _SeatedRun:
        prefixes = None
        if samples > 1 and self.device.type == "cuda":
            prefixes = PrefixTable(self.state.shape.rows, samples, self.engine.page_size, self.device)
        return _SeatedRun(
            decoder=self.engine.decoder,
            kv=self.kv,
            state=self.state,
            scheduler=Scheduler([], pool, max_num_seqs=batch, max_new_tokens=self.params.max_new_tokens),
            params=self.params,
            policy_version=0,
            prefill_tokens=self.engine.prefill_tokens,
            context_limit=None,
            graphs=self.graphs,
            window=self.window,
            prefixes=prefixes,
        )

    def _sequences(self, pool: PagePool, batch: int, samples: int, prompt: int, drawn: int) -> list[Sequence]:
        token_ids, full = [0] * prompt, prompt // pool.page_size
        sequences = []
        for index in range(batch // samples):
            group = Group(Prompt(token_ids=token_ids, problem=Problem(prompt=""), uid=index), index, samples, 0)
            shared = pool.allocate(full)
            for sample in range(samples):
                if sample:
                    pool.share(shared)
                own = pool.allocate(pool.pages_for(prompt + drawn - 1) - full)
                sequences.append(Sequence(group, sample, shared + own, num_drawn=drawn))
        return sequences

    @torch.no_grad()
    def wall_seconds(self) -> float:
        """Seconds per step of the engine's loop, host included. Once only: it brings the sequences to their end.

        The median over the windows, since a graph may have to be captured in one of them.
        """
        for _ in range(WARM_WINDOWS):
            self.run.decode_window()
        self._start = [tensor.clone() for tensor in self._counters()]
        windows = [wall_seconds(self.run.decode_window, self.device) for _ in range(self.steps // self.window)]
        return statistics.median(windows) / self.window

    def _counters(self) -> list[torch.Tensor]:
        state = self.state
        return [state.token, state.position, state.count, state.status]

    def rewind(self) -> None:
        """Back to where the timed steps began; after `wall_seconds`, when all their pages are there."""
        for tensor, start in zip(self._counters(), self._start, strict=True):
            tensor.copy_(start)

    def step(self) -> None:
        """One decode step, as the engine's loop does it; at most `steps` between two calls of `rewind`."""
        rows, state, prefixes = self.rows, self.state, self.run.prefixes
        capacity = state.capacity(self.kv.page_size)
        max_len = self.context if self.graphs is None else min(length_bucket(self.context), capacity)

        def step() -> None:
            prefix = None if prefixes is None else prefixes.head(rows)
            decode_step(self.engine.decoder, self.kv, state, self.params, rows=rows, max_len=max_len, prefix=prefix)

        if self.graphs is None:
            step()
        else:
            self.graphs.run(
                (rows, max_len, 0 if prefixes is None else prefixes.max_prefix_len, self.params.distribution), step
            )

    @torch.no_grad()
    def step_seconds(self) -> list[float]:
        """Seconds that the device works on each of `steps` steps."""
        self.rewind()
        for _ in range(2):  # as it is, and captured
            self.step()
        self.rewind()
        return device_seconds(self.step, self.device, self.steps)


def cached_tokens(context: int, steps: int, window: int) -> int:
    """Tokens that are in the cache before the first step.

    Raises:
        ValueError: if there is none.
    """
    cached = context - steps - WARM_WINDOWS * window
    if cached < 1:
        raise ValueError(
            f"a context of {context} tokens has no room for {steps} timed and {WARM_WINDOWS * window} warm-up steps: "
            "lengthen --context or lower --new_tokens"
        )
    return cached


def check_groups(batch: int, samples: int, shared: int, cached: int) -> None:
    """Refuse groups that do not come out even.

    Raises:
        ValueError: if `samples` does not divide `batch`, or the shared prompt is longer than what is cached.
    """
    if batch % samples:
        raise ValueError(f"{batch} sequences do not make groups of {samples}: --batch must be a multiple of --samples")
    if shared > cached:
        raise ValueError(f"--shared {shared} exceeds the {cached} tokens that are cached when the timed steps begin")
    if shared and samples == 1:
        raise ValueError(f"--shared {shared} needs sequences to share it: give --samples")
