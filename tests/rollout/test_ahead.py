"""The thread that draws: one drawing at a time, its errors in the caller's thread, and nothing left behind."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from trace_lightning.quantization.guidance import GuidanceRecord, SiteTable
from trace_lightning.recipe import GuidanceConfig
from trace_lightning.rollout.ahead import Ahead, DrawingStopped, hand_over
from trace_lightning.rollout.sm_partition import SMPartition

CPU = torch.device("cpu")


@pytest.fixture
def ahead():
    thread = Ahead()
    yield thread
    thread.stop()
    assert not [t for t in threading.enumerate() if t.name.startswith("rollout-ahead")]


def test_draws_beside_the_caller_and_knows_who_waits(ahead: Ahead) -> None:
    began, go_on, seen = threading.Event(), threading.Event(), []

    def draw() -> None:
        seen.append(ahead.is_behind)
        began.set()
        assert go_on.wait(10)
        while ahead.is_behind:  # until the caller has come to wait
            time.sleep(0.001)
        seen.append(ahead.is_behind)

    ahead.begin(draw, CPU)
    assert began.wait(10)
    assert ahead.in_flight
    assert not ahead.is_behind  # the caller is the trainer
    go_on.set()
    ahead.end()
    assert seen == [True, False]
    assert not ahead.in_flight
    ahead.run(lambda: seen.append(ahead.is_behind), CPU)
    assert seen[-1] is False


@pytest.mark.parametrize("error", [MemoryError("no pages are left"), KeyboardInterrupt()])
def test_what_a_drawing_raises_comes_out_of_end_and_the_next_one_runs(ahead: Ahead, error: BaseException) -> None:
    def draw() -> None:
        raise error

    ahead.begin(draw, CPU)
    with pytest.raises(type(error)) as caught:
        ahead.end()
    assert caught.value is error
    done = []
    ahead.run(lambda: done.append(1), CPU)
    assert done == [1]


def test_stop_ends_what_is_in_flight_at_its_next_check(ahead: Ahead) -> None:
    began, ended = threading.Event(), []

    def draw() -> None:
        began.set()
        try:
            while True:
                ahead.check()
                time.sleep(0.001)
        except DrawingStopped:
            ended.append(True)
            raise

    ahead.begin(draw, CPU)
    assert began.wait(10)
    ahead.check()  # of the caller itself: nothing to end
    ahead.stop()
    assert ended == [True]
    assert not ahead.in_flight
    ahead.run(lambda: ahead.check(), CPU)  # another run begins


class Stream:
    """A stream that keeps the names of those it waited for, and how often it was waited for."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str) -> None:
        self.name, self.waited, self.dried = name, [], 0

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)

    def synchronize(self) -> None:
        self.dried += 1


def test_the_trainer_stays_on_its_part_and_a_drawing_it_waits_for_has_all_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of stream waits for the one before, and a second run begins where the first one began."""
    default, whole, rollout, trainer = map(Stream, ("default", "whole", "rollout", "trainer"))
    current = threading.local()

    @contextlib.contextmanager
    def on(stream: Stream):
        current.stream = stream
        yield

    for name, fake in {
        "Stream": lambda device: whole,
        "current_stream": lambda device: current.stream,
        "set_stream": lambda stream: setattr(current, "stream", stream),
        "stream": on,
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    current.stream, ahead, seen = default, Ahead(), []
    draw = lambda: seen.append(current.stream.name)  # noqa: E731
    for _ in range(2):
        ahead.run(draw, Stream.device)  # a validation before the first step
        ahead.enter(SMPartition(rollout, trainer, 32, 100))
        assert current.stream is trainer
        ahead.run(draw, Stream.device)
        ahead.begin(draw, Stream.device)
        ahead.end()
        assert current.stream is trainer
        ahead.stop()
        ahead.stop()
        assert current.stream is default
    assert seen == 2 * ["whole", "whole", "rollout"]
    assert whole.waited == 2 * ["default", "trainer"]
    assert rollout.waited == 2 * ["trainer"]
    assert trainer.waited == 2 * ["default"]
    assert default.waited == 2 * ["trainer"]
    assert (whole.dried, rollout.dried) == (4, 2)


def test_ctrl_c_while_the_thread_ends_leaves_nobody_on_a_part(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    default, rollout, trainer = map(Stream, ("default", "rollout", "trainer"))
    current = [default]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    ahead.run(lambda: None, CPU)
    ahead.enter(SMPartition(rollout, trainer, 32, 100))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ahead._executor, "shutdown", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ahead.stop()
    assert current == [default, trainer, default]


@pytest.mark.gpu
def test_on_a_gpu_weights_are_there_before_and_tokens_after() -> None:
    """The drawing reads what the caller's stream wrote last, on another stream, and the caller reads what it wrote."""
    device, ahead = torch.device("cuda", torch.cuda.current_device()), Ahead()
    weights, drawn, streams = torch.zeros(2**24, device=device), torch.zeros(2**24, device=device), []

    def draw() -> None:
        streams.append(torch.cuda.current_stream(device))
        drawn.copy_(weights * 2)

    for value in range(1, 6):
        for _ in range(20):  # work that is still queued when the drawing begins
            weights.add_(1)
        weights.fill_(value)
        ahead.begin(draw, device)
        ahead.end()
        assert bool((drawn == 2 * value).all())
    ahead.stop()
    assert len(set(streams)) == 1
    assert streams[0] != torch.cuda.current_stream(device)


@pytest.mark.gpu
def test_on_a_gpu_a_record_is_not_overwritten_while_the_trainer_reads_it() -> None:
    """Freed by the trainer, whose stream has yet to read it, while the next drawing asks for as much."""
    device, ahead, size = torch.device("cuda", torch.cuda.current_device()), Ahead(), 2**26
    found: list[GuidanceRecord] = []

    def record(value: int) -> GuidanceRecord:
        codes = torch.full((size,), value, dtype=torch.uint8, device=device)
        tables = {(0, "k"): SiteTable(scale=codes[:1], codes=codes, outer=None, audit=None)}
        return GuidanceRecord(GuidanceConfig(mode="parity"), tables, torch.zeros(0), policy_version=0)

    ahead.run(lambda: found.append(record(1)), device)
    mine = found.pop()
    hand_over(mine)
    freed = threading.Event()
    ahead.begin(lambda: freed.wait(10) and found.append(record(3)), device)
    torch.cuda._sleep(200_000_000)  # the trainer's stream is behind
    total = mine.tables[0, "k"].codes.sum(dtype=torch.int64)
    del mine
    freed.set()
    ahead.end()
    ahead.stop()
    assert int(total) == size
