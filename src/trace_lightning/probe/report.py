"""What a probe leaves: tables in the terminal, `report.html` (page.py), PNG plots, and `probe.json`.

The fields of `probe.json` are in docs/probe.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from trace_lightning.probe import cells
from trace_lightning.probe.bands import BANDS, STOP
from trace_lightning.probe.cells import Rows
from trace_lightning.probe.charts import as_svg, charts, save_png
from trace_lightning.probe.outputs import unlikely_share
from trace_lightning.probe.page import page
from trace_lightning.probe.run import SCHEMA, ProbeResult


def tables(result: ProbeResult) -> list[Table]:
    """The report in the terminal."""
    columns, rows, marks = cells.agreement_rows(result)
    styles = {"warn": "yellow", STOP: "red"}
    colored = [
        [_styled(cell, styles.get(mark)) for cell, mark in zip(*pair, strict=True)]
        for pair in zip(rows, marks, strict=True)
    ]
    own = "same_tokens" in result.parts
    kept = [
        index
        for index, band in enumerate(["", *(band.key for band in BANDS), ""])
        if band.split("/")[-1] not in ("chi2_token", "ess", "kl")
    ]
    return [
        _table("Trainer against rollout", [columns[i] for i in kept], [[row[i] for i in kept] for row in colored]),
        *([_table("The format's own error, same tokens", *cells.own_error_rows(result))] if own else []),
        _table("Answers", *cells.quality_rows(result)),
        _table("Speed and memory here", *cells.speed_rows(result)),
        _table("Verdicts (* the target)", *cells.verdict_rows(result)),
    ]


def _styled(cell: str, style: str | None) -> str:
    return cell if style is None else f"[{style}]{cell}[/{style}]"


def _table(heading: str, columns: list[str], rows: Rows) -> Table:
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = Table(title=heading, title_justify="left")
    for index in kept:
        words = columns[index] == "first reason"
        table.add_column(columns[index], justify="left" if index == 0 or words else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def as_record(result: ProbeResult, command: str) -> dict[str, Any]:
    """The content of `probe.json`, without tokens and windows, which stay in `parts/`."""
    divergence = {
        name: {key: value for key, value in part.items() if key not in ("tokens", "windows")}
        for name, part in result.parts["divergence"].items()
    }
    reference = result.parts["divergence"]["bf16"]["windows"]
    for name, part in result.parts["divergence"].items():
        divergence[name]["unlikely_windows"] = unlikely_share(part["windows"], reference)
    plan = result.plan
    return {
        "schema": SCHEMA,
        "command": command,
        "model": plan.model,
        "target": plan.target,
        "verdict": {
            "decision": result.verdict.decision,
            "exit_code": result.verdict.exit_code,
            "reasons": result.verdict.reasons,
        },
        "verdicts": {name: asdict(verdict) for name, verdict in result.verdicts.items()},
        "recipe": result.recipe,
        "formats": {name: asdict(recipe) for name, recipe in plan.formats.items()},
        "settings": asdict(plan.settings)
        | {"sampling": asdict(plan.sampling), "eval_sampling": asdict(plan.eval_sampling)},
        "bands": [asdict(band) for band in BANDS],
        "machine": result.machine,
        "speed": result.speed,
        **result.parts,
        "divergence": divergence,
    }


def rounded(value: Any) -> Any:
    """The same with six significant digits of every float: what is measured has no more, and people read the file."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(result: ProbeResult, folder: Path, command: str) -> None:
    """Write `probe.json`, the PNG plots and `report.html` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.json").write_text(json.dumps(rounded(as_record(result, command)), indent=1) + "\n")
    pictures = {}
    for name, figure in charts(result).items():
        save_png(figure, folder / "plots" / f"{name}.png")
        pictures[name] = as_svg(figure)
    (folder / "recipe.yaml").write_text(result.recipe["yaml"])
    (folder / "report.html").write_text(page(result, pictures, command))
