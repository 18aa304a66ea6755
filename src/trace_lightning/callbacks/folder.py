"""Where a run keeps its files, and where it prints: the two things that the callbacks of this package share."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import rich
from rich.console import Console

_PLAIN_WIDTH = 120  # a log file has no width; rich would assume 80 and cut tables that any viewer shows whole


def run_folder(trainer: pl.Trainer) -> Path | None:
    """`trainer.log_dir`; None in a `fast_dev_run`, which leaves nothing behind. Broadcasts: call it on every rank."""
    folder = trainer.log_dir
    return None if folder is None or trainer.fast_dev_run else Path(folder)  # type: ignore[attr-defined]


def shared_console() -> Console:
    """The console that a live progress bar draws on as well: what we print goes above the bar, not through it."""
    console = rich.get_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PLAIN_WIDTH
    return console


def stopped_by_user(exception: BaseException) -> bool:
    """Whether a run was asked to stop (Ctrl-C, or SIGTERM from a cluster), rather than broken."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    return isinstance(exception, KeyboardInterrupt | SIGTERMException)
