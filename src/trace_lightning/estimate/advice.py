"""What the numbers say in plain words: what to change first if a run does not fit, and why FP4 gains what it gains."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from trace_lightning.estimate.memory import fit, peaks, record_row_bytes, record_tokens
from trace_lightning.estimate.plan import Plan
from trace_lightning.estimate.speed import PACKED_ROWS, mean_step, rows_side_by_side, speedups, total
from trace_lightning.recipe import FP4

_SMALLEST = 1024  # hidden size of the smallest shape that was timed, 0.6B


def _changes(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that save memory, the cheapest in time first."""
    if plan.recipe.guidance.store == "device" and plan.guided_sites:
        guidance = dataclasses.replace(plan.recipe.guidance, store="host")
        recipe = dataclasses.replace(plan.recipe, guidance=guidance)
        yield "recipe.guidance.store=host", {"recipe": recipe}
    if plan.max_tokens_per_microbatch > plan.longest:
        yield f"model.max_tokens_per_microbatch={plan.longest}", {"max_tokens_per_microbatch": plan.longest}
    if plan.memory_fraction > 0.2 and not plan.kv_cache_tokens:
        yield "engine.memory_fraction=0.2", {"memory_fraction": 0.2}
    if not plan.gradient_checkpointing:
        yield "model.gradient_checkpointing=true", {"gradient_checkpointing": True}
    if plan.max_version_diff:
        yield "rollout.max_version_diff=0", {"max_version_diff": 0}
    elif plan.keep_snapshot:
        yield "engine.keep_snapshot=false", {"keep_snapshot": False}
    if plan.precision == "bf16-mixed":
        yield "trainer.precision=bf16-true (BF16 masters: small updates are lost)", {"precision": "bf16-true"}


def fits(plan: Plan) -> bool:
    """Whether every phase fits the card, and one sequence of full length the KV pool."""
    return max(peaks(plan).values()) <= plan.card.memory and fit(plan, plan.new_tokens) > 0


def what_to_change(plan: Plan) -> list[str]:
    """The fewest settings with which the run fits, the cheapest in time first; empty if all are not enough.

    BF16 masters are the last resort, since they change what is learned and not only what it costs.
    """
    changes = list(_changes(plan))
    harmless = [each for each in changes if "precision" not in each[1]]
    for candidates in (harmless, changes):
        for count in range(1, len(candidates) + 1):
            for chosen in itertools.combinations(candidates, count):
                together = {name: value for _, change in chosen for name, value in change.items()}
                if fits(dataclasses.replace(plan, **together)):
                    return [words for words, _ in chosen]
    return []


def _about_memory(plan: Plan) -> Iterator[str]:
    if not fits(plan):
        changes = what_to_change(plan)
        way = f"change first: {', '.join(changes)}" if changes else "no setting is enough: the card is too small"
        phase, most = max(peaks(plan).items(), key=lambda pair: pair[1])
        over = f"its peak ({phase}) is {most / 1e9:.0f} of {plan.card.memory / 1e9:.0f} GB"
        yield f"does not fit: {over if most > plan.card.memory else 'the KV pool holds no sequence'}; {way}"
    if plan.guided_sites and plan.recipe.guidance.store == "device":
        most = record_row_bytes(plan) * record_tokens(plan, plan.new_tokens)
        if most > plan.card.memory - peaks(plan)["rollout"]:
            yield f"guidance could take {most / 1e9:.0f} GB, which the engine may refuse: recipe.guidance.store=host"
    if (rows := rows_side_by_side(plan)) < plan.sequences:
        yield f"{rows} of {plan.sequences} sequences decode side by side: the others wait for a seat"


def _about_speed(plain: Plan, plan: Plan) -> Iterator[str]:
    used, ratios = (
        set(FP4) & {plan.recipe.weights, plan.recipe.activations, plan.recipe.kv_cache},
        speedups(plain, plan),
    )
    low, high = ratios["rollout"]
    if used and low < 1.3:
        before, after = mean_step(plain, plain.recipe), mean_step(plan, plan.recipe)
        share = before["attention"].slow / total(before).slow
        left = 1 - after["attention"].slow / total(after).slow
        why = f"K and V are {share:.0%} of a BF16 step, and {left:.0%} of a step in FP4 are not K and V"
        why += (
            f" (linears of more than {PACKED_ROWS} rows hardly gain)" if rows_side_by_side(plan) > PACKED_ROWS else ""
        )
        yield f"FP4 may gain little here ({low:.2f} to {high:.2f} x): {why}"
    if plan.recipe.activations in FP4:
        yield "FP4 activations make nothing faster: the engine multiplies in BF16. They cost guidance bytes"
    if plan.guided_sites and plan.guidance.mode == "syndrome":
        yield "the trainer's search for the bits (guidance.mode=syndrome) is not counted"
    if used and ratios["step"][1] < 1.25:
        yield "training takes most of the step: a faster rollout changes little"
    if plan.shape.hidden < _SMALLEST:
        yield "smaller than what was measured: launches of kernels, which are not counted, decide its speed"


def advice(plain: Plan, plan: Plan) -> list[str]:
    """Sentences about `plan`, `plain` being the same run with a BF16 rollout; never empty."""
    said = [*_about_memory(plan), *_about_speed(plain, plan)]
    return said or ["fits, and nothing stands out"]
