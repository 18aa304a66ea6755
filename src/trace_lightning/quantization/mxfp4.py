"""`MXFP4Tensor`: a weight in E2M1 codes, blocks of 32 under power-of-two (E8M0) scales."""

from __future__ import annotations

import torch

from trace_kernels import MXFP4, BlockFormat
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor, register_ops


class MXFP4Tensor(PackedFP4Tensor):
    """MXFP4 weight: 4.25 bits per element, no outer scale. Layout and operations: see `PackedFP4Tensor`."""

    @classmethod
    def block_format(cls, four_over_six: bool) -> BlockFormat:
        return MXFP4()


register_ops(MXFP4Tensor)
torch.serialization.add_safe_globals([MXFP4Tensor])
