"""`RunCheckpoint`: keeps `checkpoints/last.ckpt` up to date, also when a run is interrupted or breaks.

A step of RL is long, so Ctrl-C mostly hits the middle of one: the data loader has handed its prompts out and the
rollout has been drawn, but nothing was learned. A checkpoint taken there as it is would skip these prompts on resume.
Loader and rollout counter are therefore put back to the end of the last complete step, if no optimizer step came after
it.

Beside what Lightning stores, a checkpoint holds the random states of every rank. It is written whole or not at all
(`WholeFileIO`); if the disk is full the run ends with that, on every rank, and the last complete checkpoint is intact.

Lightning's ModelCheckpoint is left for choosing the best of several checkpoints; here there is one file and no choice.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from trace_lightning.callbacks.checkpoint_io import WholeFileIO
from trace_lightning.callbacks.folder import run_folder
from trace_lightning.callbacks.random_state import gather_random, restore_random
from trace_lightning.callbacks.rollout import Rollout
from trace_lightning.ranks import is_joint, raise_together

log = logging.getLogger(__name__)
_RANDOM = "random_states"  # of every rank, in a checkpoint


class RunCheckpoint(Checkpoint):
    """Saves after every validation, every n steps, at the end, and on exceptions.

    Args:
        every_n_steps: optimizer steps between two checkpoints, beside those after validations; None for no more.
        only_on_exception: save on exceptions and nowhere else; with another `filename`, for use beside ModelCheckpoint.
        filename: without its extension.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(
        self, every_n_steps: int | None = None, only_on_exception: bool = False, filename: str = "last"
    ) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1, or null")
        self.every_n_steps, self.only_on_exception, self.filename = every_n_steps, only_on_exception, filename
        self._folder: Path | None = None
        self._saved_at = -1  # optimizer steps behind the file
        self._random: list[dict[str, Any]] | None = None  # of every rank, from the checkpoint that is resumed
        self._settled: tuple[int, Any, dict[str, Any]] | None = None  # after the last complete step
        self._incomplete = False

    @property
    def path(self) -> Path | None:
        """The file; None in a `fast_dev_run`."""
        return None if self._folder is None else self._folder / "checkpoints" / f"{self.filename}.ckpt"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # Lightning's default, no choice of the user's
            trainer.strategy.checkpoint_io = WholeFileIO()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._random is not None:  # here, since whatever comes before may draw
            restore_random(self._random, trainer)
        self._saved_at = trainer.global_step  # what a run starts from is on disk already
        self._settle(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note where a resumed run would go on; save if it is time."""
        self._raise_if_not_written(trainer, self._saved_at)  # by another callback
        self._settle(trainer)
        if self.every_n_steps is not None and trainer.global_step - self._saved_at >= self.every_n_steps:
            self._save_regularly(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save with the metrics that belong to the weights."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save_regularly(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_regularly(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save what was learned since the last checkpoint."""
        if trainer.state.fn != "fit" or self._settled is None:
            return
        if not is_joint(trainer, exception):
            # Saving is a collective, and the other ranks are still elsewhere: they would wait for each other for ever.
            what = f"{type(exception).__name__}: {str(exception).partition(chr(10))[0]}"
            log.error("rank %d failed by itself: %s", trainer.global_rank, what)
            if self.path is not None and self.path.exists():
                log.error("the last checkpoint is that of step %d: --ckpt_path %s", self._saved_at, self.path)
            return
        if self._saved_at == trainer.global_step:
            return
        self._incomplete = True
        self._save(trainer)
        if self.path is not None:
            config = self.path.parents[1] / "config.yaml"
            rank_zero_info(f"resume: trace-fit fit --config {config} --ckpt_path {self.path}")

    def _save_regularly(self, trainer: pl.Trainer) -> None:
        if not self.only_on_exception and self._saved_at != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if self.path is not None:
            before, self._saved_at = self._saved_at, trainer.global_step
            trainer.save_checkpoint(self.path, weights_only=False)
            self._raise_if_not_written(trainer, before)

    def _raise_if_not_written(self, trainer: pl.Trainer, last_good: int) -> None:
        files = trainer.strategy.checkpoint_io
        reason = files.take_error() if isinstance(files, WholeFileIO) else None
        error = None
        if reason is not None:
            good = f"the one of step {last_good} is intact" if last_good > 0 else "there is no earlier one of this run"
            error = ValueError(f"the checkpoint of step {trainer.global_step} could not be written ({reason}); {good}")
        raise_together(trainer, error)

    def _settle(self, trainer: pl.Trainer) -> None:
        loaders = trainer.fit_loop.on_save_checkpoint().get("combined_loader")
        self._settled = (trainer.global_step, copy.deepcopy(loaders), _rollout_states(trainer))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random states; undo a step that was begun and from which nothing was learned."""
        checkpoint[_RANDOM] = gather_random(trainer)
        if not self._incomplete or self._settled is None or self._settled[0] != trainer.global_step:
            return
        _, loaders, rollouts = self._settled
        if loaders is not None:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders
        checkpoint["callbacks"].update(rollouts)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the random states for the start of training."""
        self._random = checkpoint.get(_RANDOM)


def _rollout_states(trainer: pl.Trainer) -> dict[str, Any]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return {c.state_key: dict(c.state_dict()) for c in callbacks if isinstance(c, Rollout)}
