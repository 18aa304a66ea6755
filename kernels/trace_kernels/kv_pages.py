"""How K or V of one layer lies in memory: pages of tokens, head by head.

    data   [pages, H, page_size, W]      FP4: packed codes uint8, W = Dp / 2     FP8: E4M3 bytes uint8, W = D
                                         none: values in the engine's dtype, W = D
    scale  uint8 [pages, H, page_size, Dp / block]    block scales, FP4 only
    outer  FP32 [H, 1]                   one per KV head, a power of two; None for MXFP4 and none

Head-major, so that what one program of the attention kernel reads, the tokens of a page under one head, is contiguous.
A *slot* is the number `page * page_size + offset` of one token's place. Reads dequantise, `(code * scale) * outer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_kernels.formats import pack_codes, unpack_codes
from trace_kernels.quantize import BlockFormat, Quantized


@dataclass
class KVPages:
    """K or V of one layer; layout at the top of this file. `fmt` None holds values as they are."""

    fmt: BlockFormat | None
    data: Tensor
    scale: Tensor | None
    outer: Tensor | None
    head_dim: int

    @classmethod
    def empty(
        cls,
        fmt: BlockFormat | None,
        *,
        num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVPages:
        """Zeroed pages; the head dim is padded to whole blocks."""
        shape = (num_pages, num_heads, page_size)
        if fmt is None:
            return cls(None, torch.zeros(*shape, head_dim, dtype=dtype, device=device), None, None, head_dim)
        padded = -(-head_dim // fmt.block_size) * fmt.block_size
        width = padded // 2 if fmt.guidable else padded
        data = torch.zeros(*shape, width, dtype=torch.uint8, device=device)
        scale = None
        if fmt.guidable:
            scale = torch.zeros(*shape, padded // fmt.block_size, dtype=torch.uint8, device=device)
        outer = torch.ones(num_heads, 1, device=device) if fmt.has_outer else None
        return cls(fmt, data, scale, outer, head_dim)

    @property
    def page_size(self) -> int:
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def store(self, slots_N: Tensor, q: Quantized) -> None:
        """Put codes and scales [N, H, ...] at their slots (int64 [N]); for FP8 `q.codes` are the bytes."""
        page, offset = slots_N // self.page_size, slots_N % self.page_size
        self.data[page, :, offset] = q.codes if self.scale is None else pack_codes(q.codes)
        if self.scale is not None:
            assert q.scale is not None
            self.scale[page, :, offset] = q.scale

    def store_values(self, slots_N: Tensor, x_NHD: Tensor) -> None:
        """Put unquantised values at their slots."""
        page, offset = slots_N // self.page_size, slots_N % self.page_size
        self.data[page, :, offset] = x_NHD.to(self.data.dtype)

    def quantized(self, slots: Tensor) -> Quantized:
        """Codes and scales [*slots.shape, H, ...] as they were stored."""
        page, offset = slots // self.page_size, slots % self.page_size
        data = self.data[page, :, offset]
        if self.scale is None:
            return Quantized(data, None, self.outer, self.head_dim)
        return Quantized(unpack_codes(data), self.scale[page, :, offset], self.outer, self.head_dim)

    def packed(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Packed codes [*slots.shape, H, Dp / 2] and scale bytes of FP4 pages, as they lie there."""
        assert self.scale is not None, "only FP4 pages hold packed codes"
        page, offset = slots // self.page_size, slots % self.page_size
        return self.data[page, :, offset], self.scale[page, :, offset]

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Values [*slots.shape, H, D] in `dtype`."""
        if self.fmt is None:
            page, offset = slots // self.page_size, slots % self.page_size
            return self.data[page, :, offset].to(dtype)
        return self.fmt.dequantize(self.quantized(slots), dtype)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages (int64 [n] each); all sources are read before anything is written."""
        for tensor in (self.data, self.scale):
            if tensor is not None:
                tensor[target] = tensor[source]
