"""One guidance record from several: a batch that was drawn in more than one call has one for each.

Only the rows of completions that are kept move over, so what dynamic sampling drops costs no memory afterwards. K and
V have one outer scale per head and policy version, the same in every part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trace_lightning.quantization.guidance import GuidanceRecord, SiteTable
from trace_lightning.types import Completion

Part = tuple[GuidanceRecord, list[Completion]]


def join_records(parts: Sequence[Part]) -> GuidanceRecord:
    """The record of all completions, whose `guidance_rows` are renumbered in place.

    Args:
        parts: records of one policy version, each with the completions to keep of it.

    Raises:
        ValueError: records of different policy versions, sites or modes.
    """
    first = parts[0][0]
    for record, _ in parts:
        alike = record.tables.keys() == first.tables.keys() and record.config == first.config
        if record.policy_version != first.policy_version or not alike:
            raise ValueError(
                f"guidance records of policy versions {first.policy_version} and {record.policy_version}, or of "
                "different sites or modes, cannot be one batch"
            )
    rows, entries, audits, num_rows, num_entries = [], [], [], 0, 0
    for record, completions in parts:
        kept = _renumber(completions, record.num_rows, num_rows)
        entry, audited = _renumber_audit(record.audit_of_row[kept], num_entries)
        rows.append(kept)
        entries.append(entry)
        audits.append(audited)
        num_rows, num_entries = num_rows + len(kept), num_entries + len(audited)
    tables = {
        key: _join_tables([record.tables[key] for record, _ in parts], rows, audits, key[1] in ("k", "v"))
        for key in first.tables
    }
    return GuidanceRecord(first.config, tables, torch.cat(entries), first.policy_version)


def _renumber(completions: list[Completion], num_rows: int, start: int) -> Tensor:
    """The rows that completions use, ascending; afterwards they count from `start` in this order."""
    used = [completion.guidance_rows for completion in completions if completion.guidance_rows is not None]
    kept = torch.cat(used).unique() if used else torch.zeros(0, dtype=torch.int64)
    new = torch.full((num_rows,), -1)
    new[kept] = torch.arange(start, start + len(kept))
    for completion in completions:
        if completion.guidance_rows is not None:
            completion.guidance_rows = new[completion.guidance_rows]
    return kept


def _renumber_audit(entry_of_row: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Audit entries counted from `start`, -1 kept; and the old entries in the new order."""
    known = entry_of_row >= 0
    old, place = entry_of_row[known].unique(return_inverse=True)
    new = torch.full_like(entry_of_row, -1)
    new[known] = start + place
    return new, old


def _join_tables(tables: list[SiteTable], rows: list[Tensor], audits: list[Tensor], outer_of_heads: bool) -> SiteTable:
    def stack(parts: list[Tensor | None], index: list[Tensor]) -> Tensor | None:
        known = [part[i.to(part.device)] for part, i in zip(parts, index, strict=True) if part is not None]
        return torch.cat(known) if known else None

    scale, codes = stack([t.scale for t in tables], rows), stack([t.codes for t in tables], rows)
    assert scale is not None
    assert codes is not None
    outer = tables[0].outer if outer_of_heads else stack([t.outer for t in tables], rows)
    return SiteTable(scale, codes, outer, stack([t.audit for t in tables], audits))
