"""How the record of one `generate` comes about: rows are numbered as tokens are fed, stored, and cut into tables.

    record_layout.py   where each field of a row lies
    record_views.py    where kernels write it: `SiteViews` of one pass, `StepRecorder` for steps in a CUDA graph
    this file          `GuidanceRecorder` collects the rows of everything that is fed, and makes the `GuidanceRecord`
    record_budget.py   whether all of it fits

Activations are stored as they are fed. K and V are read back from the pages, into the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_kernels import pack_bits, parity_bits
from trace_kernels.record_rows import shorten_rows_
from trace_kernels.syndromes import encode
from trace_lightning.quantization.guidance import GuidanceRecord, Key, SiteTable
from trace_lightning.quantization.record_layout import RowLayout, SiteShape, written
from trace_lightning.quantization.record_views import SiteViews, StepRecorder
from trace_lightning.recipe import GuidanceConfig


@dataclass(frozen=True)
class PackedKV:
    """K or V of N tokens as pages hold them: packed codes [N, H, Kp / 2], scale bytes, the outer scale [H, 1]."""

    codes: Tensor
    scale: Tensor
    outer: Tensor | None


def kept_of(scale: Tensor, codes: Tensor, config: GuidanceConfig) -> tuple[Tensor, Tensor]:
    """What a record keeps of whole block scales [R, (H,) n] and packed codes [R, (H,) Kp / 2]."""
    if config.scales == "parity":
        scale = pack_bits(scale & 1)
    if config.mode != "full":
        codes = parity_bits(codes)
    if config.mode == "syndrome":
        codes = encode(codes.flatten(1), 8 * math.prod(codes.shape[1:]))
    return scale, codes


class Rows:
    """A growing matrix of rows, on a device or in pinned host memory, to which copies do not wait."""

    def __init__(self, row_bytes: int, store: torch.device, expected: int) -> None:
        self.row_bytes, self.store, self.expected = row_bytes, store, max(expected, 1)
        self._matrix: Tensor | None = None
        self._used = 0
        self._copied: torch.cuda.Event | None = None  # behind the last copy to pinned memory

    def append(self, data: Tensor) -> None:
        """Copy rows behind the last ones."""
        end = self._used + len(data)
        if self._matrix is None or end > len(self._matrix):
            self._grow(max(end, 2 * self._used, self.expected), pin=data.is_cuda and self.store.type == "cpu")
        assert self._matrix is not None
        self._matrix[self._used : end].copy_(data, non_blocking=True)
        if data.is_cuda and self.store.type == "cpu":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()
        self._used = end

    def _grow(self, capacity: int, *, pin: bool) -> None:
        bigger = torch.empty(capacity, self.row_bytes, dtype=torch.uint8, device=self.store, pin_memory=pin)
        if self._matrix is not None:
            self._wait()
            bigger[: self._used] = self._matrix[: self._used]
        self._matrix = bigger

    def _wait(self) -> None:
        """For copies that are on their way to pinned memory, and for nothing else: a trainer may be at work."""
        if self._copied is not None:
            self._copied.synchronize()

    def finish(self) -> Tensor:
        """All rows."""
        self._wait()
        if self._matrix is None:
            return torch.empty(0, self.row_bytes, dtype=torch.uint8, device=self.store)
        return self._matrix[: self._used]


class GuidanceRecorder:
    """Collects the rows of one `generate`.

    Activations get their rows as they are fed (`begin` for a pass of its own, `add_steps` for a window of decode
    steps), K and V when they are read back (`add_kv`), into the same rows.

    Args:
        config: what is recorded.
        sites: the guided (layer, site) pairs.
        store: `cuda` or `cpu`; rows on the CPU are pinned and copied without waiting.
        expected_rows: how many there will probably be; more cost a copy.
    """

    def __init__(
        self, config: GuidanceConfig, sites: dict[Key, SiteShape], store: torch.device, expected_rows: int = 0
    ) -> None:
        self.config, self.store, self.expected_rows = config, store, expected_rows
        self.sites = {key: site for key, site in sites.items() if site.heads is None}
        self.kv_sites = {key: site for key, site in sites.items() if site.heads is not None}
        self._layout = RowLayout.of_record(self.sites, mode=config.mode, scales=config.scales)
        self._kv_layout = RowLayout.of_record(self.kv_sites, mode=config.mode, scales=config.scales)
        # Kernels write whole scale bytes and parity bits; scales' parity and syndromes are taken when rows are stored.
        self._whole = RowLayout.of_record(self.sites, mode=written(config.mode), scales="whole")
        self._fields: Tensor | None = None  # of both layouts, as `shorten_rows_` takes them
        self._codes, self._kv_codes = RowLayout.of_codes(self.sites), RowLayout.of_codes(self.kv_sites)
        self._reset()

    def _reset(self) -> None:
        self._data = Rows(self._layout.row_bytes, self.store, self.expected_rows)
        self._kv = Rows(self._kv_layout.row_bytes, self.store, self.expected_rows)
        self._kv_rows: list[Tensor] = []
        self._audits: list[Tensor] = []
        self._kv_audits: list[tuple[Tensor, Tensor]] = []
        self._entries = Rows(8, torch.device("cpu"), self.expected_rows)  # per row an int64: its audit entry or -1
        self._kv_outer: dict[Key, Tensor | None] = {}
        self._num_rows = self._num_audited = 0
        self._current: SiteViews | None = None
        self._picked: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes per fed token, audited codes not counted."""
        return self._layout.row_bytes + self._kv_layout.row_bytes

    @property
    def rows_when_fed(self) -> bool:
        """Whether tokens get rows as they are fed; if only K and V are recorded they get them when read back."""
        return bool(self.sites)

    def number(self, audited_N: Tensor) -> Tensor:
        """Row numbers for N tokens (int64 [N], on the CPU); `audited_N` bool, whose full codes are kept as well."""
        count = len(audited_N)
        rows = torch.arange(self._num_rows, self._num_rows + count)
        entries = torch.full((count,), -1, dtype=torch.int64)
        picked = audited_N.nonzero().squeeze(-1)
        entries[picked] = torch.arange(self._num_audited, self._num_audited + len(picked))
        self._entries.append(entries.unsqueeze(1).view(torch.uint8))
        self._num_rows += count
        self._num_audited += len(picked)
        self._picked = picked
        return rows

    def _audit_entries(self) -> Tensor:
        """int64 [rows]."""
        return self._entries.finish().view(torch.int64).squeeze(1)

    def begin(self, audited_N: Tensor, device: torch.device) -> tuple[Tensor, SiteViews]:
        """Announce a pass over N tokens; returns their row numbers and where to write. `end` must follow it."""
        rows = self.number(audited_N)
        codes = None
        if len(self._picked) and self.config.mode != "full":  # type: ignore[arg-type]
            codes = self._codes.empty(len(rows), device)
        data = self._whole.empty(len(rows), device)
        self._current = SiteViews(self.sites, written(self.config.mode), self._whole, self._codes, data, codes)
        return rows, self._current

    def end(self) -> None:
        """Store the pass that `begin` announced."""
        views = self._current
        assert views is not None
        self._current = None
        self._add(views.data, views.codes)

    def add_steps(self, steps: StepRecorder, count: int, audited_B: Tensor) -> Tensor:
        """Store `count` decode steps of the first B rows; returns row numbers [count, B]."""
        rows = self.number(audited_B.repeat(count)).view(count, -1)
        data, codes = steps.take(count, len(audited_B))
        self._add(data.flatten(0, 1), None if codes is None else codes.flatten(0, 1))
        return rows

    def _add(self, data: Tensor, codes: Tensor | None) -> None:
        picked = self._picked
        assert picked is not None
        if len(picked):
            index = picked.to(data.device)
            self._audits.append(self._codes_of(data[index]) if codes is None else codes[index])
        if self.config.scales == "parity" or self.config.mode == "syndrome":
            data = self._shortened(data)
        self._data.append(data)

    def _codes_of(self, data: Tensor) -> Tensor:
        """Full codes out of rows that hold them, arranged as audited rows are."""
        target = self._codes
        codes = target.empty(len(data), data.device)
        for key in self.sites:
            target.view(codes, key, "codes").copy_(self._whole.view(data, key, "codes"))  # type: ignore[union-attr, arg-type]
        return codes

    def _shortened(self, data: Tensor) -> Tensor:
        """Rows as kernels wrote them, as they are kept."""
        kept = self._layout.empty(len(data), data.device)
        if self._fields is None:
            table = []
            for key in self.sites:
                (scale, blocks), (codes, length), (outer, _) = self._whole.fields(key)
                (scale_kept, _), (codes_kept, _), (outer_kept, _) = self._layout.fields(key)
                table.append((scale, blocks, scale_kept, codes, length, codes_kept, outer, outer_kept))
            self._fields = torch.tensor(table, dtype=torch.int32).to(data.device)
        scale_bits, syndrome = self.config.scales == "parity", self.config.mode == "syndrome"
        shorten_rows_(data, kept, self._fields, scale_bits=scale_bits, syndrome=syndrome)
        return kept

    def add_kv(self, rows: Tensor, read: Callable[[Key], PackedKV], device: torch.device) -> None:
        """Store what the pages hold for the tokens `rows`; `read` gives what they hold of one k or v."""
        data = self._kv_layout.empty(len(rows), device)
        entries = self._audit_entries()[rows]
        picked = (entries >= 0).nonzero().squeeze(-1)
        audits = self._kv_codes
        audited = audits.empty(len(picked), device)
        for key in self.kv_sites:
            kv = read(key)
            scale, codes = kept_of(kv.scale, kv.codes, self.config)
            self._kv_layout.view(data, key, "scale").copy_(scale)  # type: ignore[union-attr]
            self._kv_layout.view(data, key, "codes").copy_(codes)  # type: ignore[union-attr]
            self._kv_outer[key] = None if kv.outer is None else kv.outer.reshape(-1).clone()
            if len(picked):
                audits.view(audited, key, "codes").copy_(kv.codes[picked.to(device)])  # type: ignore[union-attr]
        self._kv_rows.append(rows)
        self._kv.append(data)
        if len(picked):
            self._kv_audits.append((entries[picked], audited))

    def finish(self, policy_version: int) -> GuidanceRecord:
        """The record; the recorder is empty afterwards."""
        tables: dict[Key, SiteTable] = {}
        if self.sites:
            audits = torch.cat(self._audits) if self._audits else None
            tables |= self._tables(self.sites, self._layout, self._codes, self._data.finish(), audits)
        if self.kv_sites:
            data = _scattered(torch.cat(self._kv_rows), self._kv.finish(), self._num_rows)
            audits = None
            if self._kv_audits:
                index = torch.cat([entries for entries, _ in self._kv_audits])
                audits = _scattered(index, torch.cat([part for _, part in self._kv_audits]), self._num_audited)
            tables |= self._tables(self.kv_sites, self._kv_layout, self._kv_codes, data, audits)
        audit_of_row = self._audit_entries()
        self._reset()
        return GuidanceRecord(self.config, tables, audit_of_row, policy_version)

    def _tables(
        self,
        sites: dict[Key, SiteShape],
        layout: RowLayout,
        code_layout: RowLayout,
        data: Tensor,
        audits: Tensor | None,
    ) -> dict[Key, SiteTable]:
        tables: dict[Key, SiteTable] = {}
        for key, site in sites.items():
            scale, codes = layout.view(data, key, "scale"), layout.view(data, key, "codes")
            assert scale is not None
            assert codes is not None
            outer = layout.view(data, key, "outer") if site.heads is None else self._kv_outer.get(key)
            audit = None if audits is None else code_layout.view(audits, key, "codes")
            tables[key] = SiteTable(scale=scale, codes=codes, outer=outer, audit=audit)
        return tables


def _scattered(index: Tensor, data: Tensor, count: int) -> Tensor:
    """Rows `data` [n, bytes] put where `index` [n] says, of `count`; others are zero."""
    if len(index) == count and torch.equal(index, torch.arange(count)):
        return data
    whole = data.new_zeros(count, data.shape[1])
    whole[index.to(data.device)] = data
    return whole
