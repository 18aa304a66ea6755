"""What the studies share that compare runs of `trace-fit`: starting one, reading its columns, cells of a table."""

import csv
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = list[float | None]


def run_fit(arguments: Sequence[str], log: Path, name: str) -> None:
    """One `trace-fit fit` in a process of its own; its console goes into a file, whose end is told if it fails."""
    command = [sys.executable, "-m", "trace_lightning.cli", "fit", *arguments]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}; its last words in {log}:\n{log.read_text()[-1500:]}")


def training_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv` that belong to training steps."""
    with (folder / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("reward")]


def curves(rows: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> dict[str, Curve]:
    """Columns by short name, one value per rollout; None where nothing was measured."""
    return {name: [_rounded(row.get(key)) for row in rows] for name, key in columns.items()}


def _rounded(text: str | None) -> float | None:
    value = float(text) if text else math.nan
    return float(f"{value:.4g}") if math.isfinite(value) else None


def mean(curve: Curve) -> float | None:
    """Mean of what was measured, or None."""
    known = [value for value in curve if value is not None]
    return statistics.fmean(known) if known else None


def cell(values: Curve, digits: int = 3) -> str:
    """Mean over seeds, and their range where there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{statistics.fmean(known):.{digits}f}"
    return text if len(known) == 1 else f"{text} ({min(known):.{digits}f} to {max(known):.{digits}f})"
