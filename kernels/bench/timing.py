"""Timing for the benchmarks: medians of CUDA-graph replays, ratios within one run, rows for a JSON report.

Absolute times drift on shared machines, so a benchmark times its rivals side by side and reports ratios and shares of
the copy bandwidth measured in the same process.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench


def graph_time(function: Callable[[], Any], *, rep: int = 40) -> float:
    """Median seconds of one call, replayed from a CUDA graph; outputs are allocated inside the graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return float(do_bench(graph.replay, warmup=5, rep=rep, return_mode="median")) * 1e-3


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 4 GiB."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = float(do_bench(lambda: target.copy_(source), warmup=10, rep=60, return_mode="median")) * 1e-3
    return 2 * source.numel() / seconds


class Report:
    """Rows of `name, value, unit, must, aim, ok`: printed as they come, written as JSON at the end."""

    def __init__(self, title: str) -> None:
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--json", type=Path, help="file to which the rows are written")
        parser.add_argument("--sweep", action="store_true", help="time every launch configuration")
        self.arguments = parser.parse_args()
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: float, unit: str, *, must: float | None = None, aim: float | None = None) -> None:
        """Add a row; larger is better."""
        ok = None if must is None else value >= must
        self.rows.append({"name": name, "value": value, "unit": unit, "must": must, "aim": aim, "ok": ok})
        goal = (
            ""
            if must is None
            else f"   must {must:g}{'' if aim is None else f', aim {aim:g}'}  {'ok' if ok else 'MISSED'}"
        )
        print(f"{name:<58} {value:10.4g} {unit}{goal}", flush=True)

    def save(self) -> None:
        """Write the rows, if a file was named."""
        if self.arguments.json:
            self.arguments.json.write_text(json.dumps(self.rows, indent=1) + "\n")
