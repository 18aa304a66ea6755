"""`NVFP4Tensor`: a weight in E2M1 codes, blocks of 16 under E4M3 scales, one FP32 outer scale."""

from __future__ import annotations

import torch

from trace_kernels import NVFP4, BlockFormat
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor, register_ops


class NVFP4Tensor(PackedFP4Tensor):
    """NVFP4 weight: 4.5 bits per element. Layout and operations: see `PackedFP4Tensor`."""

    @classmethod
    def block_format(cls, four_over_six: bool) -> BlockFormat:
        return NVFP4(four_over_six=four_over_six)


register_ops(NVFP4Tensor)
torch.serialization.add_safe_globals([NVFP4Tensor])
