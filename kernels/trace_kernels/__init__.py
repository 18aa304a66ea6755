"""FP4 formats, quantisers and kernels that need nothing but torch (and, where installed, Triton)."""

from trace_kernels.formats import pack_bits, pack_codes, parity_bits, unpack_bits, unpack_codes
from trace_kernels.quantize import (
    FP8,
    MXFP4,
    NVFP4,
    BlockFormat,
    Quantized,
    fake_quantize,
    get_format,
    is_registered,
    register_format,
    straight_through,
)

__all__ = [
    "FP8",
    "MXFP4",
    "NVFP4",
    "BlockFormat",
    "Quantized",
    "fake_quantize",
    "get_format",
    "is_registered",
    "pack_bits",
    "pack_codes",
    "parity_bits",
    "register_format",
    "straight_through",
    "unpack_bits",
    "unpack_codes",
]
