"""The benchmark as tables for people and as JSON for machines.

A JSON row is one number under a name that says what it is of; `must` and `aim` are for whoever holds it against a
target, and are empty here.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

from trace_lightning.bench.machine import device_name
from trace_lightning.bench.measure import DecodeResult
from trace_lightning.bench.parts import PARTS
from trace_lightning.bench.runner import BenchResult, FormatResult, as_record
from trace_lightning.version import __version__

_ON_CPU = "on a CPU, by the torch references: not what a GPU would show"


def title(result: BenchResult) -> str:
    """What was measured, and on what."""
    device = result.options.device
    what = result.options.path or f"{result.options.shape}, random weights"
    if result.limits is None:
        return f"{what}, {_ON_CPU}"
    limits = f"copies {result.limits.bandwidth / 1e12:.2f} TB/s, BF16 {result.limits.matmul_rate / 1e12:.0f} TFLOP/s"
    return f"{what}, on one {device_name(device)} ({limits})"


def tables(result: BenchResult) -> list[Table]:
    """Decode, where its time goes, and what else was measured; columns nothing was measured for are left out."""
    made = [_decode_table(result), _parts_table(result), _other_table(result)]
    return [table for table in made if table is not None]


def _table(heading: str, columns: list[str], rows: list[list[str]]) -> Table:
    """Columns that are empty in every row are dropped."""
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = Table(title=heading, title_justify="left")
    for index in kept:
        table.add_column(columns[index], justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _decodes(result: BenchResult) -> Iterator[tuple[FormatResult, DecodeResult, DecodeResult]]:
    """Every decode measurement, with that of the first format it is compared with."""
    for entry in result.formats:
        for line, first in zip(entry.decode, result.formats[0].decode, strict=True):
            yield entry, line, first


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _decode_table(result: BenchResult) -> Table:
    first_name = result.formats[0].name
    columns = ["decode", "batch", "context", "tokens/s", f"x {first_name}", "ms/step", "roofline ms", "TB/s", "of copy"]
    columns += ["KV of copy", "fit"]
    rows = [
        [
            entry.name,
            str(line.batch),
            str(line.context),
            f"{line.tokens_per_s:.0f}",
            f"{line.tokens_per_s / first.tokens_per_s:.2f}",
            _ms(line.wall),
            _ms(line.roofline),
            "" if line.roofline is None else f"{line.ideal_bytes / line.device / 1e12:.2f}",
            _percent(line.bandwidth_share),
            _percent(line.attention_share),
            "" if result.limits is None else str(entry.fits[line.context]),
        ]
        for entry, line, first in _decodes(result)
    ]
    return _table(title(result), columns, rows)


def _parts_table(result: BenchResult) -> Table | None:
    rows = [
        [
            f"{entry.name} {line.batch}x{line.context}",
            *(_ms(line.parts.seconds[part]) for part in PARTS),
            _ms(line.gaps),
            _ms(line.host),
            str(line.parts.kernels),
            f"{line.parts.kernels_per_layer:.1f}",
        ]
        for entry, line, _ in _decodes(result)
        if line.parts is not None
    ]
    columns = ["ms of a step", *PARTS, "gaps", "host", "kernels", "per layer"]
    return _table("Where a decode step's time goes", columns, rows) if rows else None


def _other_table(result: BenchResult) -> Table:
    options = result.options
    size = f"{options.prompts} x {options.prompt_length}"
    columns = [f"prompts {size}", "prefill tok/s", "of matmul", f"generate {options.baseline_new_tokens} tok/s"]
    columns += [f"x {name}" for name in result.baselines] + ["sync s", "of copy", "peak GB"]
    rows = [
        [
            entry.name,
            f"{entry.prefill.per_s:.0f}",
            _percent(entry.prefill.share),
            f"{entry.generate.per_s:.0f}",
            *(f"{entry.generate.per_s / rate.per_s:.2f}" for rate in result.baselines.values()),
            f"{entry.sync.seconds:.3f}",
            _percent(entry.sync.share),
            "" if entry.peak_bytes is None else f"{entry.peak_bytes / 1e9:.1f}",
        ]
        for entry in result.formats
    ]
    empty = [""] * (len(columns) - 4)
    rows += [[f"transformers {n}", "", "", f"{rate.per_s:.0f}", *empty] for n, rate in result.baselines.items()]
    return _table("Prefill, generate, weight sync", columns, rows)


def json_rows(result: BenchResult, command: str) -> list[dict[str, Any]]:
    """The main numbers, one a row: `name, value, unit, must, aim, ok, command`."""
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float | None, unit: str) -> None:
        if value is not None:
            row = {"name": f"{result.options.shape} {name}", "value": value, "unit": unit}
            rows.append(row | {"must": None, "aim": None, "ok": None, "command": command})

    for entry, line, first in _decodes(result):
        name = f"{entry.name} {line.batch}x{line.context}"
        add(f"{name} decode", line.tokens_per_s, "tokens/s")
        add(f"{name} decode, against {result.formats[0].name}", line.tokens_per_s / first.tokens_per_s, "x")
        add(f"{name} step", line.wall * 1e3, "ms")
        add(f"{name} host", line.host * 1e3 if result.limits else None, "ms")
        add(f"{name} bandwidth", line.bandwidth_share, "of copy")
        add(f"{name} attention's bandwidth", line.attention_share, "of copy")
        add(f"{name} roofline", line.roofline / line.wall if line.roofline else None, "of the best")
        add(f"{name} kernels", line.parts.kernels_per_layer if line.parts else None, "per layer")
        add(f"{name} fit", entry.fits[line.context] if result.limits else None, "sequences")
    for entry in result.formats:
        add(f"{entry.name} prefill", entry.prefill.per_s, "tokens/s")
        add(f"{entry.name} prefill's rate", entry.prefill.share, "of matmul")
        add(f"{entry.name} sync", entry.sync.seconds, "s")
        add(f"{entry.name} sync's bandwidth", entry.sync.share, "of copy")
        add(f"{entry.name} generate", entry.generate.per_s, "tokens/s")
        for name, rate in result.baselines.items():
            add(f"{entry.name} generate, against transformers {name}", entry.generate.per_s / rate.per_s, "x")
    return rows


def write_json(result: BenchResult, command: str, path: Path) -> None:
    """Write the rows, the versions and the whole record."""
    versions = {"trace_lightning": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    content = {
        "title": title(result),
        "device": device_name(result.options.device),
        "versions": versions | {"python": platform.python_version()},
        "rows": json_rows(result, command),
        "record": as_record(result),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
