"""How the record of the rollout's rounding is written: by kernels, into rows of bytes.

    row of one fed token   | scale | codes | outer || scale | codes | outer || ...     a triple per guided (layer, site)
                           bytes; every field begins at a multiple of 4

The fields are columns of one uint8 matrix, so whatever moves a record moves one tensor: the end of a decode step copies
a matrix, a window of steps is stored by one copy, and `GuidanceRecord` is views of it.

    StepRecorder       rows at fixed addresses for decode steps inside a CUDA graph; a ring holds a window of steps
    GuidanceRecorder   collects everything of one `generate`, numbers the rows, and makes the record

K and V are not recorded while they are computed: their codes lie in the pages, and are read back from there when a
prompt has been prefilled and when a sequence ends.

What was left out: compressing the fields any further; parity bits of well-scaled blocks are close to random.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trace_kernels import BlockFormat, Quantized, pack_bits, pack_codes, parity_bits
from trace_kernels.rows import RowRecord
from trace_lightning.quantization.guidance import GuidanceRecord, Key, SiteTable
from trace_lightning.types import GuidanceConfig


@dataclass(frozen=True)
class SiteShape:
    """What is rounded at a site: rows of `width`, or of `heads` x `width` at k and v."""

    fmt: BlockFormat
    width: int
    heads: int | None = None

    @property
    def num_blocks(self) -> int:
        return -(-self.width // self.fmt.block_size)

    @property
    def padded(self) -> int:
        return self.num_blocks * self.fmt.block_size

    def trailing(self, size: int) -> tuple[int, ...]:
        """Shape of a field of `size` bytes per head, without the rows."""
        return (size,) if self.heads is None else (self.heads, size)


class RowLayout:
    """Byte offsets of the fields of a row; `view` cuts one field out of a matrix of rows."""

    def __init__(self, fields: Iterable[tuple[Key, str, tuple[int, ...], torch.dtype]]) -> None:
        self._fields: dict[tuple[Key, str], tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.row_bytes = 0
        for key, name, shape, dtype in fields:
            self._fields[key, name] = (self.row_bytes, shape, dtype)
            size = dtype.itemsize
            for extent in shape:
                size *= extent
            self.row_bytes += -(-size // 4) * 4

    @classmethod
    def of_record(cls, sites: dict[Key, SiteShape], *, mode: str, scales: str) -> RowLayout:
        """Scales (whole or packed parity), codes (packed, or packed parity) and outer scales of activations."""
        fields: list[tuple[Key, str, tuple[int, ...], torch.dtype]] = []
        for key, site in sites.items():
            scale = -(-site.num_blocks // 8) if scales == "parity" else site.num_blocks
            codes = site.padded // 2 if mode == "full" else site.padded // 8
            fields.append((key, "scale", site.trailing(scale), torch.uint8))
            fields.append((key, "codes", site.trailing(codes), torch.uint8))
            if site.heads is None and site.fmt.has_outer:
                fields.append((key, "outer", (), torch.float32))
        return cls(fields)

    @classmethod
    def of_codes(cls, sites: dict[Key, SiteShape]) -> RowLayout:
        """Packed codes alone: what an audited row keeps besides."""
        return cls((key, "codes", site.trailing(site.padded // 2), torch.uint8) for key, site in sites.items())

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """A matrix of rows; zeroed, for a row may belong to an empty seat that no kernel fills in."""
        return torch.zeros(rows, self.row_bytes, dtype=torch.uint8, device=device)

    def view(self, data: Tensor, key: Key, name: str) -> Tensor | None:
        """One field of every row of `data` [..., row_bytes]; None if rows have no such field."""
        if (key, name) not in self._fields:
            return None
        begin, shape, dtype = self._fields[key, name]
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        part = data[..., begin : begin + size]
        if dtype != torch.uint8:
            part = part.view(dtype)
        return part.unflatten(-1, shape) if len(shape) > 1 else part.squeeze(-1) if shape == () else part


@dataclass(frozen=True)
class PackedKV:
    """K or V of N tokens as pages hold them: packed codes [N, H, Kp / 2], scale bytes, the outer scale [H, 1]."""

    codes: Tensor
    scale: Tensor
    outer: Tensor | None


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


class SiteViews:
    """Where the kernels of one pass write: rows of a record, and of full codes where rows are audited."""

    def __init__(
        self,
        sites: dict[Key, SiteShape],
        mode: str,
        layout: RowLayout,
        code_layout: RowLayout,
        data: Tensor,
        codes: Tensor | None,
    ) -> None:
        self.sites, self.mode, self.data, self.codes = sites, mode, data, codes
        self.layout, self.code_layout = layout, code_layout

    def wants(self, layer: int, site: str) -> bool:
        return (layer, site) in self.sites

    def of(self, layer: int, site: str, rows: int) -> RowRecord:
        """The tensors of a site for the first `rows` rows."""
        key, data = (layer, site), self.data[:rows]
        written = self.layout.view(data, key, "codes")
        full = written if self.mode == "full" else None
        if self.mode != "full" and self.codes is not None:
            full = self.code_layout.view(self.codes[:rows], key, "codes")
        return RowRecord(
            scale=self.layout.view(data, key, "scale"),
            outer=self.layout.view(data, key, "outer"),
            parity=None if self.mode == "full" else written,
            codes=full,
        )

    def add(self, layer: int, site: str, q: Quantized) -> None:
        """Write what a torch quantiser returned for all rows."""
        record = self.of(layer, site, len(q.codes))
        assert q.scale is not None
        assert record.scale is not None
        record.scale.copy_(q.scale)
        if record.outer is not None and q.outer is not None:
            record.outer.copy_(q.outer.reshape(-1))
        if record.parity is not None:
            record.parity.copy_(pack_bits(q.codes & 1))
        if record.codes is not None:
            record.codes.copy_(pack_codes(q.codes))

    def end_step(self) -> None:
        """Called at the end of a decode step; rows of a pass of its own are stored by the recorder."""


class StepRecorder(SiteViews):
    """`SiteViews` at fixed addresses, and a ring of the last `window` steps; `end_step` can be captured in a graph."""

    def __init__(
        self, sites: dict[Key, SiteShape], config: GuidanceConfig, *, rows: int, window: int, device: torch.device
    ) -> None:
        layout = RowLayout.of_record(sites, mode=config.mode, scales="whole")
        super().__init__(sites, config.mode, layout, RowLayout.of_codes(sites), layout.empty(rows, device), None)
        self.ring = self.data.new_empty(window, *self.data.shape)
        self.code_ring: Tensor | None = None
        if config.audit_sequences and config.mode != "full":
            self.codes = self.code_layout.empty(rows, device)
            self.code_ring = self.codes.new_empty(window, *self.codes.shape)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def end_step(self) -> None:
        """Keep the rows of this step."""
        self.ring.index_copy_(0, self.step, self.data.unsqueeze(0))
        if self.code_ring is not None and self.codes is not None:
            self.code_ring.index_copy_(0, self.step, self.codes.unsqueeze(0))
        self.step += 1

    def restart(self) -> None:
        """Begin at the first place of the ring again."""
        self.step.zero_()

    def take(self, steps: int, rows: int) -> tuple[Tensor, Tensor | None]:
        """The first `rows` rows of the last `steps` steps, [steps, rows, bytes], and of their codes; starts afresh."""
        self.restart()
        return self.ring[:steps, :rows], None if self.code_ring is None else self.code_ring[:steps, :rows]


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
        # Kernels write whole scale bytes; their parity is taken when the rows are stored.
        self._whole = RowLayout.of_record(self.sites, mode=config.mode, scales="whole")
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
        self._current = SiteViews(self.sites, self.config.mode, self._whole, self._codes, data, codes)
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
        if self.config.scales == "parity":
            data = self._with_scale_parity(data)
        self._data.append(data)

    def _codes_of(self, data: Tensor) -> Tensor:
        """Full codes out of rows that hold them, arranged as audited rows are."""
        target = self._codes
        codes = target.empty(len(data), data.device)
        for key in self.sites:
            target.view(codes, key, "codes").copy_(self._whole.view(data, key, "codes"))  # type: ignore[union-attr, arg-type]
        return codes

    def _with_scale_parity(self, data: Tensor) -> Tensor:
        whole = self._whole
        packed = self._layout.empty(len(data), data.device)
        for key in self.sites:
            scale = whole.view(data, key, "scale")
            assert scale is not None
            self._layout.view(packed, key, "scale").copy_(pack_bits(scale & 1))  # type: ignore[union-attr]
            for name in ("codes", "outer"):
                source, target = whole.view(data, key, name), self._layout.view(packed, key, name)
                if target is not None and source is not None:
                    target.copy_(source)
        return packed

    def add_kv(self, rows: Tensor, read: Callable[[Key], PackedKV], device: torch.device) -> None:
        """Store what the pages hold for the tokens `rows`; `read` gives what they hold of one k or v."""
        data = self._kv_layout.empty(len(rows), device)
        entries = self._audit_entries()[rows]
        picked = (entries >= 0).nonzero().squeeze(-1)
        audits = self._kv_codes
        audited = audits.empty(len(picked), device)
        for key in self.kv_sites:
            kv = read(key)
            scale = pack_bits(kv.scale & 1) if self.config.scales == "parity" else kv.scale
            written = kv.codes if self.config.mode == "full" else parity_bits(kv.codes)
            self._kv_layout.view(data, key, "scale").copy_(scale)  # type: ignore[union-attr]
            self._kv_layout.view(data, key, "codes").copy_(written)  # type: ignore[union-attr]
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


def check_budget(config: GuidanceConfig, row_bytes: int, most_tokens: int, store: torch.device) -> None:
    """Refuse a rollout whose record could outgrow its budget, before a token is drawn.

    The budget is `config.budget_gb`, or else the memory that can be had where the record is kept.

    Raises:
        ValueError: with both numbers and the ways out.
    """
    if config.budget_gb is not None:
        budget, source = config.budget_gb * 1e9, f"guidance.budget_gb={config.budget_gb:g}"
    elif store.type == "cuda":
        budget, source = float(free_gpu_memory(store)), "what is free on the GPU"
    else:
        budget, source = _free_host_memory(), "what is free on the host"
    needed = row_bytes * most_tokens
    if needed > budget:
        raise ValueError(
            f"guidance takes {row_bytes:,} bytes per token, {needed / 1e9:.1f} GB if all {most_tokens:,} tokens of "
            f"this rollout are drawn; {source} is {budget / 1e9:.1f} GB. Set guidance.store=host, "
            "guidance.scales=parity or guidance.mode=parity, name fewer guidance.sites, or draw fewer or shorter "
            "completions."
        )


def free_gpu_memory(device: torch.device) -> int:
    """Bytes that torch could allocate: what is free on the GPU, and what its allocator holds without using it.

    After a training step most of a GPU belongs to the second kind, the record of the rollout before among it.
    """
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _free_host_memory() -> float:
    """Bytes that can be taken without swapping, as Linux estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
