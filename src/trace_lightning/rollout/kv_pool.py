"""The paged KV cache: who owns which page, and the pages of all layers.

    page p of size S holds slots p*S ... p*S + S-1; a slot is one token of one sequence, in every layer
    per layer      K and V as `trace_kernels.kv_pages` lays them out: packed codes and block scales, head by head
    per layer      outer FP32 [H, 1] for K and for V, renewed in place at each weight sync

A prompt's full pages are shared by the samples of its group (reference counts); the last, partly filled page is copied
for each sample, since each writes on in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trace_kernels import BlockFormat
from trace_kernels.kv_pages import KVPages
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
        self.num_pages, self.page_size, self.dtype, self.device = num_pages, page_size, dtype, device

        def pages(fmt: BlockFormat | None) -> KVPages:
            shape = {"num_pages": num_pages, "page_size": page_size, "num_heads": num_kv_heads, "head_dim": head_dim}
            return KVPages.empty(fmt, **shape, dtype=dtype, device=device)

        self.layers = [(pages(fmt), pages(fmt)) for fmt in formats]

    def set_outer(self, layer: int, k_outer: Tensor | None, v_outer: Tensor | None) -> None:
        """Renew the outer scales FP32 [H, 1]; cached tokens of older weights are meaningless after this."""
        for pages, outer in zip(self.layers[layer], (k_outer, v_outer), strict=True):
            if outer is not None:
                assert pages.outer is not None
                pages.outer.copy_(outer)

    def write(self, layer: int, slots_N: Tensor, k_NHD: Tensor, v_NHD: Tensor, rounding: NearestRounding) -> None:
        """Quantise K and V of N tokens and store them at their slots."""
        for pages, site, x_NHD in zip(self.layers[layer], ("k", "v"), (k_NHD, v_NHD), strict=True):
            if pages.fmt is None:
                pages.store_values(slots_N, x_NHD)
            else:
                pages.store(slots_N, rounding.quantize(layer, site, x_NHD, pages.fmt, pages.outer))

    def read(self, layer: int, slots_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantised K and V [B, L, H, D]."""
        k_pages, v_pages = self.layers[layer]
        return k_pages.read(slots_BL, self.dtype), v_pages.read(slots_BL, self.dtype)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target): the partly filled last page of a shared prompt."""
        if not pairs:
            return
        source, target = (torch.tensor(pages, device=self.device) for pages in zip(*pairs, strict=True))
        for layer in self.layers:
            for pages in layer:
                pages.copy_pages(source, target)

    @property
    def nbytes(self) -> int:
        return sum(pages.nbytes for layer in self.layers for pages in layer)
