"""CUDA graphs of the decode step, one per shape, captured when a shape comes up for the second time.

A decode step launches several hundred small kernels; started one by one from Python they cost more time than they take.
A graph replays them all with one call. It fixes addresses and shapes, so a step is captured per

    (rows rounded up to a bucket, longest context rounded up, how tokens are drawn, whether prompts are shared)

and reads everything else, the weights included, from memory that stays where it is. The first step of a new shape runs
without a graph: it compiles what has to be compiled, which must not happen during a capture. The kernels of a graph run
on the SMs that the stream of its capture has (sm_partition.py), so every stream that steps are given to has its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from typing import Any

import torch

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_SHORTEST = 512  # tokens; below it contexts share a graph


def row_bucket(rows: int) -> int:
    """The number of rows that a graph for `rows` sequences has."""
    if rows > BUCKETS[-1]:
        return -(-rows // 128) * 128
    return BUCKETS[bisect.bisect_left(BUCKETS, rows)]


def length_bucket(length: int) -> int:
    """The context length that a graph for contexts of up to `length` tokens is made for: a power of two."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


class GraphCache:
    """Runs steps, from a graph where there is one; `clear` it when anything moved in memory."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all graphs and the memory they hold."""
        self._graphs: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None
        self.num_replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do `step` once: from its graph, else capturing it, else, the first time, as it is."""
        key = (_stream_to_capture(), key)
        if key not in self._graphs:
            if key not in self._seen:
                step()
                self._seen.add(key)  # not before it: a step that failed may have left something uncompiled
                return
            self._graphs[key] = self._capture(step)
        self._graphs[key].replay()
        self.num_replays += 1

    def _capture(self, step: Callable[[], None]) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The trainer may be at work in another thread (rollout/ahead.py): what it does must not end the capture.
        stream = _stream_to_capture()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            step()
        return graph


def _stream_to_capture() -> Any:
    """The current stream; None for the default one, which cannot be captured: torch has an ordinary one for it."""
    if not torch.cuda.is_initialized():
        return None
    stream = torch.cuda.current_stream()
    return None if stream == torch.cuda.default_stream() else stream
