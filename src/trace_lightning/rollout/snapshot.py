"""One fused linear of the rollout's snapshot: packed FP4 weights that are renewed in place at every sync.

    rows of q, k, v (or gate, up) side by side [sum N_i, K], one outer scale for the whole, as one fast matmul runs them
    packed   NVFP4Tensor / MXFP4Tensor    the truth: its bytes are what an export writes
    weight   [sum N_i, K] compute dtype   the dequantised values, used by matmuls on the reference path

FP8 weights have one scale per row and keep no packed form here. What was left out: kernels that read `packed` directly;
they make the second copy unnecessary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trace_kernels import get_format
from trace_lightning.quantization.mxfp4 import MXFP4Tensor
from trace_lightning.quantization.nvfp4 import NVFP4Tensor
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.quantization.qat import quantized_weight

_PACKED: dict[str, type[PackedFP4Tensor]] = {"nvfp4": NVFP4Tensor, "mxfp4": MXFP4Tensor}


class SnapshotLinear:
    """A fused linear of the snapshot: rows of several Hugging Face linears, one outer scale, one input site."""

    def __init__(
        self, linears: list[tuple[str, nn.Linear]], fmt_name: str, four_over_six: bool, dtype: torch.dtype
    ) -> None:
        self.names = [name for name, _ in linears]
        self.format = get_format(fmt_name, four_over_six=four_over_six)
        rows = [linear.weight.shape[0] for _, linear in linears]
        first = linears[0][1].weight
        self.weight = torch.zeros(sum(rows), first.shape[1], dtype=dtype, device=first.device)
        self.parts = dict(zip(self.names, self.weight.split(rows), strict=True))
        has_bias = any(linear.bias is not None for _, linear in linears)
        self.bias = torch.zeros(sum(rows), dtype=dtype, device=first.device) if has_bias else None
        self.bias_parts = {} if self.bias is None else dict(zip(self.names, self.bias.split(rows), strict=True))
        self.packed: PackedFP4Tensor | None = None
        if fmt_name in _PACKED:
            self.packed = _PACKED[fmt_name].from_hp(self.weight, four_over_six=four_over_six)

    @property
    def weight_names(self) -> list[str]:
        """Hugging Face names of all tensors that `load` reads."""
        return [f"{name}.weight" for name in self.names] + [f"{name}.bias" for name in self.bias_parts]

    def load(self, tensors: dict[str, Tensor], *, quantize: bool) -> None:
        """Copy the masters of all parts, quantised under one outer scale, to the addresses held before."""
        masters = [tensors[f"{name}.weight"] for name in self.names]
        if self.format is None or not quantize:
            for name, master in zip(self.names, masters, strict=True):
                self.parts[name].copy_(master)
        elif self.packed is not None:
            self.packed.copy_(torch.cat(masters))
            self.weight.copy_(self.packed.dequantize(masters[0].dtype))
        else:
            self.weight.copy_(quantized_weight(torch.cat(masters), self.format, None))
        for name, part in self.bias_parts.items():
            part.copy_(tensors[f"{name}.bias"])

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)
