"""The recipe to paste: the target's formats, with what the findings say should be kept out of FP4.

Linears with outliers go to `exclude`, whole fused groups at a time. For K channels that drown their block a rotation
and an FP8 cache are tried. Layers that cost most stay in BF16: by `bf16_layers` at an end of the stack, their linears
by `exclude` elsewhere. Where most of the held-out reward is lost, milder rounding of the recipe so far is tried. What
is tried is measured, and a larger change must pay. Guidance is on unless not needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from trace_lightning.probe.verdict import GO, WEIGHT_ERROR, Finding
from trace_lightning.quantization.qat import QATState
from trace_lightning.recipe import FP4, QuantRecipe


def excluded(qat: QATState, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Regular expressions for the linears whose weights have outliers."""
    bad = {
        (row["layer"], name[2:])
        for row in rows
        for name, error in row["errors"].items()
        if name.startswith("w:") and error > WEIGHT_ERROR
    }
    groups = [group for group in qat.layout.groups if (group.layer, group.site) in bad]
    return [f"^{re.escape(name)}$" for group in groups for name in group.names]


def kept_layers(qat: QATState, layers: Sequence[int]) -> tuple[list[str], list[str]]:
    """`bf16_layers` for sensitive layers at an end of the stack, `exclude` for the linears of those inside."""
    count = len(qat.layout.layers)
    first = next(n for n in range(count + 1) if n not in layers)
    last = next(n for n in range(count + 1) if count - 1 - n not in layers)
    ends = [f"{side}:{n}" for side, n in (("first", first), ("last", last)) if n]
    inside = [layer for layer in layers if first <= layer < count - last]
    groups = [group for group in qat.layout.groups if group.layer in inside]
    return ends, [f"^{re.escape(name)}$" for group in groups for name in group.names]


def mildly(recipe: QuantRecipe, qat: QATState, head_dim: int) -> QuantRecipe:
    """The same formats rounded mildly, as in `configs/recipes/hopper_small.yaml` and `blackwell_small.yaml`.

    NVFP4 blocks try two scales, K is rotated, and the linears of q, k and v stay BF16.
    """
    leaves = {name.rpartition(".")[2] for group in qat.layout.groups if group.site == "attn_in" for name in group.names}
    nvfp4 = "nvfp4" in (recipe.weights, recipe.activations, recipe.kv_cache)
    rotates = recipe.kv_cache in FP4 and head_dim % 16 == 0
    return replace(
        excluding(recipe, [f"({'|'.join(sorted(leaves))})$"] if leaves else []),
        four_over_six=recipe.four_over_six or (nvfp4 and recipe.guidance.scales == "whole"),
        kv_rotation="hadamard" if rotates else recipe.kv_rotation,
    )


def excluding(recipe: QuantRecipe, names: Sequence[str]) -> QuantRecipe:
    """Also these linears in BF16; sites then are the default ones, which cover what such linears feed."""
    if not names:
        return recipe
    return replace(recipe, exclude=[*recipe.exclude, *names], guidance=replace(recipe.guidance, sites=None))


def suggest(
    recipe: QuantRecipe, qat: QATState, findings: Sequence[Finding], rows: Sequence[dict[str, Any]], head_dim: int
) -> list[QuantRecipe]:
    """Recipes to try, the least change first; empty if the findings ask for none."""
    found = {finding.code: finding for finding in findings}
    names = excluded(qat, rows) if rows else []
    base = excluding(recipe, names)
    tries = [base] if base != recipe else []
    if "k_channel" in found:
        rotates = head_dim % 16 == 0 and recipe.kv_rotation == "none"
        tries = [replace(base, kv_rotation="hadamard")] if rotates else []
        # Sites that guidance names may be k and v, which FP8 has no codes for; `guided` turns it on again.
        plain = replace(base.guidance, mode="none", sites=None)
        tries.append(replace(base, kv_cache="fp8", kv_rotation="none", guidance=plain))
    if "sensitive_layers" in found:
        ends, inside = kept_layers(qat, found["sensitive_layers"].layers)
        kept = recipe.bf16_layers or ends
        tries += [replace(excluding(each, inside), bf16_layers=kept) for each in tries or [base]]
    return tries


def guided(recipe: QuantRecipe, decision: str) -> QuantRecipe:
    """The recipe with parity guidance, where it can be guided and does not go without."""
    if decision == GO or recipe.guidance.mode != "none":
        return recipe
    with_parity = {"activations": recipe.activations, "kv_cache": recipe.kv_cache}
    if not set(with_parity.values()) & {"nvfp4", "mxfp4"}:
        return recipe
    return replace(recipe, guidance=replace(recipe.guidance, mode="parity"))


def as_yaml(recipe: QuantRecipe) -> str:
    """The recipe as `recipe:` of a config: formats and guidance always, so that they win over those of another config.

    What else is default is left out.
    """
    plain, default = dataclasses.asdict(recipe), dataclasses.asdict(QuantRecipe())
    always = ("weights", "activations", "kv_cache", "guidance")
    kept = {name: value for name, value in plain.items() if name in always or value != default[name]}
    own = {"mode"} if recipe.guidance.mode == "none" else {"mode", "sites"}
    guidance = {n: v for n, v in plain["guidance"].items() if n in own or v != default["guidance"][n]}
    return yaml.safe_dump({"recipe": kept | {"guidance": guidance}}, sort_keys=False)
