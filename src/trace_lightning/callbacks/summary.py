"""`RunSummary`: leaves `summary.json` and `curves.png` beside the logs, whichever way a run ends, and prints a table.

Numbers are collected while the run goes, not read back from a logger, so they are there with every logger and with
none. They travel in the checkpoint: a resumed run reports its whole history, its first reward included. Lightning logs
nothing in its sanity check, which is where we measure the policy before its first step (`num_sanity_val_steps=-1`);
that one value is caught here and handed to the loggers as step 0.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from rich.table import Table

from trace_lightning.callbacks.curves import draw_curves
from trace_lightning.callbacks.folder import run_folder, shared_console, stopped_by_user
from trace_lightning.callbacks.history import METRICS, RunHistory, json_safe, pick, pick_heldout
from trace_lightning.report.files import write_text
from trace_lightning.version import __version__

_ROWS = {
    "divergence": {"mean_abs_dlogp": "|Δ log p| of trainer and rollout, mean", "max_abs_dlogp": "maximum", "k3": "k3"},
    "code_mismatch": {"before": "FP4 codes that differ, before guidance", "after": "after guidance"},
    "throughput": {"rollout_tokens_per_s": "rollout tokens per second", "rollout_share": "rollout's share of the time"},
}


class RunSummary(Callback):
    """Writes `summary.json` (see `RunHistory.summary` for its numbers) and `curves.png`.

    Where codes were audited it writes `guidance_layers.csv` as well: mismatch and D_act of each layer and site over the
    run (`metrics.audit_values`).

    Its `status` is `finished`, `interrupted` (Ctrl-C, SIGTERM) or `failed`, with the error named.

    Args:
        final_validation: measure the held-out reward under the final weights, also where the validation interval does
            not end with the run. Otherwise `heldout.last_step` says which weights the last value belongs to.
    """

    def __init__(self, final_validation: bool = True) -> None:
        self.final_validation = final_validation
        self.history = RunHistory()
        self.status: str | None = None
        self._folder: Path | None = None
        self._begin: float | None = None
        self._step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)
        if stage == "fit":
            self._begin, self.status = time.perf_counter(), None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the weights that this step starts from."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the metrics of the step; the Rollout callback, earlier in the list, has logged its own by now."""
        self.history.steps.append({"step": float(self._step), **pick(METRICS, trainer.callback_metrics)})
        self.history.add_positions(pl_module.measured.position_sums)
        self.history.add_audit(pl_module.measured.audit)
        if self.final_validation and _is_last_step(trainer):
            # Asked to stop, Lightning validates once more; it was about to stop anyway.
            trainer.should_stop = True

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let loggers file the validation under the rollouts behind it; Lightning's own count is one short."""
        if trainer.state.fn == "fit":
            pl_module.log("step", float(trainer.fit_loop.total_batch_idx + 1))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the held-out metrics of a validation inside `fit`."""
        if trainer.state.fn != "fit":
            return
        values = pick_heldout(trainer.callback_metrics)
        if not values:
            return
        self.history.heldout.append({"step": float(trainer.global_step), **values})
        if trainer.sanity_checking:
            for logger in trainer.loggers:
                logger.log_metrics(
                    {f"heldout/{name}": value for name, value in values.items()}, step=trainer.global_step
                )
                logger.save()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, pl_module, "finished")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write down what there is. Before `setup` there is no folder, and nothing to say."""
        if trainer.state.fn == "fit" and self._begin is not None:
            status = "interrupted" if stopped_by_user(exception) else "failed"
            error = None if status == "interrupted" else f"{type(exception).__name__}: {exception}"
            self._write(trainer, pl_module, status, error)
            self._print(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Print last, below what the other callbacks had to say."""
        if stage == "fit" and self.status == "finished":
            self._print(trainer)

    def _write(self, trainer: pl.Trainer, module: Any, status: str, error: str | None = None) -> None:
        assert self._begin is not None
        self.history.seconds, self._begin = self._seconds(), time.perf_counter()
        self.status = status
        self.summary = {
            "status": status,
            "error": error,
            **run_identity(trainer, module),
            "steps": trainer.global_step,
            **self.history.summary(),
            "versions": run_versions(trainer.strategy.root_device),  # the module is on the CPU again by now
        }
        if self._folder is not None and trainer.is_global_zero:
            text = json.dumps(json_safe(self.summary), indent=2, ensure_ascii=False, allow_nan=False)
            write_text(self._folder / "summary.json", text + "\n")
            title = f"{module.path}   {self.summary['task']}   {module.recipe.label}   {trainer.global_step} steps"
            draw_curves(self.history, self._folder / "curves.png", title)
            if rows := self.history.layer_rows():
                write_text(self._folder / "guidance_layers.csv", as_csv(rows))

    def _seconds(self) -> float:
        return self.history.seconds + (0.0 if self._begin is None else time.perf_counter() - self._begin)

    def _print(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            shared_console().print(summary_table(self.summary))
            if self._folder is not None:
                shared_console().print(f"left in {self._folder}", highlight=False, soft_wrap=True)

    def state_dict(self) -> dict[str, Any]:
        """The history so far, as plain numbers."""
        history = dataclasses.asdict(self.history) | {"seconds": self._seconds()}
        return json.loads(json.dumps(history))  # a copy: the lists grow on

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = RunHistory(**state_dict)


def summary_table(summary: dict[str, Any]) -> Table:
    """The numbers of `summary.json` that one looks at first."""
    duration = timedelta(seconds=round(summary["seconds"]))
    heading = f"{summary['status']} after {summary['steps']} steps, {duration}"
    heading += f"\n{summary['model']}, {summary['task']}, {summary['recipe']['label']}"
    table = Table(title=heading, show_header=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    reward, heldout = summary["reward"], summary["heldout"]
    table.add_row("training reward, first and last 5 steps", f"{_number(reward['first'])} → {_number(reward['last'])}")
    first, last = (f"step {heldout[f'{side}_step']}" for side in ("first", "last"))
    if heldout["last"] is None:
        table.add_row("held-out reward", "-", end_section=True)
    elif first == last:
        table.add_row(f"held-out reward, {first}", _number(heldout["first"]), end_section=True)
    else:
        values = f"{_number(heldout['first'])} → {_number(heldout['last'])}"
        table.add_row(f"held-out reward, {first} and {last}", values, end_section=True)
    for i, (name, ends) in enumerate(summary["eval_sets"].items()):
        values = f"{_number(ends['first'])} → {_number(ends['last'])}"
        table.add_row(name, values, end_section=i == len(summary["eval_sets"]) - 1)
    for group, rows in _ROWS.items():
        for i, (name, label) in enumerate(rows.items()):
            table.add_row(label, _number(summary[group][name]), end_section=i == len(rows) - 1)
    return table


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV text with a header; what a row lacks is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.1e}"


def _is_last_step(trainer: pl.Trainer) -> bool:
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    return epochs is not None and 0 <= epochs <= trainer.current_epoch + 1 and trainer.is_last_batch


def run_identity(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """What was run."""
    task = getattr(trainer.datamodule, "task", None)  # type: ignore[attr-defined]
    recipe, seed = module.recipe, os.environ.get("PL_GLOBAL_SEED")
    return {
        "model": module.path,
        "task": None if task is None else type(task).__name__,
        "seed": None if seed is None else int(seed),
        "recipe": {
            **{name: getattr(recipe, name) for name in ("weights", "activations", "kv_cache", "trainer")},
            "guidance": recipe.guidance.mode,
            "label": recipe.label,
        },
    }


def run_versions(device: torch.device) -> dict[str, str]:
    """What it ran with, and on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    return {
        "trace_lightning": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "device": name,
    }
