"""What the engine keeps in memory from one `generate` to the next: storage at fixed addresses, and graphs over it.

    kv         pages of K and V: what a call needs, bounded by a share of what a GPU has free
    state      the rows of the sequences that decode
    steps      the rows into which graphed decode steps write their rounding, once a call is recorded
    prefixes   which rows share a prompt, where sharing pays
    graphs     decode steps
    sync_graph      the weight sync, which renews the outer scales in `kv`
    staged_sync     the same of weights that lie elsewhere each time (staged_sync.py), without these scales

Each is kept while it is large enough. A graph reads and writes at the addresses it was captured with, so whatever is
made anew takes with it the graphs that refer to it; the next call captures them again. Memory is freed first and
allocated then, or both would have to fit.
"""

from __future__ import annotations

import torch

from trace_lightning.quantization.record_budget import free_gpu_memory
from trace_lightning.quantization.record_views import StepRecorder
from trace_lightning.rollout.decode_state import DecodeState, StateShape
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.graphs import GraphCache, row_bucket
from trace_lightning.rollout.kv_pool import PagedKV, PagePool
from trace_lightning.rollout.prefixes import MIN_SHARED_TOKENS, PrefixTable
from trace_lightning.rollout.staged_sync import StagedSync
from trace_lightning.types import Prompt, SamplingParams

_MAX_DISTRIBUTIONS = 4  # of training, evaluation, and two to spare
_WORTH_KEEPING = 0.875  # of the cache that memory allows: a little more is not worth new graphs


class Workspace:
    """Storage for calls of up to `max_num_seqs` sequences side by side; arguments as for `LocalEngine`."""

    def __init__(
        self, *, max_num_seqs: int, page_size: int, kv_cache_tokens: int | None, memory_fraction: float
    ) -> None:
        self.max_num_seqs, self.page_size = max_num_seqs, page_size
        self.kv_cache_tokens, self.memory_fraction = kv_cache_tokens, memory_fraction
        self.graphs, self.sync_graph, self.staged_sync = GraphCache(), GraphCache(), StagedSync()
        self._distributions: set[tuple[float, ...]] = set()  # that graphs may have been captured for
        self.release()

    def anew(self) -> Workspace:
        """Another one for the same calls, with nothing in it."""
        return Workspace(
            max_num_seqs=self.max_num_seqs,
            page_size=self.page_size,
            kv_cache_tokens=self.kv_cache_tokens,
            memory_fraction=self.memory_fraction,
        )

    def setup(self, device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
        """Learn where memory is taken, and for how many ids of the model."""
        self.device, self.dtype, self.vocab_size = device, dtype, vocab_size

    def release(self) -> None:
        """Give back all memory."""
        self.graphs.clear()
        self.sync_graph.clear()
        self.staged_sync.clear()
        self.kv: PagedKV | None = None
        self.state: DecodeState | None = None
        self.steps: StepRecorder | None = None
        self.prefixes: PrefixTable | None = None

    def forget_steps(self) -> None:
        """Other sites are recorded from now on, in rows of another width."""
        self.steps = None
        self.graphs.clear()

    def renew_outer(self, decoder: Decoder) -> None:
        """Bring the outer scales of the cache, if there is one, up to the decoder's weights."""
        if self.kv is not None:
            for layer in range(len(self.kv.layers)):
                self.kv.set_outer(layer, *decoder.kv_outer(layer))

    def reserve_cache(
        self, decoder: Decoder, prompts: list[Prompt], params: SamplingParams, num_samples: int
    ) -> PagePool:
        """Pages that let `max_num_seqs` sequences of this call run.

        The storage is kept from call to call while large enough. The page numbers start afresh, so a call that was
        interrupted takes no pages with it.
        """
        longest = max(len(prompt.token_ids) for prompt in prompts) + params.max_new_tokens
        side_by_side = min(len(prompts) * num_samples, self.max_num_seqs)
        wanted = self.kv_cache_tokens or (side_by_side + min(len(prompts), side_by_side)) * (longest + self.page_size)
        held = 0 if self.kv is None else self.kv.num_pages * self.page_size
        if held and (held >= wanted or self.kv_cache_tokens):
            return PagePool(held // self.page_size, self.page_size)
        possible = None if self.kv_cache_tokens else self._possible_tokens(decoder, held)
        if possible is not None and possible < wanted:
            if held and held >= possible * _WORTH_KEEPING:
                return PagePool(held // self.page_size, self.page_size)
            wanted = possible
        if held:
            self.kv = None  # free the smaller one first
            self.graphs.clear()
            self.sync_graph.clear()  # it writes to the outer scales of before
        self.kv = self._new_kv(decoder, max(wanted, self.page_size))
        self.renew_outer(decoder)
        return PagePool(self.kv.num_pages, self.page_size)

    def _new_kv(self, decoder: Decoder, num_tokens: int) -> PagedKV:
        return PagedKV(
            decoder.kv_formats,
            num_pages=-(-num_tokens // self.page_size),
            page_size=self.page_size,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _possible_tokens(self, decoder: Decoder, held: int) -> int | None:
        """Tokens of a cache that takes `memory_fraction` of what a GPU has free, its present `held` ones included."""
        if self.device.type != "cuda":
            return None
        kv = self.kv if self.kv is not None else self._new_kv(decoder, self.page_size)
        per_token = kv.nbytes / (kv.num_pages * self.page_size)
        free = free_gpu_memory(self.device) + held * per_token
        return int(free * self.memory_fraction / per_token)

    def reserve_state(self, prompts: list[Prompt], params: SamplingParams, num_samples: int) -> DecodeState:
        """Rows for the sequences of this call; kept from call to call while large enough."""
        longest = max(len(prompt.token_ids) for prompt in prompts) + params.max_new_tokens
        support = params.record_support if params.truncated else 0
        rows = row_bucket(min(len(prompts) * num_samples, self.max_num_seqs))
        shape = StateShape(rows, -(-longest // self.page_size), params.max_new_tokens, support, params.record_logprobs)
        if self.state is None or not self.state.shape.holds(shape):
            self.graphs.clear()
            self.state = self.steps = None
            self.state = DecodeState(shape, self.vocab_size, self.device)
        return self.state

    def reserve_prefixes(self, prompts: list[Prompt], num_samples: int, rows: int) -> PrefixTable | None:
        """A table of shared prompts, where sharing them in the decode kernel pays."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if num_samples == 1 or longest < MIN_SHARED_TOKENS or self.device.type != "cuda":
            return None
        key = (rows, num_samples)
        if self.prefixes is None or self.prefixes.group_rows.shape != key:
            self.graphs.clear()
            self.prefixes = PrefixTable(*key, self.page_size, self.device)
        self.prefixes.dirty = True
        return self.prefixes

    def bound_graphs(self, params: SamplingParams) -> None:
        """Forget all graphs when they serve too many distributions: each of these has graphs of its own."""
        if params.distribution not in self._distributions and len(self._distributions) == _MAX_DISTRIBUTIONS:
            self.graphs.clear()  # a temperature that changes from rollout to rollout would fill the memory with them
            self._distributions.clear()
        self._distributions.add(params.distribution)
