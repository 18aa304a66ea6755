"""The paged KV cache: who owns which page, and how K and V lie in it.

    page p of size S holds slots p*S ... p*S + S-1; a slot is one token of one sequence, in every layer
    per layer      FP4: codes uint8 [slots, H, Dp / 2], scale uint8 [slots, H, Dp / block]
                   FP8: codes uint8 [slots, H, D]                     none: values [slots, H, D]
    per layer      outer FP32 [H, 1] for K and for V, renewed at each weight sync

A prompt's full pages are shared by the samples of its group (reference counts); the last, partly filled page is copied
for each sample. Reads dequantise: `(code * block scale) * outer`, the values that the trainer's sites produce.

What was left out: eviction. The scheduler reserves a sequence's pages before it starts, so the pool never runs dry in
mid-flight.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trace_kernels import BlockFormat, Quantized, pack_codes, unpack_codes
from trace_lightning.quantization.rounding import NearestRounding


class PagePool:
    """Hands out page numbers and counts how many sequences hold each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.num_free, "the scheduler must check num_free first"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free.append(page)


class _Store:
    """K or V of one layer in one format (None: values in the engine's dtype)."""

    def __init__(
        self, fmt: BlockFormat | None, slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.fmt, self.dtype, self.head_dim = fmt, dtype, head_dim
        self.outer: Tensor | None = None
        self.scale: Tensor | None = None
        if fmt is None:
            self.data = torch.zeros(slots, heads, head_dim, dtype=dtype, device=device)
            return
        padded = -(-head_dim // fmt.block_size) * fmt.block_size
        width = padded // 2 if fmt.guidable else padded
        self.data = torch.zeros(slots, heads, width, dtype=torch.uint8, device=device)
        if fmt.guidable:
            self.scale = torch.zeros(slots, heads, padded // fmt.block_size, dtype=torch.uint8, device=device)

    def write(self, slots_N: Tensor, x_NHD: Tensor, layer: int, site: str, rounding: NearestRounding) -> None:
        if self.fmt is None:
            self.data[slots_N] = x_NHD.to(self.dtype)
            return
        q = rounding.quantize(layer, site, x_NHD, self.fmt, self.outer)
        if self.scale is None:
            self.data[slots_N] = q.codes
            return
        assert q.scale is not None
        self.data[slots_N] = pack_codes(q.codes)
        self.scale[slots_N] = q.scale

    def read(self, slots: Tensor) -> Tensor:
        """Values [*slots.shape, H, D] in the engine's dtype."""
        if self.fmt is None:
            return self.data[slots]
        if self.scale is None:
            return self.fmt.dequantize(Quantized(self.data[slots], None, self.outer, self.head_dim), self.dtype)
        q = Quantized(unpack_codes(self.data[slots]), self.scale[slots], self.outer, self.head_dim)
        return self.fmt.dequantize(q, self.dtype)

    def copy(self, source: Tensor, target: Tensor) -> None:
        for tensor in (self.data, self.scale):
            if tensor is not None:
                tensor[target] = tensor[source]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


class PagedKV:
    """Storage of K and V for all layers; addressed by slot numbers."""

    def __init__(
        self,
        formats: list[BlockFormat | None],
        *,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size, self.device = num_pages, page_size, device
        make = (num_pages * page_size, num_kv_heads, head_dim, dtype, device)
        self.layers = [(_Store(fmt, *make), _Store(fmt, *make)) for fmt in formats]

    def set_outer(self, layer: int, k_outer: Tensor | None, v_outer: Tensor | None) -> None:
        """Renew the outer scales FP32 [H, 1]; cached tokens of older weights are meaningless after this."""
        self.layers[layer][0].outer, self.layers[layer][1].outer = k_outer, v_outer

    def write(self, layer: int, slots_N: Tensor, k_NHD: Tensor, v_NHD: Tensor, rounding: NearestRounding) -> None:
        """Quantise K and V of N tokens and store them at their slots."""
        k_store, v_store = self.layers[layer]
        k_store.write(slots_N, k_NHD, layer, "k", rounding)
        v_store.write(slots_N, v_NHD, layer, "v", rounding)

    def read(self, layer: int, slots_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantised K and V [B, L, H, D]."""
        k_store, v_store = self.layers[layer]
        return k_store.read(slots_BL), v_store.read(slots_BL)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target): the partly filled last page of a shared prompt."""
        if not pairs:
            return
        offsets = torch.arange(self.page_size, device=self.device)
        source, target = (
            (torch.tensor(pages, device=self.device)[:, None] * self.page_size + offsets).flatten()
            for pages in zip(*pairs, strict=True)
        )
        for stores in self.layers:
            for store in stores:
                store.copy(source, target)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for stores in self.layers for store in stores)
