"""What a run's folder says about the run, read while it goes or long after, also where a crash has torn a line.

    RUN/run.json          status, command, notes; of the RunReport callback    RUN/metrics.csv       curves
    RUN/summary.json      what was run, on what; at the end                    RUN/config.yaml       settings

Everything but metrics.csv may be missing: runs of older versions and runs without our callbacks have less to show.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trace_lightning.report.files import complete_lines
from trace_lightning.report.series import Series

METRICS_FILE, FACTS_FILE, COMPLETIONS_FILE = "metrics.csv", "run.json", "completions.jsonl"
RUNNING = "running"
_KNOWN_FILES = (METRICS_FILE, FACTS_FILE, COMPLETIONS_FILE, "summary.json", "config.yaml")
_NOT_A_CURVE = ("step", "epoch")


@dataclass
class Run:
    """One run.

    Attributes:
        folder: of its files.
        facts: `run.json` over `summary.json`.
        config: `config.yaml`.
        metrics: by key of metrics.csv.
        notes: what a reader of the curves should know: warnings of the run, and lines that could not be read.
    """

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name and version: `grpo_fp4/version_0`."""
        folder = self.folder.resolve()
        return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("version_") else folder.name

    @property
    def status(self) -> str:
        """`running`, `finished`, `interrupted` or `failed`; `killed` if it can no longer be running."""
        status = str(self.facts.get("status", "unknown"))
        return "killed" if status == RUNNING and self._is_gone() else status

    def _is_gone(self) -> bool:
        pid = self.facts.get("pid")
        if not isinstance(pid, int) or self.facts.get("host") != platform.node():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def require_metrics(self) -> Run:
        """Itself.

        Raises:
            ValueError: nothing was measured yet.
        """
        if not self.metrics:
            error = self.facts.get("error")
            why = f"it failed before its first step was logged: {error}" if error else "wait for its first step"
            raise ValueError(f"{self.folder / METRICS_FILE} holds no metrics: the run is empty ({why})")
        return self


def read_run(folder: Path) -> Run:
    """Read everything but the completions.

    Raises:
        ValueError: the folder is missing or is not that of a run.
    """
    _check_folder(folder)
    notes: list[str] = []
    summary, facts = (_read_json(folder / name, notes) for name in ("summary.json", FACTS_FILE))
    run = Run(folder, summary | facts, _read_config(folder / "config.yaml", notes), {}, notes)
    run.notes += [f"step {note['step']}: {note['text']}" for note in facts.get("warnings", [])]
    if (folder / METRICS_FILE).is_file():
        run.metrics = read_metrics(folder / METRICS_FILE, notes)
    first = min((series.steps[0] for series in run.metrics.values()), default=0.0)
    origin = facts.get("resumed_from", "an earlier run")  # None: this run began at 0, and was logged later
    if first > 0 and origin is not None:
        notes.append(f"resumed from {origin}: curves begin at step {first:.0f}")
    return run


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give that of a run, such as runs/grpo_fp4/version_0")
    if any((folder / name).is_file() for name in _KNOWN_FILES):
        return
    versions = sorted(path.parent for path in folder.glob(f"**/{METRICS_FILE}"))
    hint = f"It holds runs: {', '.join(map(str, versions[:8]))}" if versions else f"A run leaves {METRICS_FILE} there"
    raise ValueError(f"{folder} is not the folder of a run. {hint}.")


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} is broken and was left out")
    return {}


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} is broken and was left out")
    return {}


def read_metrics(path: Path, notes: list[str]) -> dict[str, Series]:
    """Every column of metrics.csv that was ever filled; what could not be read is said in `notes`."""
    rows = csv.reader(_text_lines(path, notes))
    header = next(rows, [])
    if "step" not in header:
        return {}
    at = header.index("step")
    columns = [(i, Series()) for i, name in enumerate(header) if name not in _NOT_A_CURVE]
    broken, not_finite = 0, Counter[str]()
    for row in rows:
        step = _number(row[at]) if len(row) == len(header) else None
        values = [(i, series, _number(row[i])) for i, series in columns if row[i]] if step is not None else []
        if step is None or any(value is None for _, _, value in values):
            broken += 1
            continue
        for i, series, value in values:
            assert value is not None
            if math.isfinite(value):
                series.add(step, value)
            else:
                not_finite[header[i]] += 1
    if broken:
        notes.append(f"{broken} broken row{'s' * (broken > 1)} of {path.name} left out")
    notes += [f"{name} was not finite in {count} rows; its curve leaves them out" for name, count in not_finite.items()]
    return {header[i]: series for i, series in columns if len(series)}


def _text_lines(path: Path, notes: list[str]) -> Iterator[str]:
    end = 0
    for line, end in complete_lines(path):  # noqa: B007  the last one counts
        yield line.decode("utf-8", errors="replace")
    if path.stat().st_size > end:
        notes.append(f"the last row of {path.name} is half written and was left out")


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
