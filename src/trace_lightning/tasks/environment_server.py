"""The process behind `environment_pool.Processes`: a child per environment, messages passed on, the clock watched.

    trainer -> server    the task's factory, once; then ("start", number, problem), ("step", number, text, limit),
                         ("end", number)
    server -> trainer    None when ready, or a traceback; then (number, Step or Failure, seconds) for each step
    server <-> child     a text, and the answer to it; the pipe's end is the end of the conversation

The server runs nothing of the user's after the import, and never waits for a child to read (outbox.py), so it cannot
hang. A child that is over its time is killed, and dies with the server in any case, as the server does with the trainer
(process.py).
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from trace_lightning.tasks.base import Failure
from trace_lightning.tasks.environment import Playing
from trace_lightning.tasks.outbox import Outbox, ready
from trace_lightning.tasks.process import ending, parent_lives

_CLOSE_LIMIT = 5.0  # seconds for an environment to clean up
_MESSAGES_AT_ONCE = 32  # of the trainer, before children are looked at again
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class _Child:
    """A forked environment; `deadline` None while nothing is asked of it, `limit` as the trainer gave it."""

    number: int
    pid: int
    outbox: Outbox
    deadline: float | None = None
    limit: float = 0.0
    ended: bool = False

    @property
    def connection(self) -> Connection:
        return self.outbox.connection

    def ask(self, text: str | None, limit: float) -> None:
        """Send it a turn, or None for the end, and start its clock."""
        self.limit, self.deadline = limit, time.monotonic() + limit
        self.outbox.put(pickle.dumps(text))

    @property
    def seconds(self) -> float:
        """Since it was asked."""
        return 0.0 if self.deadline is None else time.monotonic() - self.deadline + self.limit

    def bury(self) -> str:
        """Kill it, which does not change the status of one that has ended already; how it ended."""
        self.deadline = None
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        return ending(os.waitstatus_to_exitcode(status))


class _Server:
    def __init__(self, trainer: Connection, make: Any) -> None:
        self.trainer, self.make = trainer, make
        self.children: dict[int, _Child] = {}
        self.leaving: list[_Child] = []  # their conversations are over

    def serve(self) -> None:
        """Until the trainer closes its end."""
        while True:
            everyone = [*self.children.values(), *self.leaving]
            by_connection = {child.connection: child for child in everyone}
            soonest = min((child.deadline for child in everyone if child.deadline is not None), default=None)
            timeout = None if soonest is None else max(0.0, soonest - time.monotonic())
            readable = ready([child.outbox for child in everyone], timeout, self.trainer)
            for connection in readable - {self.trainer}:
                self._answered(by_connection[connection])
            for child in everyone:
                if child.deadline is not None and child.deadline <= time.monotonic():
                    self._lost(child, Failure(f"timed out after {child.limit:g} s", timed_out=True))
            try:
                for _ in range(_MESSAGES_AT_ONCE):
                    if self.trainer not in readable or not self.trainer.poll():
                        break
                    self._do(*self.trainer.recv())
            except EOFError:
                return

    def _do(self, what: str, number: int, *arguments: Any) -> None:
        if what == "start":
            self.children[number] = self._fork(number, arguments[0])
            return
        child = self.children.get(number)
        if what == "step":
            text, limit = arguments
            if child is None:  # it died before it was asked anything
                self.trainer.send((number, Failure("its process died"), 0.0))
                return
            child.ask(text, limit)
        elif child is not None:
            del self.children[number]
            child.ended = True
            self.leaving.append(child)
            child.ask(None, _CLOSE_LIMIT)

    def _fork(self, number: int, problem: bytes) -> _Child:
        ours, theirs = Pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, self.trainer, *(c.connection for c in [*self.children.values(), *self.leaving])):
                connection.close()
            try:
                _play(theirs, self.make, problem, server)
            finally:
                os._exit(0)
        theirs.close()
        return _Child(number, pid, Outbox(ours))

    def _answered(self, child: _Child) -> None:
        try:
            answer = child.connection.recv_bytes()
        except (EOFError, OSError):  # the latter from one that broke off in the middle of a message
            self._lost(child, None)
            return
        if child.ended:
            return
        self.trainer.send((child.number, pickle.loads(answer), child.seconds))
        child.deadline = None

    def _lost(self, child: _Child, failure: Failure | None) -> None:
        """A child that is gone, or has to be; the trainer hears of it if it waits for an answer."""
        asked, seconds = child.deadline is not None, child.seconds
        how = child.bury()
        if child.ended:
            self.leaving.remove(child)
            return
        del self.children[child.number]
        if asked:
            self.trainer.send((child.number, failure or Failure(f"its process {how}"), seconds))


def _play(connection: Connection, make: Any, problem: bytes, server: int) -> None:
    """In the child: answer turns until the conversation is over."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    if "numpy" in sys.modules:  # Python's own generator is seeded anew by the fork
        sys.modules["numpy"].random.seed()
    playing = Playing(make, pickle.loads(problem))
    while (text := connection.recv()) is not None:
        connection.send(playing.step(text))
    playing.close()


def main(descriptor: int, lifeline: int) -> None:
    """Serve the trainer at the other end of `descriptor`, for as long as that of `lifeline` is open."""
    if not parent_lives(lifeline):
        return
    trainer = Connection(descriptor)
    try:
        make = pickle.loads(trainer.recv_bytes())
    except Exception:  # an import of the user's that fails here; the pool raises it with this traceback
        trainer.send(traceback.format_exc())
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pipe per child, and those that leave take their time
    gc.freeze()  # a child's garbage collector need not touch, and so copy, what it shares with the server
    trainer.send(None)
    _Server(trainer, make).serve()
