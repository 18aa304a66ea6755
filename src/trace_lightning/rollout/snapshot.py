"""One fused linear of the rollout's snapshot: packed FP4 weights that are renewed in place at every sync.

    rows of q, k, v (or gate, up) side by side [sum N_i, K], one outer scale for the whole, as one fast matmul runs them
    packed   NVFP4Tensor / MXFP4Tensor    the truth: its bytes are what an export writes
    weight   [sum N_i, K] compute dtype   the dequantised values, for batches too large to unpack codes for

Both hold the same numbers exactly: outer scales are powers of two, so every value fits BF16. Which one a matmul reads
is decided by the number of rows it has, at `crossover`, measured once per shape on the device that runs it. FP8
weights have one scale per row and keep no packed form here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trace_kernels import get_format
from trace_kernels.block_quantize import requantize_
from trace_kernels.crossover import crossover_batch
from trace_kernels.linear import fp4_linear, supports
from trace_lightning.quantization.dialects import TENSOR_CLASSES
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor


class SnapshotLinear:
    """A fused linear of the snapshot: rows of several Hugging Face linears, one outer scale, one input site."""

    makes_dense: ClassVar[bool] = False  # whether `dense` is computed for each matmul, or kept

    def __init__(
        self, linears: list[tuple[str, nn.Linear]], fmt_name: str, four_over_six: bool, dtype: torch.dtype
    ) -> None:
        self.names = [name for name, _ in linears]
        self.format, self.four_over_six = get_format(fmt_name, four_over_six=four_over_six), four_over_six
        rows = [linear.out_features for _, linear in linears]
        self.shape, self.dtype = (sum(rows), linears[0][1].in_features), dtype
        first = linears[0][1].weight
        self.weight = torch.zeros(sum(rows), first.shape[1], dtype=dtype, device=first.device)
        self.parts = dict(zip(self.names, self.weight.split(rows), strict=True))
        has_bias = any(linear.bias is not None for _, linear in linears)
        self.bias = torch.zeros(sum(rows), dtype=dtype, device=first.device) if has_bias else None
        self.bias_parts = {} if self.bias is None else dict(zip(self.names, self.bias.split(rows), strict=True))
        self.packed: PackedFP4Tensor | None = None
        self.crossover = 0  # a matmul of up to so many rows reads `packed`
        if fmt_name in TENSOR_CLASSES:
            self.packed = TENSOR_CLASSES[fmt_name].from_hp(self.weight, four_over_six=four_over_six)

    def dense(self) -> Tensor:
        """The values [sum N_i, K] in the compute dtype, for matmuls of many rows."""
        return self.weight

    def master(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The high-precision weight of one part, among the tensors of a sync: what K and V are bounded by."""
        return tensors[f"{name}.weight"]

    @property
    def weight_names(self) -> list[str]:
        """Hugging Face names of all tensors that `load` reads."""
        return [f"{name}.weight" for name in self.names] + [f"{name}.bias" for name in self.bias_parts]

    def load(self, tensors: dict[str, Tensor], *, quantize: bool) -> None:
        """Copy the masters of all parts, quantised under one outer scale, to the addresses held before."""
        masters = [tensors[f"{name}.weight"] for name in self.names]
        fmt = "none" if self.format is None or not quantize else self.format.name
        packed = self.packed if fmt != "none" else None
        requantize_(
            masters,
            None if packed is None else packed.qdata,
            None if packed is None else packed.scale,
            None if packed is None else packed.outer_scale,
            self.weight,
            fmt,
            self.four_over_six,
        )
        for name, part in self.bias_parts.items():
            part.copy_(tensors[f"{name}.bias"])

    def find_crossover(self) -> None:
        """Time both kinds of matmul on this device and remember up to how many rows the packed one wins."""
        packed, name, width = self.packed, self.format.name if self.format is not None else "", self.shape[1]
        usable = packed is not None and packed.qdata.is_cuda and self.dtype == torch.bfloat16
        if not usable or supports(width, name) is not None:
            return
        assert packed is not None
        codes = (packed.qdata, packed.scale, packed.outer_scale)
        self.crossover = crossover_batch(*codes, self.dense(), fmt=name, in_features=width, made=self.makes_dense)

    def reads_packed(self, num_rows: int) -> bool:
        """Whether a matmul of `num_rows` reads the packed weights, and wants its input permuted."""
        return num_rows <= self.crossover

    def __call__(self, x: Tensor) -> Tensor:
        """Partial sums [S, M, N] of a matmul; `x` is [M, K], or permuted where `reads_packed(M)` says so."""
        if x.ndim == 2:
            return F.linear(x.to(self.dtype), self.dense(), self.bias).unsqueeze(0)
        packed = self.packed
        assert packed is not None
        assert self.format is not None
        codes = (packed.qdata, packed.scale, packed.outer_scale)
        return fp4_linear(x, *codes, self.bias, in_features=self.shape[1], fmt=self.format.name)
