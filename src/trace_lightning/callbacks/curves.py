"""`curves.png`: eight panels that tell whether a run learned, and whether rollout and trainer agreed while it did.

Mismatch spans decades and is often exactly zero (guided rounding can make both sides bit-equal), so its axis is
logarithmic down to the smallest value measured and linear from there to zero. A figure object is drawn directly:
pyplot would switch the process to another backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trace_lightning.callbacks.history import RunHistory, measured
from trace_lightning.metrics import position_curve, position_slope, site_means
from trace_lightning.report.charts import PHASES, PHASES_AHEAD
from trace_lightning.report.series import running_mean

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe-Ito: told apart by colour-blind readers and in grey
_MAX_BARS = 200
_MAX_MARKERS = 40


def draw_curves(history: RunHistory, path: Path, title: str = "") -> None:
    """Draw the history of a run into a PNG file, whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 7), dpi=110, layout="constrained")
    axes = figure.subplots(2, 4)
    _reward(axes[0][0], history)
    _mismatch(axes[0][1], history)
    _codes_or_throughput(axes[0][2], history)
    _positions(axes[0][3], history)
    _single(axes[1][0], history, "entropy", "entropy", "nats per token", _COLORS[0])
    _single(axes[1][1], history, "mean_length", "completion length", "tokens", _COLORS[0])
    _phases(axes[1][2], history)
    _sites(axes[1][3], history)
    for axis in (*axes[0][:3], *axes[1][:3]):
        _over_steps(axis, history)
    for axis in axes.flat:
        _finish(axis)
    if title:
        figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    figure.savefig(part, format="png")
    part.replace(path)


def _steps(history: RunHistory) -> list[float]:
    return history.column("step")


def _line(axis: Any, x: Sequence[float], y: Sequence[float], color: str, label: str, **kwargs: Any) -> None:
    """A curve; single points would be invisible without markers, and hundreds of markers hide the curve."""
    marker = "o" if len(x) <= _MAX_MARKERS else ""
    axis.plot(x, y, color=color, label=label, **({"marker": marker, "markersize": 3, "linewidth": 1.3} | kwargs))


def _reward(axis: Any, history: RunHistory) -> None:
    steps, rewards = _steps(history), history.column("reward")
    if measured(rewards):
        window = max(1, len(steps) // 20)
        if window > 1:
            axis.plot(steps, rewards, color=_COLORS[0], alpha=0.3, linewidth=0.8)
        label = "training" if window == 1 else f"training, mean of {window}"
        _line(axis, steps, running_mean(rewards, window), _COLORS[0], label, **({"marker": ""} if window > 1 else {}))
    heldout = [record for record in history.heldout if "reward" in record]
    if heldout:
        x, y = [r["step"] for r in heldout], [r["reward"] for r in heldout]
        axis.plot(x, y, color=_COLORS[1], marker="s", markersize=5, linewidth=1.3, label="held out")
    axis.set(title="reward", ylabel="mean reward")


def _mismatch(axis: Any, history: RunHistory) -> None:
    names = {"max_abs_dlogp": "max |Δ log p|", "mean_abs_dlogp": "mean |Δ log p|", "k3": "k3"}
    for color, (name, label) in zip((_COLORS[1], _COLORS[0], _COLORS[2]), names.items(), strict=True):
        values = history.column(name)
        if measured(values):
            _line(axis, _steps(history), values, color, label)
    _log_down_to_zero(axis, [value for name in names for value in measured(history.column(name))])
    axis.set(title="trainer against rollout, sampled tokens", ylabel="log-prob difference")


def _log_down_to_zero(axis: Any, values: Sequence[float], all_zero: str = "exactly 0 in every step") -> None:
    positive = [value for value in values if 0 < value < math.inf]
    if positive:
        smallest = 10 ** math.floor(math.log10(min(positive)))
        if min(values) > 0:
            axis.set_yscale("log")
            return
        axis.set_yscale("symlog", linthresh=smallest, linscale=0.5)
        axis.set_ylim(-0.1 * smallest, 2 * max(positive))
    elif values:
        axis.set_ylim(-0.05, 1)
        axis.text(0.5, 0.5, all_zero, ha="center", transform=axis.transAxes, color="0.35")


def _codes_or_throughput(axis: Any, history: RunHistory) -> None:
    """Codes in which the two sides differ, where that was audited; else how fast the rollout was."""
    if not measured(history.column("codes_before")):
        _single(axis, history, "tokens_per_s", "rollout throughput", "tokens per second", _COLORS[0])
        return
    pairs = [history.column("codes_before"), history.column("codes_after")]
    for color, values, label in zip(_COLORS[1::-1], pairs, ("before guidance", "after guidance"), strict=True):
        _line(axis, _steps(history), values, color, label)
    _log_down_to_zero(axis, [value for values in pairs for value in measured(values)])
    axis.set(title="FP4 codes that differ", ylabel="share of audited codes")


def _single(axis: Any, history: RunHistory, name: str, title: str, ylabel: str, color: str) -> None:
    values = history.column(name)
    if measured(values):
        _line(axis, _steps(history), values, color, "")
    axis.set(title=title, ylabel=ylabel)


def _phases(axis: Any, history: RunHistory) -> None:
    steps = _steps(history)
    names = PHASES_AHEAD if measured(history.column("rollout_wait_s")) else PHASES
    columns = {phase: history.column(f"{phase}_s") for phase in names}
    columns = {p: [0.0 if math.isnan(v) else v for v in values] for p, values in columns.items() if measured(values)}
    if len(steps) > _MAX_BARS:
        axis.stackplot(steps, *columns.values(), labels=list(columns), colors=_COLORS)
    else:
        width = 0.85 * min((b - a for a, b in pairwise(steps) if b > a), default=1.0)
        bottom = [0.0] * len(steps)
        for color, (phase, values) in zip(_COLORS, columns.items(), strict=False):
            axis.bar(steps, values, width, bottom=bottom, color=color, label=phase)
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axis.set(title="time per step", ylabel="seconds")


def _positions(axis: Any, history: RunHistory) -> None:
    """Mean |Δ log p| along the completion, over the whole run: does the gap grow with what lies in the KV cache?"""
    curve = position_curve(history.positions)
    if curve:
        axis.set_xscale("log", base=2)
        values = [bucket["mean_abs_dlogp"] for bucket in curve]
        _line(axis, [bucket["first"] for bucket in curve], values, _COLORS[0], "")
        _log_down_to_zero(axis, values, "exactly 0 everywhere")
    slope = position_slope(history.positions)
    if slope is not None:
        text = f"{slope.per_doubling:+.1e} per doubling\n95 %: {slope.low:+.1e} to {slope.high:+.1e}"
        axis.text(0.03, 0.97, text, va="top", fontsize=8, transform=axis.transAxes, color="0.35")
    axis.set(title="by position, whole run", ylabel="mean |Δ log p|", xlabel="position in the completion, at least")


def _sites(axis: Any, history: RunHistory) -> None:
    """How far apart the two sides' quantised values are at each guided site, over the whole run."""
    sites = {site: values for site, values in site_means(history.audit_table).items() if "d_act_rel_after" in values}
    names = {"before": "before guidance", "nearest": "the rollout's scales", "after": "after guidance"}
    highest = 0.0
    for i, (color, (name, label)) in enumerate(zip((_COLORS[1], _COLORS[3], _COLORS[0]), names.items(), strict=True)):
        heights = [values[f"d_act_rel_{name}"] for values in sites.values()]
        if heights:
            axis.bar([x + 0.27 * (i - 1) for x in range(len(sites))], heights, 0.27, color=color, label=label)
            highest = max(highest, *heights)
    if sites and highest == 0:
        _log_down_to_zero(axis, [0.0], "exactly 0 at every site")
    axis.set_xticks(range(len(sites)), list(sites))
    axis.set(title="values of audited tokens, whole run", ylabel="D_act, relative", xlabel="site, mean over layers")


def _over_steps(axis: Any, history: RunHistory) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("optimizer steps")
    steps = _steps(history) + [record["step"] for record in history.heldout]
    last = max(steps, default=0.0)
    margin = max(0.6, 0.02 * last)
    axis.set_xlim(min(steps, default=0.0) - margin, last + margin)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _finish(axis: Any) -> None:
    axis.grid(True, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if not axis.has_data():
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="0.35")
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, framealpha=0.75, edgecolor="none", loc="best")
