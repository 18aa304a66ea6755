"""The record of the rollout's rounding: how it is written while decoding, stored, and read by the trainer.

The engine feeds tokens in whatever order its scheduler likes. Every token it feeds gets a *row*; a site's table has
one entry per row; and each completion carries the rows of its tokens. A group's prompt is fed once, so its samples
share those rows. Micro-batches, padding and gradient checkpointing only ever address (layer, site, row): nothing is
consumed in order.

    table of one (layer, site), R rows:
      outer   FP32  [R]            one per token; for k and v: [H], one per KV head, the same for all rows
      scale   uint8 [R, (H,) n]    whole block scales; or, with scales=parity, ceil(n / 8) packed bits
      codes   uint8 [R, (H,) m]    mode parity: ceil(Kp / 8) packed parity bits; mode full: Kp / 2 packed codes;
                                   mode syndrome: [R, m], parity checks of the bits of all heads
      audit   uint8 [A, (H,) Kp/2] full codes of A audited rows, so that the mismatch can be measured

How it is written, by kernels and into one matrix of bytes of which these tables are columns: recorder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_kernels.round_values import Guide
from trace_lightning.recipe import GuidanceConfig

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


# Sums over audited rows at one (layer, site). The first five count codes; the rest belong to the tokens whose rollout
# values are known, which they are unless only the parity of the rollout's scales was recorded.
AUDIT_SUMS = (
    "elements",  # codes compared
    "before",  # of these, differ under the trainer's own nearest rounding on its own scales
    "before_off_by_one",  # of these, by exactly one code
    "after",  # differ as used
    "after_off_by_one",
    "tokens",
    "gap_before",  # squared norm of DQ(own nearest rounding, own scales) - DQ(rollout)
    "gap_nearest",  # the same for nearest rounding on the rollout's scales
    "gap_after",  # the same for the values used
    "rollout",  # squared norm of DQ(rollout)
)


@dataclass
class MismatchCounts:
    """`AUDIT_SUMS` of every audited (layer, site), FP64 [10] each, kept on the device: adding them up never waits."""

    sums: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, key: Key, new: Tensor) -> None:
        """Add `AUDIT_SUMS` FP64 [10] of one site; `new` is kept, and not written to."""
        self.sums[key] = self.sums[key] + new if key in self.sums else new

    def merge(self, other: MismatchCounts) -> None:
        """Add the counts of another micro-batch."""
        for key, new in other.sums.items():
            self.add(key, new)

    def stack(self, keys: Sequence[Key], device: torch.device) -> Tensor:
        """FP64 [len(keys), 10], zeros where nothing was audited: ranks add these up."""
        none = torch.zeros(len(AUDIT_SUMS), dtype=torch.float64, device=device)
        return torch.stack([self.sums.get(key, none) for key in keys]) if keys else none.new_zeros(0, len(AUDIT_SUMS))

    def compute(self) -> dict[str, float]:
        """Shares of all audited codes that differ: `before`, `after` (see `AUDIT_SUMS`) and `after_off_by_one`."""
        if not self.sums:
            return {}
        totals = dict(zip(AUDIT_SUMS, torch.stack(list(self.sums.values())).sum(0).tolist(), strict=True))
        return {name: totals[name] / totals["elements"] for name in ("before", "after", "after_off_by_one")}


@dataclass
class GuidanceRows:
    """Guidance of one micro-batch of N = B * T flat tokens: which rows they follow, and which of them are audited.

    Built once per micro-batch on the CPU, so the forward pass never waits for a number from the device. A record on the
    host is gathered to the micro-batch before it moves: there `row` counts the gathered rows.
    """

    record: GuidanceRecord
    row: Tensor  # int64 [N], of the tables as `guide` returns them; -1: padding and unrecorded tokens, nearest rounding
    gathered: Tensor | None  # int64 [G], rows of a record on the host that move; None where it is on the device
    audit_tokens: Tensor  # int64 [A], flat positions: each audited row once, for a group shares its prompt
    audit_entries: Tensor  # int64 [A], their audit entries; where the record is
    mismatch: MismatchCounts = field(default_factory=MismatchCounts)

    @classmethod
    def from_rows(cls, record: GuidanceRecord, rows_BT: Tensor, device: torch.device) -> GuidanceRows:
        """Build from the row numbers of a padded micro-batch (int64 [B, T] on the CPU, -1 where there is no row).

        Raises:
            ValueError: if a row lies outside the record: batch and record belong to different rollouts.
        """
        row = rows_BT.reshape(-1)
        if row.numel() and int(row.max()) >= record.num_rows:
            raise ValueError(
                f"the batch refers to guidance row {int(row.max())}, but the record of policy version "
                f"{record.policy_version} has {record.num_rows} rows: they come from different rollouts"
            )
        guided = (row >= 0).nonzero().squeeze(-1)
        entries = record.audit_of_row[row[guided]]
        audited = _first_of_each(entries)
        on_device = all(table.codes.device.type == device.type for table in record.tables.values())
        gathered = None if on_device else row[guided]
        if gathered is not None:
            row = torch.full_like(row, -1).index_copy_(0, guided, torch.arange(len(guided)))
        entries = entries[audited].to(device) if on_device else entries[audited]
        return cls(record, row.to(device), gathered, guided[audited].to(device), entries)

    def table(self, layer: int, site: str) -> SiteTable | None:
        return self.record.tables.get((layer, site))

    def guide(self, layer: int, site: str) -> Guide | None:
        """What the tokens follow at a site, on their device; None where nothing was recorded."""
        table = self.table(layer, site)
        if table is None:
            return None
        per_token, config = site not in ("k", "v"), self.record.config
        outer = table.outer
        if outer is not None:
            outer = self._moved(outer) if per_token else outer.to(self.row.device)
        return Guide(
            row=self.row,
            scale=self._moved(table.scale),
            codes=self._moved(table.codes),
            outer=outer,
            per_token=per_token,
            full=config.mode == "full",
            scale_bits=config.scales == "parity",
            syndrome=config.mode == "syndrome",
        )

    def audited(self, layer: int, site: str) -> tuple[Tensor, Tensor]:
        """Full codes of the rollout at a site, and the entry of each of `audit_tokens`, on the tokens' device."""
        audit = self.record.tables[layer, site].audit
        assert audit is not None
        if self.gathered is None:
            return audit, self.audit_entries
        gathered = audit[self.audit_entries].to(self.row.device)
        return gathered, torch.arange(len(gathered), device=self.row.device)

    def _moved(self, table: Tensor) -> Tensor:
        return table if self.gathered is None else table[self.gathered].to(self.row.device)


def _first_of_each(entries: Tensor) -> Tensor:
    """Ascending positions at which each entry >= 0 first occurs in int64 [G]; the order of G is kept."""
    known = (entries >= 0).nonzero().squeeze(-1)
    distinct, which = entries[known].unique(return_inverse=True)
    first = torch.full((len(distinct),), len(entries)).scatter_reduce_(0, which, known, "amin")
    return first.sort().values
