"""Facts that every launcher needs: are we in the interpreter, how many multiprocessors, where does a tensor run."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

INTERPRET: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run in Python on CPU tensors


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 132 (an H100 or H200) where there is none to ask."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def words(data: Tensor) -> Tensor:
    """Packed codes uint8 [..., 4n] as int32 words [..., n]: element 8w + j is nibble j of word w."""
    return data.view(torch.int32)
