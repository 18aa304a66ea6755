"""What the audited rows say about guidance, per layer and site: how many codes differ, and how far values are apart.

Codes that differ count alike whether the block is large or small. D_act (TRACE, arXiv 2610.07767) weighs them: the
Frobenius norm of what the trainer computes with, minus what the rollout computed with, at one (layer, site):

    D_act = || DQ(Q_trainer(X_trainer)) - DQ(Q_rollout(X_rollout)) ||_F        rows: audited tokens

The norm grows with the number of tokens, so it is told per token (root mean square over tokens of the row norms) and
relative to the rollout's values, `D_act / || DQ(Q_rollout(X_rollout)) ||_F`. Both follow from sums of squares, which
add up over micro-batches and ranks (`quantization.guidance.AUDIT_SUMS`).

    before    the trainer's nearest rounding on its own scales
    nearest   nearest rounding on the rollout's scales
    after     as used: guided

All three see the same trainer input, which was guided upstream: `before` is less than an unguided trainer would show.
Where only the parity of scales was recorded the rollout's values are unknown, and D_act is absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trace_lightning.quantization.guidance import AUDIT_SUMS, Key
from trace_lightning.recipe import SITES

AuditTable = Mapping[Key, Sequence[float]]  # AUDIT_SUMS of each (layer, site)
LOGGED = ("code_mismatch_before", "code_mismatch_after", "d_act_rel_before", "d_act_rel_after")


def audit_values(sums: Sequence[float]) -> dict[str, float]:
    """Named values of one (layer, site) from its `AUDIT_SUMS`; empty if nothing was audited.

    * `code_mismatch_{before,after}`: share of codes that differ from the rollout's
    * `code_mismatch_{before,after}_off_by_one`: share of codes that differ by exactly one
    * `d_act_{before,nearest,after}`: per token; `d_act_rel_{before,nearest,after}`: relative
    """
    total = dict(zip(AUDIT_SUMS, sums, strict=True))
    if not total["elements"]:
        return {}
    codes = ("before", "before_off_by_one", "after", "after_off_by_one")
    values = {f"code_mismatch_{name}": total[name] / total["elements"] for name in codes}
    for name in ("before", "nearest", "after") if total["tokens"] else ():
        values[f"d_act_{name}"] = math.sqrt(total[f"gap_{name}"] / total["tokens"])
        if total["rollout"]:
            values[f"d_act_rel_{name}"] = math.sqrt(total[f"gap_{name}"] / total["rollout"])
    return values


def site_means(table: AuditTable) -> dict[str, dict[str, float]]:
    """The values of `audit_values` as means over the layers of each site, in the order of `SITES`."""
    result = {}
    for site in SITES:
        layers = [audit_values(sums) for (_, other), sums in table.items() if other == site]
        layers = [values for values in layers if values]
        if layers:
            names = [name for name in layers[0] if all(name in values for values in layers)]
            result[site] = {name: sum(values[name] for values in layers) / len(layers) for name in names}
    return result


def audit_metrics(table: AuditTable) -> dict[str, float]:
    """What is logged in a step: shares over all codes, and `guidance/<site>/...` as means over layers.

    * `guidance/code_mismatch_{before,after,after_off_by_one}`: over all audited codes
    * `guidance/<site>/code_mismatch_{before,after}`, `guidance/<site>/d_act_rel_{before,after}`
    """
    totals = audit_values([sum(column) for column in zip(*table.values(), strict=True)] or [0.0] * len(AUDIT_SUMS))
    names = ("code_mismatch_before", "code_mismatch_after", "code_mismatch_after_off_by_one")
    result = {f"guidance/{name}": totals[name] for name in names if totals}
    for site, values in site_means(table).items():
        result |= {f"guidance/{site}/{name}": values[name] for name in LOGGED if name in values}
    return result


def inner_step_metrics(steps: Sequence[Sequence[float]]) -> dict[str, float]:
    """How guidance holds while the weights leave the rollout's: one entry per optimizer step on the same rollout.

    * `guidance/inner_step_<i>/{code_mismatch_after,d_act_rel_after}`: over all audited sites, i from 0

    Args:
        steps: `AUDIT_SUMS` of all sites together, one entry per optimizer step. A single step has nothing to add to
            `audit_metrics`, and gives nothing.
    """
    if len(steps) < 2:
        return {}
    values = {f"inner_step_{i}": audit_values(sums) for i, sums in enumerate(steps)}
    names = ("code_mismatch_after", "d_act_rel_after")
    return {f"guidance/{step}/{name}": of[name] for step, of in values.items() for name in names if name in of}


def layer_rows(table: AuditTable) -> list[dict[str, float | int | str]]:
    """One row per audited (layer, site), layers ascending: `layer`, `site`, `codes` compared and its `audit_values`."""
    order = sorted(table, key=lambda key: (key[0], SITES.index(key[1])))
    rows: list[dict[str, float | int | str]] = []
    for layer, site in order:
        values = audit_values(table[layer, site])
        if values:
            elements = int(table[layer, site][AUDIT_SUMS.index("elements")])
            rows.append({"layer": layer, "site": site, "codes": elements, **values})
    return rows
