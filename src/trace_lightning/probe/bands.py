"""Healthy, warn, stop: where the bounds of the divergence metrics lie, and which published value each rests on.

Only bounds that somebody published, or that we measured, are here; a metric without one is shown and not judged. The
definitions of the metrics are in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HEALTHY, WARN, STOP = "healthy", "warn", "stop"
GRADES = (HEALTHY, WARN, STOP)


@dataclass(frozen=True)
class Band:
    """Bounds of one metric. `warn` and `stop` are values from which on it is no longer healthy; None: no such bound.

    `low`: smaller is worse. `distance`: what is judged is the absolute value.
    """

    key: str
    title: str
    warn: float | None
    stop: float | None
    source: str
    low: bool = False
    distance: bool = False

    def grade(self, value: float) -> str:
        """One of `GRADES`; NaN stops."""
        value = abs(value) if self.distance else value

        def beyond(bound: float | None) -> bool:
            return bound is not None and not (value >= bound if self.low else value <= bound)

        return STOP if beyond(self.stop) else WARN if beyond(self.warn) else HEALTHY


BANDS = (
    Band(
        "sampling/sampling_logp_difference/mean",
        "mean |Δ log p|",
        0.05,
        None,
        "BF16 on both sides: .010 (27B, Miles documentation), .034 to .041 (SmolLM2-135M, docs/results/guidance.md)",
    ),
    Band(
        "sampling/sampling_logp_difference/max",
        "max |Δ log p|",
        1.0,
        None,
        "floor .74, QUADS .86, no correction 1.3 (arXiv 2607.15810, second hand)",
    ),
    Band(
        "rollout_corr/k3_kl",
        "k3 KL",
        0.002,
        0.015,
        "BF16 .0003 to .001 (prime-rl#2979, NeMo-RL docs); merge bar of prime-rl .015 over 20 steps",
    ),
    Band("rollout_corr/kl", "|KL|, k1", None, 0.1, "alarm of verl: above .1", distance=True),
    Band(
        "rollout_corr/token_mult_prob_error",
        "mean exp|Δ|",
        1.05,
        None,
        "NeMo-RL: investigate above 1.05",
    ),
    Band("rollout_corr/chi2_token", "chi² per token", None, 1.0, "alarm of verl: above 1"),
    Band("rollout_corr/ess", "effective sample size", None, 0.3, "alarm of verl: below .3", low=True),
)


def grades(metrics: Mapping[str, float]) -> dict[str, str]:
    """The grade of every metric that has a band and was measured."""
    return {band.key: band.grade(metrics[band.key]) for band in BANDS if band.key in metrics}


def worst(found: Mapping[str, str]) -> str:
    """The worst of some grades; healthy for none."""
    return max(found.values(), key=GRADES.index, default=HEALTHY)
