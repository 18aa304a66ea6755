"""`RunReport`: `report.html` in the run's folder, written while the run goes and whichever way it ends.

The page is made from the files that the run has written so far (package `report`), as `trace-fit report` makes it
afterwards. What no other file says travels in `run.json`: the status of a run that goes on, its command, its warnings.
Only rank zero writes.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.callbacks.folder import run_folder, stopped_by_user
from trace_lightning.callbacks.history import json_safe
from trace_lightning.callbacks.summary import run_identity, run_versions
from trace_lightning.report.files import write_text
from trace_lightning.report.page import run_page
from trace_lightning.report.run import COMPLETIONS_FILE, FACTS_FILE, RUNNING, read_run
from trace_lightning.report.samples import SampleReader

log = logging.getLogger(__name__)
_MAX_SHARE = 0.02  # of a run's time that its page may take
_MAX_WARNINGS = 50


class RunReport(Callback):
    """Writes `report.html` and `run.json`.

    Args:
        every_seconds: least time between two pages while the run goes; longer where writing one takes over 2 % of it.

    Raises:
        ValueError: `every_seconds` not above 0.
    """

    def __init__(self, every_seconds: float = 30.0) -> None:
        if every_seconds <= 0:
            raise ValueError(f"every_seconds={every_seconds} must be above 0")
        self.every_seconds = every_seconds
        self._folder: Path | None = None
        self._begin: float | None = None
        self._next = 0.0
        self._cost = 0.0  # seconds that the last page took

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        self._folder = folder if trainer.is_global_zero and stage == "fit" else None
        if self._folder is None:
            return
        self._begin, self._next, self._started = time.perf_counter(), 0.0, time.time()
        self._samples = SampleReader(self._folder / COMPLETIONS_FILE)
        self._warnings = _Warnings(trainer)
        logging.getLogger("trace_lightning").addHandler(self._warnings)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Write if it is time; by now the step before is in the files."""
        if self._begin is not None and time.perf_counter() >= self._next:
            self._write(trainer, pl_module, RUNNING)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer, pl_module, "finished")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Say on the page how it ended."""
        if stopped_by_user(exception):
            self._end(trainer, pl_module, "interrupted")
        else:
            self._end(trainer, pl_module, "failed", f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._begin is not None:
            self._stop()

    def _end(self, trainer: pl.Trainer, module: Any, status: str, error: str | None = None) -> None:
        if self._begin is not None:
            self._write(trainer, module, status, error)
            self._stop()

    def _stop(self) -> None:
        self._begin = None
        logging.getLogger("trace_lightning").removeHandler(self._warnings)

    def _write(self, trainer: pl.Trainer, module: Any, status: str, error: str | None = None) -> None:
        begin = time.perf_counter()
        try:
            for logger in trainer.loggers if status != RUNNING else ():
                logger.save()
            self._write_files(json_safe(self._facts(trainer, module, status, error)))
        except OSError as reason:  # a full disk is the checkpoint's to answer; a page that is missing stops no run
            log.warning("report.html could not be written to %s: %s", self._folder, reason)
        now = time.perf_counter()
        self._cost = now - begin
        self._next = now + self._pause()

    def _write_files(self, facts: dict[str, Any]) -> None:
        assert self._folder is not None
        write_text(self._folder / FACTS_FILE, json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        self._samples.update()
        page = run_page(read_run(self._folder), self._samples, self._pause())
        write_text(self._folder / "report.html", page)

    def _pause(self) -> float:
        return max(self.every_seconds, self._cost / _MAX_SHARE)

    def _facts(self, trainer: pl.Trainer, module: Any, status: str, error: str | None) -> dict[str, Any]:
        assert self._begin is not None
        return {
            "status": status,
            "error": error,
            **run_identity(trainer, module),
            "command": shlex.join([*_program(sys.argv[0]), *sys.argv[1:]]),
            "started": self._started,
            "updated": time.time(),
            "seconds": round(time.perf_counter() - self._begin, 1),
            "policy_version": trainer.global_step,
            "resumed_from": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
            "world_size": trainer.world_size,
            "memory_gb": _peak_memory(trainer.strategy.root_device),
            "pid": os.getpid(),
            "host": platform.node(),
            "versions": run_versions(trainer.strategy.root_device),
            "warnings": self._warnings.found,
        }


def _program(path: str) -> list[str]:
    return ["trace-fit"] if Path(path).name in ("trace-fit", "cli.py") else ["python", path]


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Peak of this process on its device, or on the host if it has no other; 1e9 bytes, as `trace-fit estimate`."""
    if device.type == "cuda":
        return {"on the first GPU": torch.cuda.max_memory_reserved(device) / 1e9}
    return {"of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}


class _Warnings(logging.Handler):
    """Keeps what this package warned of, each text once, with the step it was first said in."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(logging.WARNING)
        self.trainer = trainer
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if len(self.found) < _MAX_WARNINGS and text not in (each["text"] for each in self.found):
            self.found.append({"step": self.trainer.global_step, "text": text})
