"""One flat list of results out of what the benchmarks wrote, held against what they should be at least.

    python kernels/bench/collect.py *.json --out docs/results/h200.json

The kernels' benches write lists of rows, `trace-fit bench` an object whose `rows` is one; all are read alike. `GOALS`
says which rows are published and under which name. Where several rows match, the worst one stands for them, so that a
good shape cannot hide a bad one. A goal without a matching row is left out and named: nothing is filled in.

What was left out: any arithmetic on the numbers. A published value is a measured one, digit for digit.

    in    {name, value, unit, must, aim, ok}                 `trace-fit bench`: command as well
    out   {name, value, unit, must, aim, ok, command}        ok: value >= must, or <= where lower is better
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ATTENTION, LINEAR, SYNC = (
    f"python kernels/bench/bench_{x}.py" for x in ("decode_attention", "linear", "block_quantize")
)
ENGINE = "trace-fit bench"
DECODE = "64x8192 decode, against bf16"


@dataclass(frozen=True)
class Goal:
    """A published row: which measured rows it is taken from, and what it should be.

    Args:
        name: published name.
        pattern: regular expression that a measured row's whole name must match.
        command: what measures it, where the row itself does not say.
        must: the bound that decides `ok`; None for a number that is only reported.
        aim: what was hoped for.
        lower: smaller is better, as for times and counts.
    """

    name: str
    pattern: str
    command: str
    must: float | None = None
    aim: float | None = None
    lower: bool = False


GOALS = (
    Goal("BF16 twin attention, 64 x 8k", r"bf16 attention 64x8k share.*", ATTENTION, 0.90, 0.97),
    *(Goal(f"FP4 attention against BF16, {s}", f"fp4 attention vs bf16 {s}", ATTENTION, 2.2, 3.0)
      for s in ("64x8k", "16x32k", "256x2k")),
    *(Goal(f"FP4 attention against BF16, head_dim 64, group {g}, 64x8k", f"fp4 attention vs bf16 D64 group {g} 64x8k",
           ATTENTION, 1.8, 2.6) for g in (2, 4)),
    Goal("FP4 attention, shared prompt against unshared", r"shared prefix .* vs unshared", ATTENTION, 1.3, 1.45),
    *(Goal(f"FP4 linear against cuBLAS, {shape}, M={m}", f"fp4 linear vs cuBLAS {shape} M={m}", LINEAR, must, 2.5)
      for m, must in ((8, 1.6), (16, 1.4)) for shape in ("24576x4096", "4096x12288", "6144x4096")),
    Goal("engine's linear against BF16, worst of nine shapes, M=1..512", r"engine linear vs BF16 worst .*", LINEAR,
         0.95, 1.0),
    Goal("weight sync, 8B shape, kernels alone", r"weight sync bytes/s share of copy bandwidth.*", SYNC, 0.40, 0.70),
    Goal("weight sync, 8B, W4A16KV4 engine", "qwen3-8b w4a16kv4 sync's bandwidth", ENGINE, 0.40, 0.70),
    Goal("kernels, 8B and 1.7B, most of all formats", r"qwen3-(8b|1\.7b) .* 64x8192 kernels",
         ENGINE, 12, 9, lower=True),
    Goal("host time per step outside the graph, 64 sequences, 8B and 1.7B, most of all formats",
         r"qwen3-(8b|1\.7b) .* 64x8192 host", ENGINE, 0.5, 0.2, lower=True),
    Goal("BF16 engine, 8B, 64 x 8k, share of its roofline", "qwen3-8b bf16 64x8192 roofline", ENGINE, 0.75, 0.90),
    Goal("W4A16KV4 engine against BF16 engine, 1.7B, 64 x 8k", f"qwen3-1.7b w4a16kv4 {DECODE}", ENGINE, 2.0, 2.8),
    Goal("W4A16KV4 engine against BF16 engine, 8B, 64 x 8k", f"qwen3-8b w4a16kv4 {DECODE}", ENGINE, 1.8, 2.6),
    Goal("W4A16KV4 engine against BF16 engine, 8B, 32k, same bytes of cache",
         r"qwen3-8b w4a16kv4 \d+x32768 decode, against bf16", ENGINE, 2.2, 3.0),
    Goal("prefill of 64 prompts x 2k, 8B, worst of all formats", r"qwen3-8b .* prefill's rate", ENGINE, 0.45, 0.65),
    Goal("W4A16KV4 engine against transformers generate in BF16, 1.7B, 256 prompts x 256, 128 new tokens",
         "qwen3-1.7b w4a16kv4 generate, against transformers generate", ENGINE, 8, 15),
    *(Goal(f"sequences of 8k that fit, {size.upper()}, {f}", f"qwen3-{size} {f} 64x8192 fit", ENGINE)
      for size in ("1.7b", "8b") for f in ("bf16", "w4a16kv4")),
    *(Goal(f"{f} engine, {size.upper()}, 64 x 8k", f"qwen3-{size} {f} 64x8192 decode", ENGINE)
      for size in ("1.7b", "8b") for f in ("bf16", "w4a16kv4")),
)  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """The rows of one file.

    Raises:
        ValueError: if the file holds neither a list of rows nor an object with `rows`.
    """
    content = json.loads(path.read_text())
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise ValueError(f"{path} has no rows: give what a bench wrote by --json")
    return rows


def pick(goal: Goal, rows: Iterable[Row]) -> Row | None:
    """The published row of a goal: the worst of those that match, or None."""
    matching = [row for row in rows if re.fullmatch(goal.pattern, row["name"])]
    if not matching:
        return None
    worst = (max if goal.lower else min)(matching, key=lambda row: row["value"])
    value, must = worst["value"], goal.must
    ok = None if must is None else (value <= must if goal.lower else value >= must)
    # The file that one run wrote to is no part of how to measure; the kernels' shares come without a unit.
    command = re.sub(r" --json \S+", "", worst.get("command", goal.command))
    unit = worst["unit"] or "of copy"
    return {
        "name": goal.name, "value": value, "unit": unit, "must": must, "aim": goal.aim, "ok": ok, "command": command
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Collect, write, and name what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="what the benches wrote by --json")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    rows = [row for path in options.files for row in read_rows(path)]
    found = {goal.name: pick(goal, rows) for goal in GOALS}
    published = [row for row in found.values() if row is not None]
    options.out.write_text(json.dumps(published, indent=1) + "\n")
    for row in published:
        mark = {True: "ok", False: "MISSED", None: ""}[row["ok"]]
        print(f"{row['name']:<90} {row['value']:10.4g} {row['unit']:<12} {mark}")
    for name, row in found.items():
        if row is None:
            print(f"not measured, left out: {name}")


if __name__ == "__main__":
    main()
