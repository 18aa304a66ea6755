"""Several ranks as one run: they fail together, they stop together, and none outlives the others.

Collectives match only if every rank enters them, and a rollout is where ranks part: its length differs, and the reward
is the user's code. What a rank meets there is therefore kept until all ranks have ended theirs, and raised on all of
them at one point (`raise_together`). From that point a checkpoint can still be written, and every rank exits by itself.

    error in rollout or reward   kept -> raised on every rank as `RankError`, naming the ranks it came from
    Ctrl-C, SIGTERM, SIGUSR1     noted by `StopSignals`; ends the rollout at its next window, then raised on every rank
    error elsewhere              that rank exits; its launcher ends the others (torchrun, srun -K, Lightning's observer)
    rank zero is gone            ranks that it started notice within seconds (`ParentWatch`)

Lightning's own handler of SIGTERM enters a collective from inside the handler, wherever the rank may be, and its
observer kills rank zero once another rank has exited with an error, also while it writes the last checkpoint. Both are
kept from doing so here. What was left out: heartbeats over the network, which torchrun and SLURM have.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

log = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_LINGER_SECONDS = 60.0  # for rank zero to write its files
_NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RankError(ValueError):
    """An error of one rank or more, raised on every rank at the same point; one of them should print it."""

    def __init__(self, message: str, *, is_mine_to_say: bool) -> None:
        super().__init__(message)
        self.is_mine_to_say = is_mine_to_say


class JointInterrupt(KeyboardInterrupt):
    """Ctrl-C, raised on every rank at the same point."""


class JointTermination(SIGTERMException):
    """A signal of the cluster, raised on every rank at the same point."""


def is_joint(trainer: pl.Trainer, exception: BaseException) -> bool:
    """Whether every rank is at the same point, so that collectives still match."""
    return trainer.world_size == 1 or isinstance(exception, RankError | JointInterrupt | JointTermination)


def raise_together(trainer: pl.Trainer, error: BaseException | None) -> None:
    """Raise on all ranks if any of them brings an error; collective. One process raises its error as it is.

    Raises:
        RankError: naming the ranks and what they met.
        JointInterrupt: if ranks were only asked to stop, by Ctrl-C.
        JointTermination: if ranks were only asked to stop, by another signal.
    """
    if trainer.world_size == 1:
        if error is not None:
            raise error
        return
    failed = torch.tensor(int(error is not None), device=trainer.strategy.root_device)
    if not int(trainer.strategy.reduce(failed, reduce_op="max")):
        return
    met: list[tuple[str, str] | None] = [None] * trainer.world_size
    mine = None if error is None else (type(error).__name__, str(error))
    torch.distributed.all_gather_object(met, mine)
    stops: dict[str, type[BaseException]] = {kind.__name__: kind for kind in (JointInterrupt, JointTermination)}
    texts = {rank: f"{what[0]}: {what[1]}" for rank, what in enumerate(met) if what and what[0] not in stops}
    if not texts:
        raise max((stops[what[0]] for what in met if what), key=lambda kind: kind is JointTermination)()
    if error is not None and not isinstance(error, ValueError):
        log.error("rank %d failed", trainer.global_rank, exc_info=error)
    raise RankError(_join(texts, trainer.world_size), is_mine_to_say=trainer.is_global_zero) from error


@contextmanager
def together(trainer: pl.Trainer, signals: StopSignals) -> Iterator[None]:
    """Block without collectives whose error on one rank, or a signal, is raised on all at its end; itself collective.

    Raises:
        RankError, JointInterrupt, JointTermination: as `raise_together`.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, JointInterrupt, JointTermination) as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    raise_together(trainer, signals.error or error)


def _join(texts: Mapping[int, str], world_size: int) -> str:
    """One sentence per different text, led by the ranks that it came from."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    if list(map(len, ranks.values())) == [world_size]:
        return f"on every rank: {next(iter(ranks))}"
    return "; ".join(f"on rank {', '.join(map(str, found))}: {text}" for text, found in ranks.items())


def check_same_settings(trainer: pl.Trainer, settings: Mapping[str, Any]) -> None:
    """Compare settings over ranks; collective.

    Raises:
        RankError: on every rank, if one runs with other settings than rank zero: they would train different things.
    """
    if trainer.world_size == 1:
        return
    own = {name: repr(value) for name, value in settings.items()}
    found: list[dict[str, str]] = [{}] * trainer.world_size
    torch.distributed.all_gather_object(found, own)
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() | other.keys()):
            if found[0].get(name) != other.get(name):
                raise RankError(
                    f"the ranks were started with different settings: {name} is {found[0].get(name)} on rank 0 and "
                    f"{other.get(name)} on rank {rank}. Start every rank with the same configuration and data.",
                    is_mine_to_say=trainer.is_global_zero,
                )


class StopSignals:
    """Notes Ctrl-C, SIGTERM and SIGUSR1 in a run of several ranks; a second one of a kind acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._launcher: Any = None

    def install(self, trainer: pl.Trainer) -> None:
        """Take the place of the present handlers, those of Lightning included; not in a thread or a single process."""
        if trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            self._launcher = trainer.strategy.launcher
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

    @property
    def error(self) -> BaseException | None:
        """What to bring to `raise_together`, if a signal has come."""
        if self.received is None:
            return None
        return JointInterrupt() if self.received == signal.SIGINT else JointTermination()

    def check(self) -> None:
        """Leave what is going on, if a signal has come."""
        if (error := self.error) is not None:
            raise error


class ParentWatch(threading.Thread):
    """Ends a rank that Lightning's launcher started once the process of rank zero is gone.

    Without it the rank would wait in a collective until the time-out of the process group, half an hour by default.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True, name="parent-watch")
        self.rank, self.parent, self.code = rank, os.getppid(), 1

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
        print(f"rank {self.rank}: the process that started this rank is gone; exiting", file=sys.stderr, flush=True)
        os._exit(self.code)

    def linger_at_exit(self) -> None:
        """After a joint error: let rank zero end first, for Lightning kills it once another rank has failed."""
        atexit.register(self.join, _LINGER_SECONDS)
