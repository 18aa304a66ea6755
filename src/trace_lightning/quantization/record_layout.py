"""Where each field of a recorded row lies: the record of the rollout's rounding is one matrix of bytes.

    row of one fed token   | scale | codes | outer || scale | codes | outer || ...     a triple per guided (layer, site)
                           bytes; every field begins at a multiple of 4

The fields are columns of one uint8 matrix, so whatever moves a record moves one tensor: the end of a decode step copies
a matrix, a window of steps is stored by one copy, and `GuidanceRecord` is views of it.

Kernels write whole scales, and parity bits or whole codes; what else is kept of them is made when rows are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_kernels import BlockFormat
from trace_kernels.syndromes import syndrome_bytes
from trace_lightning.quantization.guidance import Key


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

    def codes(self, mode: str) -> tuple[int, ...]:
        """Shape of what is kept of the codes of a row: packed, their parity bits, or over all heads a syndrome."""
        if mode == "syndrome":
            return (syndrome_bytes((self.heads or 1) * self.padded),)
        return self.trailing(self.padded // (2 if mode == "full" else 8))


def written(mode: str) -> str:
    """The mode in which kernels write rows that are kept as `mode`."""
    return "full" if mode == "full" else "parity"


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
        """Scales (whole or packed parity), codes (see `SiteShape.codes`) and outer scales of activations."""
        fields: list[tuple[Key, str, tuple[int, ...], torch.dtype]] = []
        for key, site in sites.items():
            scale = -(-site.num_blocks // 8) if scales == "parity" else site.num_blocks
            fields.append((key, "scale", site.trailing(scale), torch.uint8))
            fields.append((key, "codes", site.codes(mode), torch.uint8))
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

    def fields(self, key: Key) -> list[tuple[int, int]]:
        """Where in a row the scale, the codes and the outer scale of a site begin, and their bytes; -1, 0 if absent."""
        found = (self._fields.get((key, name), (-1, (0,), torch.uint8)) for name in ("scale", "codes", "outer"))
        return [(begin, math.prod(shape) * dtype.itemsize) for begin, shape, dtype in found]

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
