"""The environments of a rollout, seen from the trainer: start one, send it a turn, take whatever answers are there.

    EnvironmentPool         the contract; nothing in it waits but `answers`
      InProcess             calls the environment on the spot
      Processes             a process per environment, behind one server (environment_server.py) that watches the clock

A conversation is known by its number. A process per environment, and not a few workers with many environments each: one
that hangs has to be killed, and may take nobody else's state with it. They are forked by a server that has imported the
task and nothing of torch, so that one costs 3 ms of a core and 2.3 MB, and the trainer holds one pipe in all.

What was left out: environments written with `async`. A slow one costs a sleeping process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any

from trace_lightning.tasks.base import Failure, Task
from trace_lightning.tasks.environment import Playing, Step
from trace_lightning.tasks.pool import START_LIMIT
from trace_lightning.tasks.process import WorkerProcess, packed
from trace_lightning.types import Problem

_WAY_OUT = (
    "Keep plain data, or set environments_in_process=True on the task to run them without a time limit inside the "
    "training process"
)


Answer = tuple[int, Step | Failure, float]


class EnvironmentPool(ABC):
    """Environments in use, by number."""

    @abstractmethod
    def start(self, number: int, problem: Problem) -> None:
        """Begin a conversation; what goes wrong is the answer to its first turn."""

    @abstractmethod
    def step(self, number: int, text: str, limit: float) -> None:
        """Send a turn, to be answered within `limit` seconds."""

    @abstractmethod
    def end(self, number: int) -> None:
        """The conversation is over."""

    @abstractmethod
    def answers(self, wait: float) -> list[Answer]:
        """Answers that came since the last time; if none did, wait for one, up to `wait` seconds.

        Returns:
            Numbers, answers, and the seconds that each took.

        Raises:
            ValueError: the environments cannot be started at all.
        """

    @abstractmethod
    def close(self) -> None:
        """End all that is left; a pool may be used again afterwards."""


def environment_pool(task: Task, max_environments: int) -> EnvironmentPool:
    """The pool that a task asks for; `max_environments` processes at most, if they are processes."""
    return InProcess(task) if task.environments_in_process else Processes(task, max_environments)


class InProcess(EnvironmentPool):
    """Environments of a few lines, called where they stand."""

    def __init__(self, task: Task) -> None:
        self._make = task.environment
        self._playing: dict[int, Playing] = {}
        self._answers: list[Answer] = []

    def start(self, number: int, problem: Problem) -> None:
        self._playing[number] = Playing(self._make, problem)

    def step(self, number: int, text: str, limit: float) -> None:
        begin = time.monotonic()
        answer = self._playing[number].step(text)
        self._answers.append((number, answer, time.monotonic() - begin))

    def end(self, number: int) -> None:
        self._playing.pop(number).close()

    def answers(self, wait: float) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        for playing in self._playing.values():
            playing.close()
        self._playing, self._answers = {}, []


class Processes(EnvironmentPool):
    """A process per environment. The server starts with the first conversation, and stays.

    Beyond `max_environments` a conversation gets its process when another one has ended; its first turn waits for that.
    """

    def __init__(self, task: Task, max_environments: int) -> None:
        self._make: Any = task.environment
        self._max = max_environments
        self._servers: list[_Server] = []  # none or one
        weakref.finalize(self, _stop_all, self._servers)  # after an exception nobody calls `close`
        self._ready, self._deadline = False, 0.0
        self._alive: set[int] = set()
        self._late: dict[int, list[tuple[Any, ...]]] = {}  # messages for environments that have no process yet

    def start(self, number: int, problem: Problem) -> None:
        where = f"the problem of conversation {number} cannot be sent to its environment"
        self._late[number] = [("start", number, packed(problem, where, _WAY_OUT))]
        self._start_late()

    def step(self, number: int, text: str, limit: float) -> None:
        message = ("step", number, text, limit)
        if number in self._late:
            self._late[number].append(message)
        else:
            self._send(message)

    def end(self, number: int) -> None:
        if self._late.pop(number, None) is None:
            self._alive.remove(number)
            self._send(("end", number))
            self._start_late()

    def _start_late(self) -> None:
        while self._late and len(self._alive) < self._max:
            number = next(iter(self._late))
            self._alive.add(number)
            for message in self._late.pop(number):
                self._send(message)

    def answers(self, wait: float) -> list[Answer]:
        found: list[Answer] = []
        server = self._server()
        with contextlib.suppress(queue.Empty):
            while True:
                message = server.inbox.get(timeout=wait) if wait and not found else server.inbox.get_nowait()
                if isinstance(message, _Ended):
                    self._servers.clear()
                    raise ValueError(f"the server of the environments {server.bury()}")
                if self._ready:
                    found.append(message)
                elif message is not None:
                    raise ValueError(f"the task cannot be loaded in the process of its environments:\n{message}")
                self._ready = True
        if not self._ready and time.monotonic() > self._deadline:
            self.close()
            raise ValueError(f"the server of the environments was not ready after {START_LIMIT:g} s of imports")
        return found

    def close(self) -> None:
        _stop_all(self._servers)
        self._alive, self._late = set(), {}

    def _server(self) -> _Server:
        if not self._servers:
            payload = packed(self._make, "the task cannot be sent to the process of its environments", _WAY_OUT)
            self._ready, self._deadline = False, time.monotonic() + START_LIMIT
            server = _Server.start("trace_lightning.tasks.environment_server", payload)
            server.listen()
            self._servers.append(server)
        return self._servers[0]

    def _send(self, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(ConnectionError):  # if it died meanwhile, `answers` hears of that
            self._server().connection.send(message)


class _Ended:
    """What a server says last."""


class _Server(WorkerProcess):
    """The server and its answers. A thread takes them in, so that neither side ever waits with a full pipe."""

    def listen(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (EOFError, OSError):  # the latter from one that broke off in the middle of a message
            self.inbox.put(_Ended())

    def stop(self) -> str:
        """As for any worker, once the thread has seen its end."""
        if self._reader.is_alive():
            self.process.kill()
        self._reader.join()
        return super().stop()


def _stop_all(servers: list[_Server]) -> None:
    while servers:
        servers.pop().stop()
