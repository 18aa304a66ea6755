"""Several ranks as one run: what one of them meets is raised on all, at the same point.

Collectives match only if every rank enters them, and a rollout is where ranks part: its length differs, and the reward
is the user's code. What a rank meets there is therefore kept until all ranks have ended theirs, and raised on all of
them at one point (`together`). From that point a checkpoint can still be written, and every rank exits by itself.

    error in rollout, reward, set-up   kept -> raised on every rank as `RankError`, naming the ranks it came from
    Ctrl-C, SIGTERM, SIGUSR1           noted (callbacks/signals.py), then raised on every rank in the same way
    error elsewhere                    that rank exits, and its launcher ends the others

What was left out: heartbeats over the network, which torchrun and SLURM have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

log = logging.getLogger(__name__)


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
def together(trainer: pl.Trainer, asked_to_stop: Callable[[], BaseException | None] = lambda: None) -> Iterator[None]:
    """Block in which ranks part; an error of one of them is raised on all at its end. Collective at its end alone.

    Args:
        trainer: of the run.
        asked_to_stop: gives what to raise if the run was asked to stop meanwhile.

    Raises:
        RankError: and the others that `raise_together` raises.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, JointInterrupt, JointTermination) as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    raise_together(trainer, asked_to_stop() or error)


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
