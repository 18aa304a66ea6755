"""Which shapes fit cards of so much memory, and how many sequences with them: one row per shape and way of training."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from trace_lightning.bench.shapes import SHAPES
from trace_lightning.estimate.advice import fits
from trace_lightning.estimate.memory import fit, peaks
from trace_lightning.estimate.plan import Plan


def ladder(plan: Plan, sizes: list[float]) -> list[dict[str, Any]]:
    """Rows of `shape`, `trained`, and per size in GB the peak in bytes, whether it fits, and the sequences.

    Args:
        plan: everything but the shape and the card's memory; with adapters, full training is reckoned beside them.
        sizes: memory of a card, 1e9 bytes.
    """
    ways = {"all weights": dataclasses.replace(plan, lora_rank=0)}
    if plan.lora_rank:
        ways[f"rank {plan.lora_rank}, {plan.lora_rollout}"] = plan
    return [
        {"shape": name, "trained": trained, "sizes": [_rung(way, name, size) for size in sizes]}
        for name in SHAPES
        if name != "tiny"
        for trained, way in ways.items()
    ]


def _rung(plan: Plan, shape: str, size: float) -> dict[str, Any]:
    card = dataclasses.replace(plan.card, memory=size * 1e9)
    at = dataclasses.replace(plan, model=shape, shape=SHAPES[shape], card=card)
    return {"gb": size, "peak": max(peaks(at).values()), "fits": fits(at), "sequences": fit(at, at.new_tokens)}


def ladder_table(plan: Plan, rows: list[dict[str, Any]]) -> Table:
    """Sequences of full length that fit beside each shape; a dash where the shape does not."""
    title = f"Sequences of {plan.longest} tokens that fit, {plan.recipe.label}, {plan.precision}"
    caption = (
        f"-: does not fit, micro-batches of {plan.max_tokens_per_microbatch:,} tokens (--max_tokens_per_microbatch"
    )
    caption += ")" if plan.gradient_checkpointing else "; --gradient_checkpointing takes less)"
    table = Table("shape", "trained", title=title, title_justify="left", caption=caption, caption_justify="left")
    for rung in rows[0]["sizes"]:
        table.add_column(f"{rung['gb']:g} GB", justify="right")
    for row in rows:
        cells = [f"{rung['sequences']:,}" if rung["fits"] else "-" for rung in row["sizes"]]
        table.add_row(row["shape"], row["trained"], *cells)
    return table
