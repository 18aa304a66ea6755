"""When a step runs as it is and when from a graph; graphs themselves are tested on a GPU (test_gpu_engine.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trace_lightning.rollout.graphs import BUCKETS, GraphCache, length_bucket, row_bucket


class Captured:
    """A graph that replays by calling the step."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    monkeypatch.setattr(GraphCache, "_capture", lambda self, step: Captured(step))
    return GraphCache()


def test_the_second_step_of_a_shape_is_captured(cache: GraphCache) -> None:
    ran: list[int] = []
    for _ in range(3):
        cache.run("shape", lambda: ran.append(len(cache)))
    assert ran == [0, 1, 1]
    assert cache.num_replays == 2


def test_a_step_that_failed_is_not_captured_next(cache: GraphCache) -> None:
    """It may have failed before its kernels were compiled, and compiling must not happen during a capture."""

    def fail() -> None:
        raise RuntimeError("out of memory")

    seen: list[Any] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.run("shape", fail)
    cache.run("shape", lambda: seen.append(len(cache)))
    assert seen == [0]


def test_a_cleared_cache_starts_anew(cache: GraphCache) -> None:
    for _ in range(2):
        cache.run("shape", lambda: None)
    cache.clear()
    assert (len(cache), cache.num_replays) == (0, 0)
    cache.run("shape", lambda: None)
    assert len(cache) == 0


def test_every_stream_has_graphs_of_its_own(cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels would run on the SMs of another; the default stream's are captured on one of torch's."""
    streams = iter(["default", "default", "part", "part", "part", "default"])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: next(streams))
    lengths = []
    for _ in range(6):
        cache.run("shape", lambda: None)
        lengths.append(len(cache))
    assert lengths == [0, 1, 1, 2, 2, 2]
    assert cache.num_replays == 4
    assert [stream for stream, _ in cache._graphs] == [None, "part"]


@pytest.mark.parametrize("rows", [1, 3, 17, 511, 512, 513, 640, 641])
def test_buckets_hold_their_rows(rows: int) -> None:
    bucket = row_bucket(rows)
    assert rows <= bucket
    assert bucket in BUCKETS or bucket % 128 == 0
    assert row_bucket(bucket) == bucket


@pytest.mark.parametrize(("length", "bucket"), [(1, 512), (512, 512), (513, 1024), (4096, 4096), (4097, 8192)])
def test_lengths_round_up_to_powers_of_two(length: int, bucket: int) -> None:
    assert length_bucket(length) == bucket
