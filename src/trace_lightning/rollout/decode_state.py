"""What a decode step reads and writes, at fixed addresses: one row per running sequence, all of it on the device.

The host looks at it every few steps only. Between two looks a sequence that has finished keeps its row as an empty
seat: it is fed nothing, writes no K and V, and its counters stand still.

    rows 0 ... n-1 are the running sequences, in any order; `move` keeps them dense
    per row   token, position, counters of the sampler, tokens drawn, limit, status
    tables    page_table [R, W]   drawn tokens [R, T], their log-probs [R, T], their support [R, T, k] or none,
              the k most likely tokens and their log-probs [R, T, k] or none
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trace_lightning.rollout.sampler import Sampled

RUNNING, STOP, LENGTH, EMPTY = 0, 1, 2, 3  # status of a row


@dataclass(frozen=True)
class StateShape:
    """Capacity: rows, page-table width, tokens a completion may have, support ids or most likely tokens per token."""

    rows: int
    table_width: int
    max_new_tokens: int
    support: int
    topk: int = 0

    def holds(self, other: StateShape) -> bool:
        """Whether a state of this shape can serve a call that asks for `other`."""
        return (
            self.rows >= other.rows
            and self.table_width >= other.table_width
            and self.max_new_tokens >= other.max_new_tokens
            and self.support == other.support
            and self.topk == other.topk
        )


class DecodeState:
    """The rows; see the top of this file."""

    def __init__(self, shape: StateShape, vocab_size: int, device: torch.device) -> None:
        self.shape, self.device = shape, device
        rows, longest = shape.rows, shape.max_new_tokens

        def integers(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.token, self.position, self.uid, self.sample = (integers(rows) for _ in range(4))
        self.count, self.limit = integers(rows), integers(rows)
        self.status = integers(rows).fill_(EMPTY)
        self.page_table = integers(rows, shape.table_width, dtype=torch.int32)
        self.tokens = integers(rows, longest, dtype=torch.int32)
        self.logprobs = torch.zeros(rows, longest, device=device)
        self.support = integers(rows, longest, shape.support, dtype=torch.int32) if shape.support else None
        self.topk_ids = integers(rows, longest, shape.topk, dtype=torch.int32) if shape.topk else None
        self.topk_logprobs = torch.zeros(rows, longest, shape.topk, device=device) if shape.topk else None
        self.seed = integers(1)
        self.stops = torch.zeros(vocab_size, dtype=torch.bool, device=device)

    def capacity(self, page_size: int) -> int:
        """Tokens that a row's page table can address."""
        return self.shape.table_width * page_size

    def reset(self, *, seed: int, stop_ids: set[int]) -> None:
        """Empty all rows and take over what one call of `generate` fixes."""
        self.status.fill_(EMPTY)
        self.position.zero_()
        self.seed.fill_(seed % 2**62)
        self.stops.zero_()
        if stop_ids:
            self.stops[torch.tensor(sorted(stop_ids), device=self.device)] = True

    def slots(self, rows: int, page_size: int) -> Tensor:
        """Slot of the next fed token, int64 [rows]; -1 for rows that are not running."""
        position = self.position[:rows]
        page = self.page_table[:rows].gather(1, (position // page_size).unsqueeze(1)).squeeze(1).long()
        return torch.where(self.status[:rows] == RUNNING, page * page_size + position % page_size, -1)

    def lengths(self, rows: int) -> Tensor:
        """Context of the next fed token, itself included, int32 [rows]; 0 for rows that are not running."""
        return torch.where(self.status[:rows] == RUNNING, self.position[:rows] + 1, 0).int()

    def append(self, first: int, last: int, drawn: Sampled) -> None:
        """Take over one drawn token for rows `first ... last - 1`; rows that are not running stay as they are."""
        rows = slice(first, last)
        running = self.status[rows] == RUNNING
        index = self.count[rows].clamp_max(self.shape.max_new_tokens - 1).unsqueeze(1)
        _put(self.tokens[rows], index, drawn.token_ids.int(), running)
        _put(self.logprobs[rows], index, drawn.logprobs, running)
        if self.support is not None and drawn.support_ids is not None:
            _put_wide(self.support[rows], index, drawn.support_ids.int(), running, pad=-1)
        if self.topk_ids is not None and self.topk_logprobs is not None:
            assert drawn.topk_ids is not None
            assert drawn.topk_logprobs is not None
            _put_wide(self.topk_ids[rows], index, drawn.topk_ids.int(), running, pad=-1)
            _put_wide(self.topk_logprobs[rows], index, drawn.topk_logprobs, running, pad=-torch.inf)
        self.token[rows] = torch.where(running, drawn.token_ids, self.token[rows])
        self.count[rows] += running
        self.position[rows] += running
        full = torch.where(self.count[rows] >= self.limit[rows], LENGTH, RUNNING)
        ended = torch.where(self.stops[drawn.token_ids], STOP, full)
        self.status[rows] = torch.where(running, ended, self.status[rows])

    def restore(
        self,
        rows: list[int],
        tokens: list[list[int]],
        logprobs: list[list[float]],
        support: list[Tensor | None],
        topk: list[tuple[Tensor, Tensor] | None],
    ) -> None:
        """Put back what sequences had drawn before they lost their rows, one entry per row, in one copy per table."""
        index = torch.tensor(rows, device=self.device)

        def put(table: Tensor, parts: list[Tensor]) -> None:
            padded = pad_sequence(parts, batch_first=True).to(self.device, table.dtype)
            table[index, : padded.shape[1]] = padded  # what it writes behind a sequence's end is drawn over

        put(self.tokens, [torch.tensor(part) for part in tokens])
        put(self.logprobs, [torch.tensor(part) for part in logprobs])
        if self.support is not None:
            put(self.support, [part for part in support if part is not None])
        if self.topk_ids is not None and self.topk_logprobs is not None:
            put(self.topk_ids, [part[0] for part in topk if part is not None])
            put(self.topk_logprobs, [part[1] for part in topk if part is not None])

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows; the sources become empty."""
        source, target = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for table in self._tables():
            table[target] = table[source]
        self.status[source] = EMPTY

    def _tables(self) -> list[Tensor]:
        per_row = [self.token, self.position, self.uid, self.sample, self.count, self.limit, self.status]
        recorded = [table for table in (self.support, self.topk_ids, self.topk_logprobs) if table is not None]
        return [*per_row, self.page_table, self.tokens, self.logprobs, *recorded]


def _put(table_RT: Tensor, index_R1: Tensor, values_R: Tensor, where_R: Tensor) -> None:
    old = table_RT.gather(1, index_R1).squeeze(1)
    table_RT.scatter_(1, index_R1, torch.where(where_R, values_R, old).unsqueeze(1))


def _put_wide(table_RTK: Tensor, index_R1: Tensor, values_Rk: Tensor, where_R: Tensor, *, pad: float) -> None:
    width = table_RTK.shape[2]
    wide = index_R1.unsqueeze(-1).expand(-1, -1, width)
    new = torch.nn.functional.pad(values_Rk, (0, width - values_Rk.shape[1]), value=pad).unsqueeze(1)
    table_RTK.scatter_(1, wide, torch.where(where_R[:, None, None], new, table_RTK.gather(1, wide)))
