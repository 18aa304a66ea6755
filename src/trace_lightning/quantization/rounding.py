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

from trace_kernels import BlockFormat, Quantized, straight_through, unpack_codes
from trace_kernels.formats import e2m1_encode
from trace_kernels.quantize import _E2M1Format
from trace_kernels.round_values import Guide, guided_codes, round_values
from trace_lightning.quantization.guidance import GuidanceRows
from trace_lightning.quantization.record_views import SiteViews


class Rounding(ABC):
    """Decides the codes at a site; see the classes below."""

    @abstractmethod
    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        """Dequantised values of `x`, same shape and dtype, without gradient.

        Args:
            layer: decoder layer index.
            site: one of `trace_lightning.recipe.SITES`.
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
        if self.recorder is None:
            return round_values(x, fmt, outer)
        return fmt.dequantize(self.quantize(layer, site, x, fmt, outer), x.dtype)


NEAREST = NearestRounding()


class GuidedRounding(Rounding):
    """Guided rounding (TRACE, arXiv 2610.07767) where the record has the site; nearest rounding elsewhere."""

    def __init__(self, rows: GuidanceRows) -> None:
        self.rows = rows

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        guide = self.rows.guide(layer, site)
        if guide is not None:
            self.audit(layer, site, x, fmt, guide)
        return self.guided_values(x, fmt, outer, guide)

    def guided_values(self, x: Tensor, fmt: BlockFormat, outer: Tensor | None, guide: Guide | None) -> Tensor:
        """Values of all tokens: those with a row as `codes` says, the others rounded to nearest."""
        return round_values(x, fmt, outer, guide=guide)

    def codes(self, x: Tensor, guide: Guide, fmt: BlockFormat) -> Quantized:
        """Codes of tokens that all follow a row, in the order of the guide."""
        return guided_codes(x, guide, fmt)

    @torch.no_grad()
    def audit(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, guide: Guide) -> None:
        """Compare the codes of audited tokens with the rollout's; once, for a recomputed forward pass uses the same."""
        tokens, key = self.rows.audit_tokens, (layer, site)
        if not len(tokens) or key in self.rows.mismatch.sums:
            return
        table = self.rows.table(layer, site)
        assert isinstance(fmt, _E2M1Format)
        assert table is not None
        assert table.audit is not None
        x, guide = x[tokens], guide.followed(tokens)
        used = self.codes(x, guide, fmt)
        rolled = unpack_codes(table.audit[self.rows.audit_entries.to(table.audit.device)].to(x.device))
        own = fmt.quantize(x, None if guide.per_token else used.outer)
        sums = torch.cat((_code_sums(own.codes, used.codes, rolled), _value_sums(x, own, used, rolled, fmt)))
        if guide.scale_bits:
            sums[5:] = 0  # the scales are the trainer's reading of one bit: the rollout's values are not known
        self.rows.mismatch.add(key, sums)


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
