"""The record of the rollout's rounding: how it is written while decoding, stored, and read by the trainer.

The engine feeds tokens in whatever order its scheduler likes. Every token it feeds gets a *row*; a site's table has
one entry per row; and each completion carries the rows of its tokens. A group's prompt is fed once, so its samples
share those rows. Micro-batches, padding and gradient checkpointing only ever address (layer, site, row): nothing is
consumed in order.

    table of one (layer, site), R rows:
      outer   FP32  [R]            one per token; for k and v: [H], one per KV head, the same for all rows
      scale   uint8 [R, (H,) n]    whole block scales; or, with scales=parity, ceil(n / 8) packed bits
      codes   uint8 [R, (H,) m]    mode parity: ceil(Kp / 8) packed parity bits; mode full: Kp / 2 packed codes
      audit   uint8 [A, (H,) Kp/2] full codes of A audited rows, so that the mismatch can be measured

What was left out: asynchronous copies to pinned memory and reading K/V back from the pages; both change cost, not
content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_kernels import Quantized, pack_bits, pack_codes
from trace_lightning.types import GuidanceConfig

Key = tuple[int, str]  # (layer, site)


@dataclass
class SiteTable:
    """One (layer, site): tensors as drawn at the top of this file."""

    scale: Tensor
    codes: Tensor
    outer: Tensor | None
    audit: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.scale, self.codes, self.outer, self.audit) if t is not None]

    def to(self, device: torch.device) -> SiteTable:
        moved = (None if t is None else t.to(device) for t in (self.scale, self.codes, self.outer, self.audit))
        return SiteTable(*moved)  # type: ignore[arg-type]


@dataclass
class GuidanceRecord:
    """All tables of one rollout. `audit_of_row[r]` is the audit entry of row r, or -1 (int64, on the CPU)."""

    config: GuidanceConfig
    tables: dict[Key, SiteTable]
    audit_of_row: Tensor
    policy_version: int

    @property
    def num_rows(self) -> int:
        return self.audit_of_row.shape[0]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the record per fed token, the audited full codes not counted (they are a measurement)."""
        total = 0
        for (_, site), table in self.tables.items():
            total += table.scale.nbytes + table.codes.nbytes
            if table.outer is not None and site not in ("k", "v"):
                total += table.outer.nbytes
        return total / max(1, self.num_rows)


class GuidanceRecorder:
    """Collects what the quantisers of one engine emit. One forward pass is `begin(...)`, then one `add` per site."""

    def __init__(self, config: GuidanceConfig, keys: set[Key], store_device: torch.device) -> None:
        self.config, self.keys, self.store_device = config, keys, store_device
        self._reset()

    def _reset(self) -> None:
        self._parts: dict[Key, list[SiteTable]] = {key: [] for key in self.keys}
        self._audit_of_row: list[Tensor] = []
        self._audited: Tensor | None = None
        self._num_rows = self._num_audited = 0

    def begin(self, audited_N: Tensor) -> Tensor:
        """Announce a forward pass over N tokens; returns their row numbers (int64 [N], on the CPU).

        Args:
            audited_N: bool [N] on the CPU, which tokens' full codes are kept as well.
        """
        count = audited_N.shape[0]
        rows = torch.arange(self._num_rows, self._num_rows + count)
        entries = torch.full((count,), -1, dtype=torch.int64)
        picked = audited_N.nonzero().squeeze(-1)
        entries[picked] = torch.arange(self._num_audited, self._num_audited + len(picked))
        self._audit_of_row.append(entries)
        self._audited = picked if len(picked) else None
        self._num_rows += count
        self._num_audited += len(picked)
        return rows

    def wants(self, layer: int, site: str) -> bool:
        return (layer, site) in self.keys

    def add(self, layer: int, site: str, q: Quantized) -> None:
        """Record what a quantiser returned for the N tokens announced last: codes [N, (H,) Kp]."""
        assert q.scale is not None
        outer = None if q.outer is None else q.outer.reshape(-1)
        scale = pack_bits(q.scale & 1) if self.config.scales == "parity" else q.scale
        codes = pack_codes(q.codes) if self.config.mode == "full" else pack_bits(q.codes & 1)
        audit = None
        if self._audited is not None:
            audit = pack_codes(q.codes[self._audited.to(q.codes.device)])
        self._parts[layer, site].append(SiteTable(scale, codes, outer, audit).to(self.store_device))

    def finish(self, policy_version: int) -> GuidanceRecord:
        """Join the parts into one record; the recorder is empty afterwards."""
        tables = {}
        for (layer, site), parts in self._parts.items():
            outer = [p.outer for p in parts if p.outer is not None]
            audits = [p.audit for p in parts if p.audit is not None]
            per_head = site in ("k", "v")
            tables[layer, site] = SiteTable(
                scale=torch.cat([p.scale for p in parts]),
                codes=torch.cat([p.codes for p in parts]),
                outer=None if not outer else (outer[0] if per_head else torch.cat(outer)),
                audit=torch.cat(audits) if audits else None,
            )
        record = GuidanceRecord(self.config, tables, torch.cat(self._audit_of_row), policy_version)
        self._reset()
        return record


@dataclass
class MismatchCounts:
    """Sums over audited elements, kept on the device: elements, mismatches before, after, and off by one code."""

    elements: int = 0
    sums: Tensor | None = None  # FP64 [3]: before, after, after-by-one-code

    def add(self, before: Tensor, after: Tensor, off_by_one: Tensor, elements: int) -> None:
        new = torch.stack((before, after, off_by_one)).double()
        self.sums = new if self.sums is None else self.sums + new
        self.elements += elements

    def merge(self, other: MismatchCounts) -> None:
        """Add the counts of another micro-batch."""
        if other.sums is not None:
            self.sums = other.sums if self.sums is None else self.sums + other.sums
            self.elements += other.elements

    def compute(self) -> dict[str, float]:
        """`before`: the trainer's own nearest rounding on its own scale, at the same inputs; `after`: as used."""
        if self.sums is None:
            return {}
        before, after, off_by_one = (self.sums / self.elements).tolist()
        return {"before": before, "after": after, "after_off_by_one": off_by_one}


@dataclass
class GuidanceRows:
    """Guidance of one micro-batch of N = B * T flat tokens: which tokens are guided, and by which rows.

    Built once per micro-batch on the CPU, so the forward pass gathers without a host sync.
    """

    record: GuidanceRecord
    guided_index: Tensor  # int64 [G], flat positions of guided tokens
    rows: Tensor  # int64 [G], their rows
    unguided_index: Tensor  # int64 [N - G], padding and unrecorded tokens: they round to nearest
    audit_index: Tensor  # int64 [A], which of the G are audited
    audit_entries: Tensor  # int64 [A], their audit entries
    mismatch: MismatchCounts = field(default_factory=MismatchCounts)

    @classmethod
    def from_rows(cls, record: GuidanceRecord, rows_BT: Tensor, device: torch.device) -> GuidanceRows:
        """Build from the row numbers of a padded micro-batch (int64 [B, T] on the CPU, -1 where there is no row).

        Raises:
            ValueError: if a row lies outside the record: batch and record belong to different rollouts.
        """
        flat = rows_BT.reshape(-1)
        if flat.numel() and int(flat.max()) >= record.num_rows:
            raise ValueError(
                f"the batch refers to guidance row {int(flat.max())}, but the record of policy version "
                f"{record.policy_version} has {record.num_rows} rows: they come from different rollouts"
            )
        guided = (flat >= 0).nonzero().squeeze(-1)
        rows = flat[guided]
        entries = record.audit_of_row[rows]
        audited = (entries >= 0).nonzero().squeeze(-1)
        unguided = (flat < 0).nonzero().squeeze(-1)
        guided, rows, unguided, audited, entries = (
            part.to(device) for part in (guided, rows, unguided, audited, entries[audited])
        )
        return cls(record, guided, rows, unguided, audited, entries)

    def table(self, layer: int, site: str) -> SiteTable | None:
        return self.record.tables.get((layer, site))
