"""What is remembered of a run, step by step, and the numbers of `summary.json` that follow from it.

A step is named by the optimizer steps behind the weights that drew its rollout: the first one is step 0, as in
metrics.csv, and a validation before training is step 0 as well. Only plain floats are kept, so the history can travel
in a checkpoint and a resumed run still knows where it started. What was not measured is absent, and null in the
summary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trace_lightning.metrics import layer_rows, position_curve, position_slope, site_means
from trace_lightning.quantization.guidance import Key
from trace_lightning.report.charts import PHASES

METRICS = {
    "reward": "reward",
    "mean_abs_dlogp": "sampling/sampling_logp_difference/mean",
    "max_abs_dlogp": "sampling/sampling_logp_difference/max",
    "k3": "rollout_corr/k3_kl",
    "entropy": "entropy",
    "mean_length": "completions/mean_length",
    "codes_before": "guidance/code_mismatch_before",
    "codes_after": "guidance/code_mismatch_after",
    "tokens_per_s": "throughput/rollout_tokens_per_s",
    "step_s": "timing/step_s",
    **{f"{phase}_s": f"timing/{phase}_s" for phase in (*PHASES, "rollout_wait")},
}
HELDOUT = {"reward": "heldout/reward", "mean_length": "heldout/mean_length"}
_HELDOUT_PREFIX = "heldout/"
_WINDOW = 5  # steps over which the first and the last training reward are averaged

Record = dict[str, float]
Sums = list[list[float]]


def pick(names: Mapping[str, str], metrics: Mapping[str, Tensor | float]) -> Record:
    """Those of `names` (short name to metric key) that were measured, with one transfer from the device."""
    found = {short: metrics[key] for short, key in names.items() if key in metrics}
    if not found:
        return {}
    values = torch.stack([torch.as_tensor(value).detach().double().cpu() for value in found.values()]).tolist()
    return dict(zip(found, values, strict=True))


def pick_heldout(metrics: Mapping[str, Tensor | float]) -> Record:
    """All held-out metrics; those of a set with settings of its own keep its name: `aime/pass@4`."""
    names = {key.removeprefix(_HELDOUT_PREFIX): key for key in metrics if key.startswith(_HELDOUT_PREFIX)}
    return pick(HELDOUT | {name: key for name, key in names.items() if "/" in name}, metrics)


@dataclass
class RunHistory:
    """Records of training steps and validations, each with its `step`, and the seconds they took in all.

    `positions` (`metrics.positions`) and `audit` (`quantization.guidance.AUDIT_SUMS` by `layer/site`) are sums over the
    whole run.
    """

    steps: list[Record] = field(default_factory=list)
    heldout: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    positions: Sums = field(default_factory=list)
    audit: dict[str, list[float]] = field(default_factory=dict)

    def add_positions(self, sums: Sums) -> None:
        """Add the sums of one step, [18][4]."""
        self.positions = [added(*rows) for rows in zip(self.positions, sums, strict=True)] if self.positions else sums

    def add_audit(self, table: Mapping[Key, list[float]]) -> None:
        """Add the audit of one step."""
        for (layer, site), sums in table.items():
            name = f"{layer}/{site}"
            self.audit[name] = added(self.audit[name], sums) if name in self.audit else list(sums)

    @property
    def audit_table(self) -> dict[Key, list[float]]:
        """The audit of the run by (layer, site)."""
        split = {name: name.split("/") for name in self.audit}
        return {(int(layer), site): self.audit[name] for name, (layer, site) in split.items()}

    def layer_rows(self) -> list[dict[str, float | int | str]]:
        """The table of `guidance_layers.csv`: one row per audited layer and site, over the whole run."""
        return layer_rows(self.audit_table)

    def column(self, name: str) -> list[float]:
        """The values of one metric over all training steps, NaN where it was not measured."""
        return [record.get(name, math.nan) for record in self.steps]

    def summary(self) -> dict[str, Any]:
        """The measured part of `summary.json`.

        * `reward`: training reward, mean over the first and the last 5 steps
        * `heldout`: of the first and the last validation, and the optimizer steps behind the weights of each
        * `eval_sets`: `first` and `last` value of every metric of the held-out sets with settings of their own
        * `divergence`: |log p(trainer) - log p(rollout)| of sampled tokens, `mean` and `k3` as means over the steps,
          `max` as the maximum of the run
        * `code_mismatch`: share of audited FP4 codes in which trainer and rollout differ, mean over the steps;
          `before` is the trainer's own rounding, `after` the guided one
        * `guidance_sites`: values of `metrics.audit_values` over the run, as means over the layers of each site
        * `per_position`: mean |log p(trainer) - log p(rollout)| by position in the completion, `buckets` that begin at
          `first` and end where the next one begins; `slope_per_doubling` and `slope_95` of a line through them
        * `throughput`: completion tokens per second of generation, and its share of the time of all steps
        """
        rewards = measured(self.column("reward"))
        first, last = (self.heldout[0], self.heldout[-1]) if self.heldout else ({}, {})
        return {
            "reward": {"first": mean(rewards[:_WINDOW]), "last": mean(rewards[-_WINDOW:])},
            "heldout": {
                "first": first.get("reward"),
                "last": last.get("reward"),
                "first_step": None if not first else int(first["step"]),
                "last_step": None if not last else int(last["step"]),
            },
            "eval_sets": self._eval_sets(),
            "divergence": {
                "mean_abs_dlogp": mean(measured(self.column("mean_abs_dlogp"))),
                "max_abs_dlogp": max(measured(self.column("max_abs_dlogp")), default=None),
                "k3": mean(measured(self.column("k3"))),
            },
            "code_mismatch": {
                "before": mean(measured(self.column("codes_before"))),
                "after": mean(measured(self.column("codes_after"))),
            },
            "guidance_sites": site_means(self.audit_table),
            "per_position": self._per_position(),
            "throughput": self._throughput(),
            "rollouts": len(self.steps),
            "seconds": round(self.seconds, 3),
        }

    def _eval_sets(self) -> dict[str, dict[str, float]]:
        names = sorted({name for record in self.heldout for name in record if "/" in name})
        found = {name: [record[name] for record in self.heldout if name in record] for name in names}
        return {name: {"first": values[0], "last": values[-1]} for name, values in found.items()}

    def _per_position(self) -> dict[str, Any]:
        slope = position_slope(self.positions)
        return {
            "buckets": position_curve(self.positions),
            "slope_per_doubling": None if slope is None else slope.per_doubling,
            "slope_95": None if slope is None else [slope.low, slope.high],
        }

    def _throughput(self) -> dict[str, float | None]:
        timed = [r for r in self.steps if {"tokens_per_s", "rollout_s", "step_s"} <= r.keys()]
        rollout, step = sum(r["rollout_s"] for r in timed), sum(r["step_s"] for r in timed)
        tokens = sum(r["tokens_per_s"] * r["rollout_s"] for r in timed)
        return {
            "rollout_tokens_per_s": tokens / rollout if rollout else None,
            "rollout_share": rollout / step if step else None,
        }


def added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Sums, entry by entry."""
    return [a + b for a, b in zip(one, other, strict=True)]


def measured(values: Sequence[float]) -> list[float]:
    """The values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    return sum(values) / len(values) if values else None


def json_safe(value: Any) -> Any:
    """The same data with NaN as None and infinities as the strings `inf` and `-inf`: JSON has neither."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
