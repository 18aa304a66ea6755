"""Signals and lost parents: how a run of several ranks is stopped, and how no rank of it is left behind.

    Ctrl-C, SIGTERM, SIGUSR1   noted by `StopSignals`; ends the rollout at its next window, then raised on every rank
    rank zero is gone          ranks that it started notice within a second (`ParentWatch`)
    another rank is gone       the launcher ends the others: torchrun, srun -K, Lightning's observer within 5 s

Lightning's own handler of SIGTERM enters a collective from inside the handler, wherever the rank may be, and its
observer kills rank zero once another rank has exited with an error, also while it writes the last checkpoint. Both are
kept from doing so here.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from trace_lightning.ranks import JointInterrupt, JointTermination

_POLL_SECONDS = 1.0
_LINGER_SECONDS = 60.0  # for rank zero to write its files
_NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes Ctrl-C, SIGTERM and SIGUSR1 in a run of several ranks; a second one of a kind acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._launcher: Any = None

    def install(self, trainer: pl.Trainer) -> None:
        """Take the place of the present handlers, those of Lightning included; not in a thread or a single process."""
        if trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            self.received, self._launcher = None, trainer.strategy.launcher
            self._before = {number: signal.signal(number, self._note) for number in _NOTED}

    def restore(self) -> None:
        """Put the handlers of before back."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == number:
            self.restore()
            raise KeyboardInterrupt
        self.received = number
        if self._launcher is not None and number != signal.SIGINT:  # Ctrl-C reaches the whole terminal by itself
            self._launcher.kill(number)

    def error(self) -> BaseException | None:
        """What to raise on every rank, if a signal has come."""
        if self.received is None:
            return None
        return JointInterrupt() if self.received == signal.SIGINT else JointTermination()

    def check(self) -> None:
        """Leave what is going on, if a signal has come."""
        if (error := self.error()) is not None:
            raise error


class ParentWatch(threading.Thread):
    """Ends a rank that Lightning's launcher started once the process of rank zero is gone.

    Without it the rank would wait in a collective until the time-out of the process group, half an hour by default.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True, name="parent-watch")
        self.rank, self.parent, self.is_ending = rank, os.getppid(), False

    @classmethod
    def start_for(cls, trainer: pl.Trainer) -> ParentWatch | None:
        """Watch, if rank zero started this process."""
        environment = trainer.strategy.cluster_environment if trainer.world_size > 1 else None  # type: ignore[attr-defined]
        if not isinstance(environment, LightningEnvironment) or environment.local_rank() == 0:
            return None
        watch = cls(trainer.global_rank)
        watch.start()
        return watch

    def run(self) -> None:
        """Look every second."""
        while os.getppid() == self.parent:
            time.sleep(_POLL_SECONDS)
        if not self.is_ending:
            print(f"rank {self.rank}: the process that started this rank is gone; exiting", file=sys.stderr, flush=True)
        os._exit(1)

    def linger_at_exit(self) -> None:
        """After a joint error: let rank zero end first, for Lightning kills it once another rank has failed."""
        self.is_ending = True
        atexit.register(self.join, _LINGER_SECONDS)
