"""Several runs side by side: the numbers one decides by, the settings in which they differ, and their curves.

Runs need not have measured the same things: what one of them lacks is an empty cell, and no curve.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from trace_lightning.report.charts import shared_drawings
from trace_lightning.report.html import document, table
from trace_lightning.report.page import chart_data, charts_section, duration, ends, number, recent
from trace_lightning.report.run import Run
from trace_lightning.report.series import THINNING_RULE, Series

_NOT_SETTINGS = ("run_name", "runs_dir", "ckpt_path")
_LONGEST = 60  # characters of a setting
_DLOGP = "sampling/sampling_logp_difference"


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Names that tell the runs apart: their own, without a version they share, or where two are alike the folders."""
    names = [run.name for run in runs]
    if len(runs) > 1 and len({name.rpartition("/")[2] for name in names}) == 1:
        names = [name.rpartition("/")[0] for name in names]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def number_rows(runs: Sequence[Run]) -> list[list[str]]:
    """One row per number, its name first, then a cell per run; without rows that are empty throughout."""
    columns = [dict(_numbers(run)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return [row for row in rows if any(row[1:])]


def _numbers(run: Run) -> Iterator[tuple[str, str]]:
    metrics, facts = run.metrics, run.facts
    yield "status", run.status
    yield "steps", f"{max(series.steps[-1] for series in metrics.values()):.0f}"
    for key in sorted(metrics):
        if key.startswith("heldout/") and key.endswith("/reward"):  # of each held-out set
            name = key.removeprefix("heldout/").removesuffix("reward").rstrip("/")
            yield f"held-out reward, first → last{name and f' ({name})'}", ends(metrics[key])
    if "reward" in metrics:
        yield "training reward, last 10 steps", number(recent(metrics["reward"]))
    for label, key, reduce in (
        ("mean |Δ log p|, mean of the run", f"{_DLOGP}/mean", fmean),
        ("max |Δ log p|, of the run", f"{_DLOGP}/max", max),
        ("k3 KL, mean of the run", "rollout_corr/k3_kl", fmean),
    ):
        if key in metrics:
            yield label, number(reduce(metrics[key].values))
    yield from _speeds(metrics)
    for name, value in facts.get("memory_gb", {}).items():
        yield f"peak memory {name}, GB", f"{value:.2f}"
    yield "elapsed", duration(facts.get("seconds"))
    yield "hardware", str(facts.get("versions", {}).get("device", ""))


def _speeds(metrics: dict[str, Series]) -> Iterator[tuple[str, str]]:
    rollout, tokens = metrics.get("timing/rollout_s"), metrics.get("num_tokens")
    if rollout and tokens and sum(rollout.values):
        yield "tokens/s while generating", number(sum(tokens.values) / sum(rollout.values))
    for label, key in (("s per rollout", "timing/rollout_s"), ("s per step", "timing/step_s")):
        if key in metrics:
            yield label, number(fmean(metrics[key].values))


def setting_rows(runs: Sequence[Run]) -> list[list[str]]:
    """One row per setting in which the runs differ, its name first, then a cell per run."""
    flat = [dict(_flat(run.config)) | _surroundings(run) for run in runs]
    names = sorted({name for settings in flat for name in settings if name not in _NOT_SETTINGS})
    rows = [[name, *(settings.get(name, "-") for settings in flat)] for name in names]
    return [list(map(_shortened, row)) for row in rows if len(set(row[1:])) > 1]


def _shortened(text: str) -> str:
    """Paths of one project differ at their ends."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}...{text[-2 * _LONGEST // 3 :]}"


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(settings, list) and settings and all(isinstance(part, dict) for part in settings):
        settings = ", ".join(map(_component, settings))
    if isinstance(settings, dict) and settings:
        for name, value in settings.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
        return
    yield prefix, settings if isinstance(settings, str) else _json(settings)


def _json(settings: Any) -> str:
    return json.dumps(settings, ensure_ascii=False, default=str)


def _component(part: dict[str, Any]) -> str:
    """`TIS(cap=2.0)`; what is no component as it is."""
    if "class_path" not in part:
        return _json(part)
    arguments = ", ".join(f"{name}={value}" for name, value in (part.get("init_args") or {}).items())
    return f"{str(part['class_path']).rpartition('.')[2]}({arguments})"


def _surroundings(run: Run) -> dict[str, str]:
    versions = {f"version of {name}": text for name, text in run.facts.get("versions", {}).items() if name != "device"}
    return versions | {"processes": str(run.facts.get("world_size", "-"))}


def compare_tables(runs: Sequence[Run]) -> list[Table]:
    """For the terminal: numbers, and differences of settings."""
    labels = run_labels(runs)
    return [
        _terminal_table("Runs", labels, number_rows(runs)),
        _terminal_table("Settings that differ", labels, setting_rows(runs)),
    ]


def _terminal_table(title: str, labels: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(title=title, title_justify="left", show_lines=False)
    made.add_column("")
    for label in labels:
        made.add_column(label, justify="right", overflow="fold")
    for row in rows:
        made.add_row(*(cell.replace("[", "\\[") for cell in row))
    return made


def compare_page(runs: Sequence[Run]) -> str:
    """The page with the tables and one chart per metric."""
    labels = run_labels(runs)
    title = "Comparison of " + ", ".join(labels)
    notes = [f"{label}: {note}" for run, label in zip(runs, labels, strict=True) for note in run.notes]
    differences = setting_rows(runs)
    settings = table(["setting", *labels], differences) if differences else "<p>None.</p>"
    body = [
        f"<h1>{html.escape(title)}</h1>{table(['', *labels], number_rows(runs))}",
        f"<h2>Settings that differ</h2>{settings}",
        f"<h2>Notes</h2><ul class=notes>{''.join(f'<li>{html.escape(note)}</li>' for note in notes)}</ul>"
        if notes
        else "",
        charts_section(),
        f"<footer class=note><p>{THINNING_RULE}</p></footer>",
    ]
    data = chart_data(*shared_drawings(runs, labels))
    return document(title, "".join(body), scripts=("charts.js",), data=data)
