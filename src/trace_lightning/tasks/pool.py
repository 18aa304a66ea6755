"""Worker processes for rewards, with a time limit per call that needs no signals and no threads.

The pool watches the clock and kills the worker whose call is over time: nothing inside a process can stop a regular
expression that has run away. The other calls go on, and a new worker takes the place.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trace_lightning.tasks.base import Failure, RewardFn, Sample
from trace_lightning.tasks.calls import Outcome, is_async
from trace_lightning.tasks.outbox import Outbox, ready
from trace_lightning.tasks.process import WorkerProcess, packed

START_LIMIT = 300.0  # seconds for a worker to import and prepare the rewards; some load a model
ASYNC_CALLS = 32  # awaited at once by the worker of the asynchronous rewards
_CHECK_SECONDS = 1.0  # between two calls of `check`
_GRACE = 1.0  # seconds beyond its limit that an asynchronous call gets to cancel itself


@dataclass(frozen=True)
class Call:
    """One call to make: the reward's index, its samples, and the row of the first in the rollout."""

    reward: int
    samples: list[Sample]
    first_row: int


@dataclass(eq=False)
class _Worker(WorkerProcess):
    asynchronous: bool = False
    deadline: float | None = None  # to get ready; None once it is
    calls: dict[int, float] = field(default_factory=dict)  # call in flight -> when it is over time

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.connection)

    @property
    def room(self) -> int:
        if self.deadline is not None:
            return 0
        return (ASYNC_CALLS if self.asynchronous else 1) - len(self.calls)

    @property
    def next_deadline(self) -> float:
        return min(self.calls.values(), default=float("inf")) if self.deadline is None else self.deadline


class RewardPool:
    """Runs reward calls in worker processes, which start with the first call and stay.

    Args:
        rewards: what can be called.
        num_workers: processes for synchronous rewards; asynchronous ones share one more. None: one per CPU core this
            process may use, divided among the ranks of the host, at most 8.
        time_limit: seconds per call, for rewards without a limit of their own.

    Raises:
        ValueError: an argument below its minimum.
    """

    def __init__(self, rewards: Sequence[RewardFn], num_workers: int | None = None, time_limit: float = 10.0) -> None:
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"rollout.reward_workers={num_workers} must be at least 1")
        if time_limit <= 0:
            raise ValueError(f"rollout.reward_time_limit={time_limit} must be above 0")
        self.rewards = list(rewards)
        self.num_workers = default_workers() if num_workers is None else num_workers
        self.limits = [time_limit if reward.time_limit is None else reward.time_limit for reward in rewards]
        self.asynchronous = [is_async(reward) for reward in rewards]
        self._workers: list[_Worker] = []
        weakref.finalize(self, _stop_all, self._workers)  # after an exception nobody calls `close`
        self._payload = b""

    def run(self, calls: Sequence[Call], check: Callable[[], None] = lambda: None) -> list[list[Outcome]]:
        """Outcomes of each call, one per sample. A call that is over time, or kills its worker, is a `Failure`.

        `check` is called now and then; what it raises ends the calls.

        Raises:
            ValueError: rewards or problems that cannot be sent, or a return value that is no reward.
        """
        done: dict[int, list[Outcome]] = {}
        waiting = {
            kind: deque(i for i, c in enumerate(calls) if self.asynchronous[c.reward] == kind) for kind in (0, 1)
        }
        clean = False
        try:
            while len(done) < len(calls):
                check()
                self._start_missing(len(waiting[0]), bool(waiting[1]))
                for worker in self._workers:
                    queue = waiting[worker.asynchronous]
                    while queue and worker.room > 0:
                        self._send(worker, queue.popleft(), calls)
                self._collect(calls, done, waiting)
            clean = True
        finally:
            if not clean:
                self.close()  # a reply that nobody waits for must not meet the next rollout
        return [done[i] for i in range(len(calls))]

    def close(self) -> None:
        """Kill the workers; the next call starts new ones."""
        _stop_all(self._workers)

    def _start_missing(self, num_waiting: int, any_asynchronous: bool) -> None:
        busy = sum(bool(worker.calls) for worker in self._workers if not worker.asynchronous)
        have = sum(not worker.asynchronous for worker in self._workers)
        wanted = min(self.num_workers, busy + num_waiting)
        self._workers += [self._start(False) for _ in range(wanted - have)]
        if any_asynchronous and not any(worker.asynchronous for worker in self._workers):
            self._workers.append(self._start(True))

    def _start(self, asynchronous: bool) -> _Worker:
        self._payload = self._payload or _packed(
            self.rewards, "the reward functions cannot be sent to a worker process"
        )
        worker = _Worker.start("trace_lightning.tasks.worker", self._payload, asynchronous)
        worker.asynchronous, worker.deadline = asynchronous, time.monotonic() + START_LIMIT
        return worker

    def _send(self, worker: _Worker, number: int, calls: Sequence[Call]) -> None:
        call = calls[number]
        limit = self.limits[call.reward]
        where = f"the problem of row {call.first_row} cannot be sent to a reward worker"
        job = _packed((number, call.reward, call.samples, call.first_row, limit), where)
        worker.calls[number] = time.monotonic() + limit + _GRACE * worker.asynchronous
        worker.outbox.put(job)  # if it died meanwhile, `_read` sees that on the same connection

    def _collect(self, calls: Sequence[Call], done: dict[int, list[Outcome]], waiting: dict[int, deque[int]]) -> None:
        """Take what is ready, or wait for it; bury the dead and stop who is over time."""
        soonest = min(worker.next_deadline for worker in self._workers)
        patience = min(_CHECK_SECONDS, max(0.0, soonest - time.monotonic()))
        readable = ready([worker.outbox for worker in self._workers], patience)
        for worker in list(self._workers):
            if worker.connection in readable:
                self._read(worker, calls, done)
            late = [number for number, deadline in worker.calls.items() if deadline <= time.monotonic()]
            if late or (worker.deadline is not None and worker.deadline <= time.monotonic()):
                self._stop_late(worker, late, calls, done, waiting)

    def _read(self, worker: _Worker, calls: Sequence[Call], done: dict[int, list[Outcome]]) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):  # the latter from one that broke off in the middle of a message
            self._workers.remove(worker)
            how = worker.bury()
            if worker.deadline is not None:
                raise ValueError(f"a reward worker {how} before it was ready") from None
            for number in worker.calls:
                done[number] = [Failure(f"its worker process {how}")] * len(calls[number].samples)
            worker.calls = {}
            return
        if worker.deadline is not None:
            if isinstance(message, Failure):
                raise ValueError(f"the reward functions cannot be loaded in a worker process:\n{message.traceback}")
            worker.deadline = None
            return
        number, outcomes = message
        if isinstance(outcomes, str):
            raise ValueError(outcomes)
        del worker.calls[number]
        done[number] = outcomes

    def _stop_late(
        self,
        worker: _Worker,
        late: list[int],
        calls: Sequence[Call],
        done: dict[int, list[Outcome]],
        waiting: dict[int, deque[int]],
    ) -> None:
        self._workers.remove(worker)
        worker.stop()
        if worker.deadline is not None:
            raise ValueError(f"a reward worker was not ready after {START_LIMIT:g} s of imports and `prepare`")
        for number in worker.calls:
            if number in late:
                limit = self.limits[calls[number].reward]
                failure = Failure(f"timed out after {limit:g} s", timed_out=True)
                done[number] = [failure] * len(calls[number].samples)
            else:
                waiting[worker.asynchronous].appendleft(number)  # awaited beside one that blocked the loop


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()


def _packed(value: object, complaint: str) -> bytes:
    way_out = "Keep plain data, or set in_process=True on the reward class to run it without a time limit inside the "
    return packed(value, complaint, way_out + "training process")


def default_workers() -> int:
    """Cores this process may use, shared with the other ranks of the host, 1 to 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks))
