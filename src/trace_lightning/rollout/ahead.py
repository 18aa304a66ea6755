"""A rollout that is drawn while the trainer works: one thread of its own, one drawing at a time.

    trainer   end(t)  load_weights  begin(t+1) | training step t ............ | end(t+1)  load_weights  begin(t+2) | ...
    thread                                     | draw t+1, reward t+1 ....    |                                    | ...

The engine owns its snapshot, so the trainer's updates do not reach what is being drawn, and weights are handed over
between `end` and `begin`, when nobody draws. What a drawing raises is raised by `end`, in the trainer's thread.

On a GPU the thread draws on a stream of its own, and the SMs are cut in two where they can be (sm_partition.py):

    trainer's thread    its part of the SMs from `enter` to `stop`, whether somebody draws beside it or not
    drawn beside it     the rollout's part
    drawn in between    all SMs, on an ordinary stream: the trainer waits

The trainer's thread does not change back between two drawings: torch's allocator keeps freed memory by stream, and
would keep a step's twice. A drawing's stream waits for what the trainer's stream was given so far (the weights), and
a drawing counts as ended when its stream has run dry, so `end` leaves nothing to wait for.

Every drawing, one that the trainer waits for included, goes through the thread: whatever the engine frees while it
draws was then allocated for the same stream, or for one whose drawing has ended. The record of guidance is what the
trainer's stream reads of it (`hand_over`). Graphs are captured in the thread, for the stream that it draws on, under
the capture mode that lets other threads be (graphs.py).

What was left out: more than one rollout in flight (older completions, and a second snapshot), and a process instead of
a thread: between two looks at the device the engine's thread waits without holding the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from trace_lightning.quantization.guidance import GuidanceRecord
from trace_lightning.rollout.sm_partition import SMPartition

Draw = Callable[[], None]
_LOOK_UP_SECONDS = 0.5


class DrawingStopped(RuntimeError):
    """The run has ended; nobody waits for this drawing any more."""


class Ahead:
    """Draws in a thread; see the top of this file. The thread exists from the first drawing to `stop`."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._drawing: Future[None] | None = None
        self._whole: Any = None  # a stream that has all SMs
        self._partition: SMPartition | None = None
        self._before: Any = None  # the stream that the trainer's thread was on before `enter`
        self._thread: threading.Thread | None = None
        self._is_waited_for = False
        self._stopped = False  # no Event: callbacks are pickled by launchers that spawn

    @property
    def in_flight(self) -> bool:
        """Whether there is a drawing that was begun and not ended."""
        return self._drawing is not None

    @property
    def is_behind(self) -> bool:
        """Whether the caller draws while the trainer works: what is shown then belongs to the trainer."""
        return threading.current_thread() is self._thread and not self._is_waited_for

    def enter(self, partition: SMPartition | None) -> None:
        """Move the caller's thread, the trainer's, to its part of the SMs until `stop`; None shares all of them."""
        if partition is not None:
            self._partition = partition
            self._before = torch.cuda.current_stream(partition.trainer.device)
            _change(self._before, partition.trainer)

    def begin(self, draw: Draw, device: torch.device) -> None:
        """Start `draw` in the thread, after all that was given to the current stream of `device`."""
        self._submit(draw, device, None if self._partition is None else self._partition.rollout)

    def _submit(self, draw: Draw, device: torch.device, stream: Any) -> None:
        assert self._drawing is None, "one drawing at a time: the engine holds one snapshot"
        if device.type == "cuda":
            self._whole = self._whole or torch.cuda.Stream(device)
            stream = stream or self._whole
            stream.wait_stream(torch.cuda.current_stream(device))
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="rollout-ahead")
        self._stopped = False
        self._drawing = self._executor.submit(self._run, draw, stream)

    def _run(self, draw: Draw, stream: Any) -> None:
        self._thread = threading.current_thread()
        if stream is None:
            draw()
            return
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            try:
                draw()
            finally:
                stream.synchronize()

    def end(self) -> None:
        """Wait for the drawing in flight; raises what it raised."""
        assert self._drawing is not None
        self._is_waited_for = True
        try:
            # A signal that comes just before the lock is taken does not wake its owner: look up now and then.
            while not wait([self._drawing], timeout=_LOOK_UP_SECONDS).done:
                pass
            self._drawing.result()
        finally:
            # Ctrl-C may end the wait before the drawing; `stop` then waits for the thread.
            self._is_waited_for, self._drawing = False, None

    def run(self, draw: Draw, device: torch.device) -> None:
        """`draw` in the thread with all SMs, while the trainer waits."""
        self._is_waited_for = True
        self._submit(draw, device, None)
        self.end()

    def check(self) -> None:
        """Called by a drawing between its windows of steps and its reward calls.

        Raises:
            DrawingStopped: if `stop` waits for it to end.
        """
        if self._stopped and threading.current_thread() is self._thread:
            raise DrawingStopped

    def stop(self) -> None:
        """End the thread, and with it what is in flight: nobody takes it, so what it raised is dropped as well.

        Called by the trainer's thread, which then has all SMs again.
        """
        self._stopped = True
        try:
            if self._executor is not None:
                self._executor.shutdown()
        finally:  # a second Ctrl-C may end the wait
            if self._partition is not None:
                _change(self._partition.trainer, self._before)
                self._partition = self._before = None
        self._executor = self._drawing = self._thread = None


def _change(old: Any, new: Any) -> None:
    """Have the caller's thread go on with another stream, after all that it gave to the one before."""
    new.wait_stream(old)
    torch.cuda.set_stream(new)


def hand_over(record: GuidanceRecord | None) -> None:
    """Let the current stream read a record that was written on another: its memory is not reused before that."""
    for table in record.tables.values() if record is not None else ():
        for tensor in table.tensors():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
