"""Where the kernels of one pass write what they round: views of the rows of a record.

    SiteViews      rows of a pass of its own: a prefill, or a decode step without a graph; the recorder stores them next
    StepRecorder   rows at fixed addresses for decode steps inside a CUDA graph; a ring holds a window of steps

K and V are not recorded while they are computed: their codes lie in the pages, and are read back from there when a
prompt has been prefilled and when a sequence ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_kernels import Quantized, pack_bits, pack_codes
from trace_kernels.rows import RowRecord
from trace_lightning.quantization.guidance import Key
from trace_lightning.quantization.record_layout import RowLayout, SiteShape, written
from trace_lightning.recipe import GuidanceConfig


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
        mode = written(config.mode)
        layout = RowLayout.of_record(sites, mode=mode, scales="whole")
        super().__init__(sites, mode, layout, RowLayout.of_codes(sites), layout.empty(rows, device), None)
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
