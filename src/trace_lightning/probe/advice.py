"""The recipe to paste: the target's formats, with what the findings say should be kept out of FP4.

Linears with outliers go to `exclude`, whole fused groups at a time. K channels that drown their block are spread by a
rotation where that helps, which is measured, else the cache goes to FP8. Guidance is on unless it is not needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from trace_lightning.probe.verdict import GO, LOCAL_ERROR, Finding
from trace_lightning.quantization.qat import QATState
from trace_lightning.types import GuidanceConfig, QuantRecipe


def excluded(qat: QATState, findings: Sequence[Finding], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Regular expressions for the linears whose weights have outliers."""
    layers = {layer for finding in findings if finding.code == "weight_outliers" for layer in finding.layers}
    bad = {
        (row["layer"], name[2:])
        for row in rows
        for name, error in row["errors"].items()
        if name.startswith("w:") and error > LOCAL_ERROR and row["layer"] in layers
    }
    groups = [group for group in qat.layout.groups if (group.layer, group.site) in bad]
    return [f"^{re.escape(name)}$" for group in groups for name in group.names]


def suggest(
    recipe: QuantRecipe, qat: QATState, findings: Sequence[Finding], rows: Sequence[dict[str, Any]], head_dim: int
) -> list[QuantRecipe]:
    """Recipes to try, the least change first; empty if the findings ask for none."""
    names = excluded(qat, findings, rows)
    base = replace(recipe, exclude=[*recipe.exclude, *names])
    if not any(finding.code == "k_channel" for finding in findings):
        return [base] if names else []
    tries = [replace(base, kv_rotation="hadamard")] if head_dim % 16 == 0 and recipe.kv_rotation == "none" else []
    return [*tries, replace(base, kv_cache="fp8", kv_rotation="none")]


def guided(recipe: QuantRecipe, decision: str) -> QuantRecipe:
    """The recipe with parity guidance, where it can be guided and does not go without."""
    if decision == GO or recipe.guidance.mode != "none":
        return recipe
    with_parity = {"activations": recipe.activations, "kv_cache": recipe.kv_cache}
    if not set(with_parity.values()) & {"nvfp4", "mxfp4"}:
        return recipe
    return replace(recipe, guidance=GuidanceConfig(mode="parity"))


def as_yaml(recipe: QuantRecipe) -> str:
    """The recipe as `recipe:` of a config, without what is default anyway."""
    plain, default = dataclasses.asdict(recipe), dataclasses.asdict(QuantRecipe())
    kept = {name: value for name, value in plain.items() if value != default[name]}
    if "guidance" in kept:
        kept["guidance"] = {n: v for n, v in plain["guidance"].items() if v != default["guidance"][n]}
    return yaml.safe_dump({"recipe": kept}, sort_keys=False)
