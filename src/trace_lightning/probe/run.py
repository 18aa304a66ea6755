"""The probe from a checked plan to a verdict: which parts are measured, in which order, and kept where.

Every part goes through the `PartStore`, so what an interrupted probe has finished is not measured again. The order puts
the floor first: it also draws the tokens that every format is then shown.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers

from trace_lightning.bench.machine import device_name, free_memory, measure_limits
from trace_lightning.bench.roofline import Limits, decode_cost, kv_bytes, sequences_that_fit, snapshot_bytes
from trace_lightning.bench.shapes import ModelShape
from trace_lightning.models.fused import FUSED_FAMILIES
from trace_lightning.probe import advice
from trace_lightning.probe.bands import STOP
from trace_lightning.probe.paths import in_words, paths
from trace_lightning.probe.plan import ProbePlan, words
from trace_lightning.probe.store import PartStore
from trace_lightning.probe.study import MEAN, Study, qat_state
from trace_lightning.probe.verdict import Verdict, judge
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.version import __version__

Announce = Callable[[str, int, int], None]  # (part, its number, of how many)
SCHEMA = 1
_WORTH = 0.9  # of the error: what a further change of the recipe has to bring it below


@dataclass(kw_only=True)
class ProbeResult:
    """Everything a report is made of. `parts` as `study.Study` returns them: {part: {format: numbers}}."""

    plan: ProbePlan
    parts: dict[str, Any]
    verdicts: dict[str, Verdict]
    speed: dict[str, dict[str, Any]]
    machine: dict[str, Any]
    recipe: dict[str, Any]
    reused: list[str]

    @property
    def verdict(self) -> Verdict:
        """The one about the target."""
        return self.verdicts[self.plan.target]


def run_probe(study: Study, store: PartStore, announce: Announce = lambda part, number, total: None) -> ProbeResult:
    """Measure everything that the plan asks for, or read it from `store`, and judge."""
    plan, parts = study.plan, words(study.plan.settings.parts)
    quantised = [name for name in plan.formats if name != "bf16"]
    tasks: list[tuple[str, str]] = [("divergence", name) for name in plan.formats]
    tasks += [("same_tokens", name) for name in quantised if "same_tokens" in parts]
    tasks += [("switches", plan.target)] if "same_tokens" in parts else []
    tasks += [("layers", plan.target)] if "layers" in parts else []
    tasks += [("quality", name) for name in plan.formats if "quality" in parts and plan.heldout]
    results: dict[str, Any] = {}
    total = len(tasks) + ("sync" in parts) + 1
    for number, (part, name) in enumerate(tasks):
        announce(f"{part} {name}", number, total)
        measure = partial(_measure, study, part, name, results)
        results.setdefault(part, {})[name] = store.get(f"{part}-{name}", measure, recipe=asdict(plan.formats[name]))
    if "sync" in parts:
        announce("sync", total - 2, total)
        results["sync"] = store.get("sync", study.sync)
    verdicts = {name: judge(results, name) for name in quantised}
    announce("recipe", total - 1, total)
    recipe = store.get(
        f"recipe-{plan.target}",
        lambda: _recipe(study, results, verdicts[plan.target]),
        recipe=asdict(plan.formats[plan.target]),
        reasons=verdicts[plan.target].reasons,
    )
    machine, limits = _machine(study)
    return ProbeResult(
        plan=plan,
        parts=results,
        verdicts=verdicts,
        speed={name: _speed(study, results["divergence"][name]["speed"], name, limits) for name in plan.formats},
        machine=machine,
        recipe=recipe,
        reused=store.reused,
    )


def _measure(study: Study, part: str, name: str, results: dict[str, Any]) -> Any:
    recipe = study.plan.formats[name]
    if part in ("divergence", "quality"):
        return getattr(study, part)(name)
    return getattr(study, part)(recipe, study.trajectories(results["divergence"]["bf16"]["tokens"]))


def _recipe(study: Study, results: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    """The recipe to paste, and its measured error on the bf16 trajectories beside the target's."""
    plan, target = study.plan, study.plan.formats[study.plan.target]
    rows = results.get("layers", {}).get(plan.target, [])
    qat, head_dim = qat_state(study.trainer(target)), _head_dim(study)
    candidates = advice.suggest(target, qat, verdict.findings, rows, head_dim)
    lost = any(finding.code == "reward" and finding.severity == STOP for finding in verdict.findings)
    chosen, measured = target, dict[str, float]()
    if candidates or lost:
        batch = study.trajectories(results["divergence"]["bf16"]["tokens"])
        measured["target"] = error = study.same_tokens(target, batch)["metrics"][MEAN]
        for candidate in [*candidates, *([None] if lost else [])]:
            recipe = candidate or advice.mildly(chosen, qat, head_dim)  # None: milder rounding of what served so far
            tried = error if recipe == chosen else study.same_tokens(recipe, batch)["metrics"][MEAN]
            if tried < _WORTH * error:
                chosen, error = recipe, tried
        measured["recipe"] = error
    pasted = advice.guided(replace(chosen, trainer="qat"), verdict.decision)
    return {"yaml": advice.as_yaml(pasted), "changed": chosen is not target, "same_tokens_mean_abs_dlogp": measured}


def _head_dim(study: Study) -> int:
    config = study.source.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _machine(study: Study) -> tuple[dict[str, Any], Limits | None]:
    device = study.source.device
    if isinstance(study.engine, LocalEngine):
        study.engine.release()  # or its cache would be missing from what is free
    limits = measure_limits(device)
    versions = {"trace_lightning": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "device": device_name(device),
        "versions": versions | {"python": platform.python_version()},
        "in_words": in_words(device),
        "copy_bandwidth": None if limits is None else limits.bandwidth,
        "matmul_rate": None if limits is None else limits.matmul_rate,
    }, limits


def _speed(study: Study, measured: dict[str, Any], name: str, limits: Limits | None) -> dict[str, Any]:
    """Tokens per second here, bytes, what fits, and the roofline; None where the device or the family has none."""
    recipe, config, device = study.plan.formats[name], study.source.config, study.source.device
    fused = config.model_type in FUSED_FAMILIES
    result = measured | {"paths": paths(recipe, device, fused=fused), "roofline_tokens_per_s": None, "fit": None}
    if not fused:
        return result
    shape, context = ModelShape.of(config), _longest(study.plan)
    result["kv_bytes_per_token"] = kv_bytes(shape, recipe)
    result["snapshot_bytes"] = snapshot_bytes(shape, recipe)
    if limits is not None:
        batch = int(measured["sequences"])
        cost = decode_cost(shape, recipe, batch=batch, context=context / 2)
        result["roofline_tokens_per_s"] = batch / cost.seconds(limits)
        free = free_memory(device) - snapshot_bytes(shape, recipe)
        result["fit"] = {"context": context, "sequences": sequences_that_fit(free, kv_bytes(shape, recipe), context)}
    return result


def _longest(plan: ProbePlan) -> int:
    return max(len(prompt.token_ids) for prompt in plan.prompts) + plan.sampling.max_new_tokens
