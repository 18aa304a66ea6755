"""One decode step: every running row is fed its last token and draws the next one. All of it on the device.

The step reads nothing back and its shapes do not depend on data, so that it can be captured as a CUDA graph
(graphs.py); the benchmark times this very function.
"""

from __future__ import annotations

from torch import Tensor

from trace_kernels.decode_attention import SharedPrefix
from trace_lightning.quantization.record_views import SiteViews
from trace_lightning.rollout.batch import DecodeBatch
from trace_lightning.rollout.decode_state import DecodeState
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.rollout.sampler import sample
from trace_lightning.types import SamplingParams


def decode_step(
    decoder: Decoder,
    kv: PagedKV,
    state: DecodeState,
    params: SamplingParams,
    *,
    rows: int,
    max_len: int,
    prefix: SharedPrefix | None = None,
    recorder: SiteViews | None = None,
) -> None:
    """Advance the first `rows` rows of `state` by one token.

    Args:
        decoder: the snapshot.
        kv: the cache.
        state: the rows, changed in place.
        params: how tokens are drawn; the seed is the state's.
        rows: rows that take part; those that are not running are empty seats.
        max_len: no row's context is longer, the token that is fed included.
        prefix: prompts that several rows share, read once for all of them.
        recorder: where the rounding of this step is written; for a graph a `StepRecorder`.
    """
    batch = DecodeBatch(
        token_ids_N=state.token[:rows],
        positions_N=state.position[:rows],
        slots_N=state.slots(rows, kv.page_size),
        recorder=recorder,
        page_table_BW=state.page_table[:rows],
        seq_lens_B=state.lengths(rows),
        max_len=max_len,
        prefix=prefix,
    )
    draw(state, params, 0, rows, decoder.logits(decoder.forward(batch, kv)))
    if recorder is not None:
        recorder.end_step()


def draw(state: DecodeState, params: SamplingParams, first: int, last: int, logits_BV: Tensor) -> None:
    """Draw the next token of rows `first ... last - 1` from their logits."""
    rows = slice(first, last)
    counters = (state.uid[rows], state.sample[rows], state.position[rows] + 1)
    state.append(first, last, sample(logits_BV, params, state.seed, *counters))
