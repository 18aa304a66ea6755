"""Which metrics share a chart, and the data that the page's script draws. The definitions are in docs/metrics.md.

Mismatch spans decades, so its charts begin logarithmic; every chart can be switched. Bounds come from `probe.bands`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trace_lightning.probe.bands import BANDS, Band
from trace_lightning.report.run import Run
from trace_lightning.report.series import Series

PHASES = ("sync", "rollout", "reward", "train")
PHASES_AHEAD = ("sync", "rollout_wait", "train")  # rollout and reward then run beside train and add nothing
_DIGITS = 5  # significant ones of what is drawn
CODES = "guidance/code_mismatch_after"
_CODES_BAND = Band(CODES, "FP4 codes that differ", 0.01, None, "docs/metrics.md")
BOUNDS = {band.key: band for band in (*BANDS, _CODES_BAND) if not band.distance}


@dataclass(frozen=True)
class Chart:
    """Metrics by key, each with its label in the legend.

    `smooth`: the first curve is drawn pale, and its running mean on top. `stacked`: areas that add up.
    """

    title: str
    unit: str
    keys: Mapping[str, str]
    log: bool = False
    smooth: bool = False
    stacked: bool = False


_DLOGP = "sampling/sampling_logp_difference"
_WAIT = "timing/rollout_wait_s"
_STEP = Chart("Time per step", "seconds", {f"timing/{phase}_s": phase for phase in PHASES}, stacked=True)
_AHEAD = (  # instead, with rollouts one step ahead
    Chart("Time per step", "seconds", {f"timing/{p}_s": p.replace("_", " ") for p in PHASES_AHEAD}, stacked=True),
    Chart("Time beside training", "seconds", {f"timing/{p}_s": p for p in ("rollout", "reward")}, stacked=True),
)
CHARTS = (
    Chart("Reward", "mean reward", {"reward": "training", "heldout/reward": "held out"}, smooth=True),
    Chart("Trainer against rollout", "|Δ log p|", {f"{_DLOGP}/mean": "mean", f"{_DLOGP}/max": "max"}, log=True),
    Chart("KL of rollout and trainer", "nats", {"rollout_corr/k3_kl": "k3"}, log=True),
    Chart("Effective sample size", "share of tokens", {"rollout_corr/ess": "ESS"}),
    Chart(
        "FP4 codes that differ",
        "share of audited codes",
        {"guidance/code_mismatch_before": "before guidance", CODES: "after guidance"},
        log=True,
    ),
    Chart("Entropy", "nats per token", {"entropy": "entropy"}),
    Chart(
        "Completion length",
        "tokens",
        {
            "completions/mean_length": "mean",
            "completions/max_length": "max",
            "heldout/mean_length": "held out, mean",
        },
    ),
    Chart("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    Chart("Learning rate", "", {"learning_rate": "learning rate"}),
    _STEP,
    Chart(
        "Speed",
        "tokens per second",
        {"throughput/rollout_tokens_per_s": "while generating", "throughput/step_tokens_per_s": "over the step"},
    ),
)
_DRAWN = {key for chart in (*CHARTS, *_AHEAD) for key in chart.keys}


@dataclass
class Curve:
    """One curve as the script takes it."""

    label: str
    series: Series
    pale: bool = False
    color: int = 0

    def data(self, *, stacked: bool = False) -> dict[str, Any]:
        """Steps and values, thinned and rounded."""
        thin = self.series.averaged() if stacked else self.series.thinned()
        values = [float(f"{value:.{_DIGITS}g}") for value in thin.values]
        steps = [int(step) if step == int(step) else step for step in thin.steps]
        return {"label": self.label, "x": steps, "y": values, "pale": self.pale, "color": self.color}


@dataclass
class Drawing:
    """A chart with its curves."""

    title: str
    unit: str
    curves: list[Curve]
    log: bool = False
    stacked: bool = False
    bounds: list[dict[str, Any]] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """As the script takes it."""
        curves = [curve.data(stacked=self.stacked) for curve in self.curves]
        flags = {"log": self.log, "stacked": self.stacked}
        return {"title": self.title, "unit": self.unit, "curves": curves, "bounds": self.bounds, **flags}


def run_drawings(run: Run) -> list[Drawing]:
    """The charts of one run for which something was measured."""
    drawings = []
    at = CHARTS.index(_STEP)
    charts = (*CHARTS[:at], *_AHEAD, *CHARTS[at + 1 :]) if _WAIT in run.metrics else CHARTS
    for chart in charts:
        curves = list(_curves(run, chart))
        if curves:
            measured = [key for key in chart.keys if key in run.metrics]
            bounds = _bounds(measured, chart.keys if len(chart.keys) > 1 else {})
            drawings.append(Drawing(chart.title, chart.unit, curves, chart.log, chart.stacked, bounds))
    return drawings


def _curves(run: Run, chart: Chart) -> Iterator[Curve]:
    """What was measured; a metric keeps its colour, whichever others are there."""
    for number, (key, label) in enumerate(chart.keys.items()):
        series = run.metrics.get(key)
        if series is None:
            continue
        window = len(series) // 20 if chart.smooth and number == 0 else 0
        yield Curve(label, series, pale=window > 1, color=number)
        if window > 1:
            yield Curve(f"{label}, mean of {window}", series.smoothed(window), color=number)


def _bounds(keys: Sequence[str], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The bounds of the metrics of a chart, each labelled by its curve where there are several."""
    found = []
    for key in keys:
        band = BOUNDS.get(key)
        for kind in ("warn", "stop"):
            value = None if band is None else getattr(band, kind)
            if band is not None and value is not None:
                side = "below" if band.low else "above"
                found.append({"value": value, "kind": kind, "label": f"{labels.get(key, '')} {side} {value:g}".strip()})
    return found


def other_drawings(run: Run) -> list[Drawing]:
    """One chart each for the metrics that `run_drawings` leaves."""
    return [Drawing(key, "", [Curve(key, series)]) for key, series in sorted(run.metrics.items()) if key not in _DRAWN]


def shared_drawings(runs: Sequence[Run], labels: Sequence[str]) -> tuple[list[Drawing], list[Drawing]]:
    """One chart per metric with a curve for each run that measured it: those of `CHARTS`, and all others."""
    titles = {
        key: (chart if len(chart.keys) == 1 else Chart(f"{chart.title}: {label}", chart.unit, {}, log=chart.log))
        for chart in CHARTS
        for key, label in chart.keys.items()
    }
    measured = {key for run in runs for key in run.metrics}
    first = [_shared(key, titles[key], runs, labels) for key in titles if key in measured]
    rest = [_shared(key, Chart(key, "", {}), runs, labels) for key in sorted(measured - set(titles))]
    return first, rest


def _shared(key: str, chart: Chart, runs: Sequence[Run], labels: Sequence[str]) -> Drawing:
    pairs = enumerate(zip(runs, labels, strict=True))
    curves = [Curve(label, run.metrics[key], color=i) for i, (run, label) in pairs if key in run.metrics]
    return Drawing(chart.title, chart.unit, curves, chart.log, bounds=_bounds([key], {}))
