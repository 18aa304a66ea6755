"""How a site rounds: to the nearest code, to the nearest and recorded, or guided by a record.

This is the seam between the two sides of the method. The model code (the trainer's quantised modules, the engine's
decoder) asks a `Rounding` for the values at (layer, site) and knows nothing of guidance; which object it got decides.

    NearestRounding()            trainer without guidance, engine without a record
    NearestRounding(recorder)    the engine: same bytes, and the recorder sees them
    GuidedRounding(rows)         the trainer: the codes are steered towards the rollout's

Shapes: `x` is [N, K] at linear inputs and [N, H, D] at k and v; N flat tokens in the order that the record's rows
were built for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from trace_kernels import BlockFormat, Quantized, straight_through, unpack_bits, unpack_codes
from trace_kernels.formats import e2m1_encode
from trace_kernels.quantize import _E2M1Format
from trace_lightning.quantization.guidance import GuidanceRows, SiteTable
from trace_lightning.quantization.record_views import SiteViews


class Rounding(ABC):
    """Decides the codes at a site; see the classes below."""

    @abstractmethod
    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        """Dequantised values of `x`, same shape and dtype, without gradient.

        Args:
            layer: decoder layer index.
            site: one of `trace_lightning.types.SITES`.
            x: [N, K] or [N, H, D].
            fmt: the number format.
            outer: FP32 [H, 1] at k and v; None at linear inputs, where each row has its own.
        """


class NearestRounding(Rounding):
    """Round to nearest on own scales; with a recorder, tell it what came out."""

    def __init__(self, recorder: SiteViews | None = None) -> None:
        self.recorder = recorder

    def quantize(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Quantized:
        """Codes and scales; arguments as in `values`."""
        q = fmt.quantize(x, outer)
        if self.recorder is not None and self.recorder.wants(layer, site):
            self.recorder.add(layer, site, q)
        return q

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        return fmt.dequantize(self.quantize(layer, site, x, fmt, outer), x.dtype)


NEAREST = NearestRounding()


class GuidedRounding(Rounding):
    """Guided rounding (TRACE, arXiv 2610.07767) where the record has the site; nearest rounding elsewhere."""

    def __init__(self, rows: GuidanceRows) -> None:
        self.rows = rows

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        table = self.rows.table(layer, site)
        if table is None:
            return NEAREST.values(layer, site, x, fmt, outer)
        assert isinstance(fmt, _E2M1Format), f"{fmt.name} cannot be guided; the recipe should have refused this"
        guided = self._round(layer, site, x[self.rows.guided_index], fmt, table)
        result = torch.empty_like(x)
        result[self.rows.guided_index] = fmt.dequantize(guided, x.dtype)
        rest = self.rows.unguided_index
        if len(rest):
            result[rest] = NEAREST.values(layer, site, x[rest], fmt, outer)
        return result

    def _round(self, layer: int, site: str, x: Tensor, fmt: _E2M1Format, table: SiteTable) -> Quantized:
        rows, config = self.rows.rows, self.rows.record.config
        padded = -(-x.shape[-1] // fmt.block_size) * fmt.block_size
        outer = table.outer
        if outer is not None:
            outer = (outer if site in ("k", "v") else outer[rows]).to(x.device).unsqueeze(-1)
        scale, recorded = table.scale[rows].to(x.device), table.codes[rows].to(x.device)
        if config.scales == "parity":
            scale = fmt.scale_from_parity(x, outer, unpack_bits(scale, padded // fmt.block_size))
        if config.mode == "full":
            q = fmt.round_full(x, scale, outer, unpack_codes(recorded))
        else:
            q = fmt.round_parity(x, scale, outer, unpack_bits(recorded, padded))
        if len(self.rows.audit_index):
            self._audit(layer, site, x, Quantized(q.codes, scale, outer, q.width), fmt, table)
        return q

    @torch.no_grad()
    def _audit(self, layer: int, site: str, x: Tensor, q: Quantized, fmt: _E2M1Format, table: SiteTable) -> None:
        """Compare the audited rows of `q`, the codes used on the rollout's scales, with the rollout's codes."""
        assert table.audit is not None
        assert q.scale is not None
        index, shared = self.rows.audit_index, site in ("k", "v")
        outer = q.outer if q.outer is None or shared else q.outer[index]
        x, used = x[index], Quantized(q.codes[index], q.scale[index], outer, q.width)
        rolled = unpack_codes(table.audit[self.rows.audit_entries.to(table.audit.device)].to(x.device))
        own = fmt.quantize(x, outer if shared else None)
        sums = torch.cat((_code_sums(own.codes, used.codes, rolled), _value_sums(x, own, used, rolled, fmt)))
        if self.rows.record.config.scales == "parity":
            sums[5:] = 0  # the scales are the trainer's reading of one bit: the rollout's values are not known
        self.rows.mismatch.add((layer, site), sums)


def _code_sums(own: Tensor, used: Tensor, rolled: Tensor) -> Tensor:
    """The first five of `AUDIT_SUMS`, FP64 [5]."""
    target = _signed_index(rolled)
    counts = [own.new_full((), rolled.numel(), dtype=torch.int64)]
    for codes in (own, used):
        step = (_signed_index(codes) - target).abs()
        counts += [(step > 0).sum(), (step == 1).sum()]
    return torch.stack(counts).double()


def _value_sums(x: Tensor, own: Quantized, used: Quantized, rolled: Tensor, fmt: _E2M1Format) -> Tensor:
    """The last five of `AUDIT_SUMS`, FP64 [5], given the rollout's scales in `used`."""
    assert used.scale is not None
    nearest = e2m1_encode(fmt.normalize(x, used.scale, used.outer)).flatten(-2)
    target = fmt.dequantize(replace(used, codes=rolled))
    values = (fmt.dequantize(own), fmt.dequantize(replace(used, codes=nearest)), fmt.dequantize(used))
    squares = [(value - target).square().sum() for value in values]
    return torch.stack([x.new_full((), len(x), dtype=torch.float32), *squares, target.square().sum()]).double()


def _signed_index(codes: Tensor) -> Tensor:
    """E2M1 codes as -7..7, so that neighbours differ by one."""
    index = (codes & 7).to(torch.int16)
    return torch.where(codes > 7, -index, index)


def round_site(
    x: Tensor, layer: int, site: str, fmt: BlockFormat | None, rounding: Rounding, outer: Tensor | None = None
) -> Tensor:
    """The trainer's view of a site: the values `rounding` gives, with a straight-through gradient. None rounds not."""
    if fmt is None:
        return x
    with torch.no_grad():
        value = rounding.values(layer, site, x, fmt, outer)
    return straight_through(x, value)
