"""`RolloutProgressBar`: what a run is doing now. A step of RL is long and has four phases, and one of them takes most.

On a terminal, Lightning's rich bar with the phase in front of it (`rollout 120/512`) and four numbers behind it.
Elsewhere (logs of a cluster or of CI), where a bar is noise or nothing at all, one line every few steps.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trace_lightning.callbacks.folder import shared_console
from trace_lightning.callbacks.history import METRICS, pick
from trace_lightning.callbacks.rollout import Rollout
from trace_lightning.report.charts import PHASES

_WIDTH = 16  # of the phase, fixed so that the bar does not jump
_NARROW = 110  # columns below which bar and times are cut short
_COLOR = "#0072B2"
_SHOWN = {name: METRICS[name] for name in ("reward", "mean_abs_dlogp", "tokens_per_s", *(f"{p}_s" for p in PHASES))}
_SHOWN |= {"heldout": "heldout/reward"}


class RolloutProgressBar(RichProgressBar):
    """Phase, reward, held-out reward, mean |Δ log p| and rollout tokens per second.

    Args:
        refresh_rate: redraws per second on a terminal; 0 switches the display off.
        every_n_steps: training steps per line where there is no terminal.
        max_silence: seconds after which a line is printed whatever `every_n_steps` says.
        leave: keep the bars of finished epochs.
        console_kwargs: arguments of rich's `Console`.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(
        self,
        refresh_rate: int = 8,
        every_n_steps: int = 5,
        max_silence: float = 30.0,
        leave: bool = False,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1; refresh_rate=0 prints nothing")
        theme = RichProgressBarTheme(metrics_text_delimiter="  ", metrics="")
        super().__init__(refresh_rate=refresh_rate, leave=leave, theme=theme, console_kwargs=console_kwargs)
        self.every_n_steps, self.max_silence = every_n_steps, max_silence
        console = Console(**(console_kwargs or {}))
        self.live = console.is_terminal or console.is_jupyter
        self._begin = self._printed_at = time.monotonic()
        self._first_step = 0
        self._phase = ""

    @property
    def is_enabled(self) -> bool:
        """Whether a bar is drawn; lines instead of a bar do not count."""
        return super().is_enabled and self.live

    @property
    def prints_lines(self) -> bool:
        """Whether this rank prints lines instead of a bar."""
        return super().is_enabled and not self.live

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the rollout tell its phases."""
        super().setup(trainer, pl_module, stage)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Rollout) and self.is_enabled:
                callback.on_phase, callback.progress = self.show_phase, self.show_progress

    def show_phase(self, phase: str) -> None:
        """Name the phase that begins now."""
        self._phase = "" if phase == "idle" else phase
        self._describe(self._phase)

    def show_progress(self, done: int, total: int) -> None:
        """Count the finished sequences of the rollout."""
        self._describe(f"{self._phase} {done}/{total}", f"{done}/{total}")

    def _describe(self, training: str, evaluation: str = "") -> None:
        task = self._active_task()
        if self.progress is not None and task is not None:
            text = training if self.trainer.training else f"held out {evaluation}"
            self.progress.update(task, description=f"{text:<{_WIDTH}}", visible=True)

    def _active_task(self) -> Any:
        if self.trainer.sanity_checking:
            return self.val_sanity_progress_bar_id
        if self.trainer.validating:
            return self.val_progress_bar_id
        if self.trainer.testing:
            return self.test_progress_bar_id
        return self.predict_progress_bar_id if self.trainer.predicting else self.train_progress_bar_id

    def configure_columns(self, trainer: pl.Trainer) -> list[ProgressColumn]:
        """Phase, bar, steps, time gone and time left; the metrics follow, and get the room in a narrow terminal."""
        narrow = shared_console().width < _NARROW
        bar = BarColumn(10 if narrow else 20, complete_style=_COLOR, finished_style=_COLOR)
        elapsed = [] if narrow else [TimeElapsedColumn()]
        left = [TextColumn("[dim]left"), TimeRemainingColumn()]
        return [TextColumn("{task.description}"), bar, MofNCompleteColumn(), *elapsed, *left]

    @property
    def sanity_check_description(self) -> str:
        """Before the first phase is known."""
        return f"{'held out':<{_WIDTH}}"

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning's "Epoch 0/-2" says nothing where a run is counted in steps.
        return f"{self._phase or 'starting':<{_WIDTH}}"

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What stands behind the bar, formatted."""
        return short_metrics(pick(_SHOWN, trainer.callback_metrics))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begin, self._first_step = time.monotonic(), trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._describe("done")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advance the bar, or print a line if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.prints_lines:
            step, now = trainer.global_step, time.monotonic()
            first, last = step == self._first_step + 1, step == trainer.max_steps
            silent = now - self._printed_at >= self.max_silence
            if first or last or silent or (trainer.fit_loop.total_batch_idx + 1) % self.every_n_steps == 0:
                self._print(trainer, self._line(trainer, now))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As Lightning, and a line with the held-out reward."""
        super().on_validation_end(trainer, pl_module)
        heldout = pick(_SHOWN, trainer.callback_metrics).get("heldout")
        if self.prints_lines and heldout is not None:
            self._print(trainer, f"held-out reward {heldout:.3f}")

    def _print(self, trainer: pl.Trainer, text: str) -> None:
        self._printed_at = time.monotonic()
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        count = f"{trainer.global_step:>{max(1, len(total) - 1)}}{total}"
        shared_console().print(f"step {count}  {text}", highlight=False, soft_wrap=True)

    def _line(self, trainer: pl.Trainer, now: float) -> str:
        values = pick(_SHOWN, trainer.callback_metrics)
        parts = [f"{name} {value}" for name, value in short_metrics(values).items()]
        parts += [f"{phase} {values[f'{phase}_s']:.2f}s" for phase in PHASES if f"{phase}_s" in values]
        done = trainer.global_step - self._first_step
        if 0 < trainer.global_step < trainer.max_steps and done > 0:
            left = (now - self._begin) / done * (trainer.max_steps - trainer.global_step)
            parts.append(f"left {timedelta(seconds=round(left))}")
        return "  ".join(parts)


def short_metrics(values: dict[str, float]) -> dict[str, str]:
    """Names and numbers as short as they can be read; what was not measured is left out."""
    formats = {
        "reward": ("reward", lambda v: f"{v:.3f}"),
        "heldout": ("held-out", lambda v: f"{v:.3f}"),
        "mean_abs_dlogp": ("|Δlogp|", lambda v: "0" if v == 0 else f"{v:.1e}"),
        "tokens_per_s": ("tok/s", lambda v: f"{v:,.0f}"),
    }
    return {label: show(values[name]) for name, (label, show) in formats.items() if name in values}
