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
from functools import partial

import torch
from torch import Tensor

from trace_kernels import BlockFormat, Quantized, straight_through
from trace_kernels.audit_codes import audit_codes
from trace_kernels.round_values import Guide, round_values
from trace_kernels.syndrome_decode import decode_bits, guide_by_bits
from trace_lightning.quantization.guidance import GuidanceRows
from trace_lightning.quantization.recomputation import found_once
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
        if guide is not None and guide.syndrome:
            guide = guide_by_bits(guide, found_once((layer, site), partial(decode_bits, x, guide, fmt)))
        if guide is not None:
            self.audit(layer, site, x, fmt, guide)
        return self.guided_values(x, fmt, outer, guide)

    def guided_values(self, x: Tensor, fmt: BlockFormat, outer: Tensor | None, guide: Guide | None) -> Tensor:
        """Values of all tokens: along the record those that have a row, the others rounded to nearest."""
        return round_values(x, fmt, outer, guide=guide)

    def audit(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, guide: Guide) -> None:
        """Compare the codes of audited tokens with the rollout's; once, for a recomputed forward pass uses the same."""
        key = (layer, site)
        if not len(self.rows.audit_tokens) or key in self.rows.mismatch.sums:
            return
        rolled, entries = self.rows.audited(layer, site)
        self.rows.mismatch.add(key, self.audit_sums(x, fmt, guide, rolled, entries))

    def audit_sums(self, x: Tensor, fmt: BlockFormat, guide: Guide, rolled: Tensor, entries: Tensor) -> Tensor:
        """`AUDIT_SUMS` FP64 [10] of the audited tokens; `rolled` and `entries` as `audit_codes` takes them."""
        return audit_codes(x, fmt, guide, self.rows.audit_tokens, rolled, entries)


def round_site(
    x: Tensor, layer: int, site: str, fmt: BlockFormat | None, rounding: Rounding, outer: Tensor | None = None
) -> Tensor:
    """The trainer's view of a site: the values `rounding` gives, with a straight-through gradient. None rounds not."""
    if fmt is None:
        return x
    with torch.no_grad():
        value = rounding.values(layer, site, x, fmt, outer)
    return straight_through(x, value)
