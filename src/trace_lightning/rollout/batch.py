"""One forward pass of the engine: N flat tokens, where their K and V go, and the attention they take part in.

Tokens are flat everywhere but in attention, so no linear ever runs over padding. The two kinds of pass differ in
`attend` alone:

    DecodeBatch    one token of each of B sequences; reads the pages where they lie (decode kernel)
    PrefillBatch   runs of tokens ("segments"), each the next part of a prompt; K and V of the whole context are
                   gathered, dequantised, and go through torch's attention, equal shapes side by side

    N fed tokens   B sequences   W pages of the longest sequence   H query heads   K KV heads   D head dim
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from trace_kernels.decode_attention import SharedPrefix, decode_attention, decode_attention_reference, supports
from trace_kernels.kv_pages import KVPages
from trace_kernels.page_gather import gather_pages
from trace_lightning.quantization.record_views import SiteViews

log = logging.getLogger(__name__)
Owner = TypeVar("Owner")  # whose tokens a segment has


@dataclass(kw_only=True)
class ForwardBatch(ABC):
    """What both kinds of pass have: index tensors on the device, and who records the rounding, if anyone."""

    token_ids_N: Tensor  # int64
    positions_N: Tensor  # int64
    slots_N: Tensor  # int64, where K and V are written; negative: nowhere
    recorder: SiteViews | None = None

    @abstractmethod
    def attend(self, q_NHD: Tensor, k: KVPages, v: KVPages, *, scaling: float, window: int | None) -> Tensor:
        """Attention output [N, H, D] in the dtype of `q_NHD`; K and V of the N tokens are in the pages already."""

    @abstractmethod
    def last(self, x_NC: Tensor) -> Tensor:
        """Rows of the tokens whose logits are wanted, in the order of the sequences."""


@dataclass(kw_only=True)
class DecodeBatch(ForwardBatch):
    """One token per sequence; rows with `seq_lens_B` 0 are empty seats."""

    page_table_BW: Tensor  # int32
    seq_lens_B: Tensor  # int32, the fed token included
    max_len: int  # no sequence is longer
    prefix: SharedPrefix | None = None

    def attend(self, q_NHD: Tensor, k: KVPages, v: KVPages, *, scaling: float, window: int | None) -> Tensor:
        if not (q_NHD.is_cuda and _kernel_takes(q_NHD, k)):
            return self._attend_reference(q_NHD, k, v, scaling=scaling, window=window)
        return decode_attention(
            q_NHD,
            k,
            v,
            self.page_table_BW,
            self.seq_lens_B,
            softmax_scale=scaling,
            window=window,
            max_len=self.max_len,
            prefix=None if window else self.prefix,
        )

    def _attend_reference(self, q_NHD: Tensor, k: KVPages, v: KVPages, *, scaling: float, window: int | None) -> Tensor:
        pages = (k.data, k.scale, k.outer, v.data, v.scale, v.outer)
        fmt = "none" if k.fmt is None else k.fmt.name
        index = (self.page_table_BW, self.seq_lens_B, None, None)
        return decode_attention_reference(q_NHD, *pages, *index, fmt, scaling, window or 0, self.max_len, 0, 0)

    def last(self, x_NC: Tensor) -> Tensor:
        return x_NC


def _kernel_takes(q_NHD: Tensor, k: KVPages) -> bool:
    """Whether the decode kernel serves these shapes; if not, says once what runs instead."""
    fmt = "none" if k.fmt is None else k.fmt.name
    reason = supports(q_NHD.shape[2], q_NHD.shape[1] // k.data.shape[1], fmt, k.page_size)
    if reason is None and q_NHD.dtype == torch.float64:
        reason = "FP64"
    if reason is not None:
        _say_once(reason)
    return reason is None


@functools.cache
def _say_once(reason: str) -> None:
    log.warning("decode attention runs as plain torch operators, many times slower than the kernel: %s", reason)


@dataclass(frozen=True)
class Segment:
    """Tokens `start ... start + len(token_ids)` of a sequence whose earlier ones are in `pages` already."""

    token_ids: list[int]
    start: int
    pages: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        """Fed tokens and whole context."""
        return len(self.token_ids), self.start + len(self.token_ids)


def prefill_passes(unfed: Sequence[tuple[Owner, Segment]], most: int) -> Iterator[list[tuple[Owner, Segment]]]:
    """Cut what is to be fed into passes of at most `most` tokens; an owner's parts come in order, one a pass."""
    current: list[tuple[Owner, Segment]] = []
    room = most
    for owner, whole in unfed:
        ids, start = whole.token_ids, 0
        while start < len(ids):
            if room == 0 or (start == 0 and current and len(ids) > room):
                yield current
                current, room = [], most
            part = ids[start : start + room]
            current.append((owner, Segment(part, whole.start + start, whole.pages)))
            start, room = start + len(part), room - len(part)
            if start < len(ids):  # the next part needs this one's K and V
                yield current
                current, room = [], most
    if current:
        yield current


@dataclass(kw_only=True)
class PrefillBatch(ForwardBatch):
    """Segments, sorted by shape; `runs` lists (fed, context, page table [B, W]) of each shape, in flat order."""

    runs: list[tuple[int, int, Tensor]]
    last_index_B: Tensor

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        page_size: int,
        device: torch.device,
        recorder: SiteViews | None = None,
    ) -> PrefillBatch:
        """From segments sorted by `shape`; their flat tokens lie in this order."""
        assert [s.shape for s in segments] == sorted(s.shape for s in segments), "equal shapes must lie side by side"
        positions = [torch.arange(s.start, s.shape[1]) for s in segments]
        slots = [
            torch.tensor(s.pages)[position // page_size] * page_size + position % page_size
            for s, position in zip(segments, positions, strict=True)
        ]
        runs = []
        for (fed, context), members in groupby(segments, key=lambda s: s.shape):
            width = -(-context // page_size)
            table = torch.tensor([s.pages[:width] for s in members], dtype=torch.int32, device=device)
            runs.append((fed, context, table))
        return cls(
            token_ids_N=torch.tensor([token for s in segments for token in s.token_ids], device=device),
            positions_N=torch.cat(positions).to(device),
            slots_N=torch.cat(slots).to(device),
            recorder=recorder,
            runs=runs,
            last_index_B=torch.tensor([len(s.token_ids) for s in segments], device=device).cumsum(0) - 1,
        )

    def attend(self, q_NHD: Tensor, k: KVPages, v: KVPages, *, scaling: float, window: int | None) -> Tensor:
        out_NHD, begin = torch.empty_like(q_NHD), 0
        for fed, context, table in self.runs:
            end = begin + fed * len(table)
            keys, values = (_context(pages, table, context, q_NHD.dtype) for pages in (k, v))
            q = q_NHD[begin:end].unflatten(0, (-1, fed)).transpose(1, 2)
            o = F.scaled_dot_product_attention(
                q, keys, values, scale=scaling, enable_gqa=True, **_causal(fed, context, window, q.device)
            )
            out_NHD[begin:end] = o.transpose(1, 2).flatten(0, 1)
            begin = end
        return out_NHD

    def last(self, x_NC: Tensor) -> Tensor:
        return x_NC[self.last_index_B]


def _causal(fed: int, context: int, window: int | None, device: torch.device) -> dict[str, Any]:
    """The mask argument of torch's attention for the last `fed` of `context` positions."""
    if window is not None and window < context:
        query = torch.arange(context - fed, context, device=device).unsqueeze(1)
        key = torch.arange(context, device=device)
        return {"attn_mask": (key <= query) & (key > query - window)}
    return {"is_causal": True} if fed == context else {"attn_mask": causal_lower_right(fed, context)}


def _context(pages: KVPages, table_BW: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Dequantised K or V of the first `length` positions of each sequence, [B, K, length, D]."""
    lengths = torch.full((len(table_BW),), length, dtype=torch.int32, device=table_BW.device)
    starts = torch.arange(len(table_BW), device=table_BW.device) * length
    x_NKD = gather_pages(pages, table_BW, lengths, starts, total=len(table_BW) * length, dtype=dtype)
    return x_NKD.unflatten(0, (-1, length)).transpose(1, 2)
