"""The estimate as tables, one column per recipe, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from trace_lightning.estimate.advice import advice, fits
from trace_lightning.estimate.memory import (
    CONTEXT_BYTES,
    fit,
    items,
    microbatch_tokens,
    peaks,
    record_row_bytes,
    record_tokens,
)
from trace_lightning.estimate.plan import Plan
from trace_lightning.estimate.speed import phases, rows_side_by_side, speedups, step, total

ASSUMPTIONS = (
    "Estimated, not measured. Shares of the roofline were reached on one H200 (1.7B and 8B); other cards are assumed "
    "to reach them. Training is taken at 35 to 50 % of the matmul rate (1.7B: 47 to 49). Assumed: 1.5 GB of context. "
    "Not counted: rewards, padding, communication between GPUs, fragmentation. See docs/estimate.md."
)
_ROLLOUT = ("prefill", "decode", "recording")


def facts(plain: Plan, plan: Plan) -> dict[str, Any]:
    """All numbers of one recipe: bytes, seconds as [fast, slow], ratios as [least, most]."""
    seconds, memory = phases(plan), peaks(plan)
    whole, drawn = step(plan), total({name: span for name, span in seconds.items() if name in _ROLLOUT})
    rest = total({name: span for name, span in seconds.items() if name not in _ROLLOUT})
    share = (drawn.fast / (drawn.fast + rest.slow), drawn.slow / (drawn.slow + rest.fast))
    row = record_row_bytes(plan)
    return {
        "recipe": plan.recipe.label,
        "memory": {item.name: item.bytes for item in items(plan)} | {"context and libraries": CONTEXT_BYTES},
        "side": {item.name: item.side for item in items(plan)},
        "peaks": memory,
        "fits": fits(plan),
        "microbatch_tokens": microbatch_tokens(plan),
        "sequences_of_full_length": fit(plan, plan.new_tokens),
        "sequences_side_by_side": rows_side_by_side(plan),
        "guidance_bytes_per_token": row,
        "guidance_bytes_expected": row * record_tokens(plan, plan.mean_new),
        "guidance_bytes_most": row * record_tokens(plan, plan.new_tokens),
        "guidance_store": plan.recipe.guidance.store,
        "seconds": {name: [span.fast, span.slow] for name, span in seconds.items()},
        "step_seconds": [whole.fast, whole.slow],
        "rollout_share": list(share),
        "speedup": {} if plan is plain else {name: list(pair) for name, pair in speedups(plain, plan).items()},
        "advice": advice(plain, plan),
    }


def _gb(count: float | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"


def _span(pair: list[float] | None, unit: str = "") -> str:
    return "" if pair is None else f"{pair[0]:.3g} - {pair[1]:.3g}{unit}"


def _table(heading: str, rows: dict[str, list[str]], labels: list[str]) -> Table:
    table = Table(title=heading, title_justify="left")
    for index, column in enumerate(["", *labels]):
        table.add_column(column, justify="right" if index else "left")
    for name, cells in rows.items():
        if any(cells):
            table.add_row(name, *cells)
    return table


def tables(plan: Plan, columns: list[dict[str, Any]]) -> list[Table]:
    """Memory, what fits, and time; `columns` are `facts`, BF16 first."""
    labels = [column["recipe"] for column in columns]
    sides = {name: side for column in columns for name, side in column["side"].items()}
    names = dict.fromkeys(name for column in columns for name in column["memory"])
    memory = {
        f"{sides.get(name, 'both')}: {name}": [_gb(column["memory"].get(name)) for column in columns] for name in names
    }
    memory |= {f"PEAK in {name}": [_gb(column["peaks"][name]) for column in columns] for name in columns[0]["peaks"]}
    memory["fits"] = ["yes" if column["fits"] else "NO" for column in columns]
    held = {
        "sequences of full length in the KV pool": "sequences_of_full_length",
        "sequences side by side (mean length)": "sequences_side_by_side",
        "tokens of a micro-batch": "microbatch_tokens",
        "guidance, bytes per token": "guidance_bytes_per_token",
    }
    counts = {name: [f"{column[key]:,}" for column in columns] for name, key in held.items()}
    for name, key in (("expected", "guidance_bytes_expected"), ("at most", "guidance_bytes_most")):
        counts[f"guidance, GB per rollout, {name}"] = [f"{_gb(c[key])} {c['guidance_store']}" for c in columns]
    time = {name: [_span(column["seconds"].get(name)) for column in columns] for name in columns[-1]["seconds"]}
    whole = "whole step, at best rollout beside training" if plan.max_version_diff else "whole step"
    time[whole] = [_span(column["step_seconds"]) for column in columns]
    time["rollout's share"] = [_span([100 * share for share in c["rollout_share"]], " %") for c in columns]
    time |= {
        f"{name} against BF16, x": ["", *(_span(c["speedup"][name]) for c in columns[1:])]
        for name in ("rollout", "step")
    }
    card = f"{plan.card.name}, {_gb(plan.card.memory)} GB, {plan.card.limits.bandwidth / 1e12:.2f} TB/s, "
    card += f"{plan.card.limits.matmul_rate / 1e12:.0f} TFLOP/s ({plan.card.source})"
    return [
        _table(f"{plan.model}, {plan.precision}: GB on each of {plan.gpus} x {card}", memory, labels),
        _table("What fits, on each GPU", counts, labels),
        _table("Seconds per step, best - worst", time, labels),
    ]


def as_json(plan: Plan, columns: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """The plan, every column, and what was assumed."""
    return {"command": command, "plan": dataclasses.asdict(plan), "recipes": columns, "assumptions": ASSUMPTIONS}
