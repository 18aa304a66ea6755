"""The charts of a probe, each a matplotlib figure that the report writes as PNG and puts into its page as SVG.

Gaps span decades and can be exactly zero, so their axes are logarithmic down to the smallest value and linear below.
Colours are Okabe and Ito's, told apart by colour-blind readers; formats keep theirs over all charts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trace_lightning.probe.bands import BANDS
from trace_lightning.probe.outputs import interval, share
from trace_lightning.probe.run import ProbeResult
from trace_lightning.probe.study import K3
from trace_lightning.recipe import SITES

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_D_ACT = (
    ("qat", "d_act_rel_before", "values at FP4 sites, trainer on its own"),
    ("guided", "d_act_rel_after", "the same sites where guided"),
)
ARMS = {"naive": "#999999", "qat": "#D55E00", "guided": "#009E73", "floor": "#0072B2"}


def charts(result: ProbeResult) -> dict[str, Figure]:
    """Every chart whose part was measured, by name, in the order of the report."""
    makers = {
        "agreement": _agreement,
        "positions": _positions,
        "same_tokens": _same_tokens,
        "switches": _switches,
        "layers": _layers,
        "sites": _sites,
        "quality": _quality,
        "speed": _speed,
    }
    needs = {"same_tokens": "same_tokens", "switches": "switches", "layers": "layers", "quality": "quality"}
    wanted = [name for name in makers if name not in needs or result.parts.get(needs[name])]
    if not result.parts["divergence"][result.plan.target]["arms"]["qat"]["sites"]:
        wanted.remove("sites")
    return {name: makers[name](result) for name in wanted}


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)


def as_svg(figure: Figure) -> str:
    """A figure as an `<svg>` element, its text as text: small, sharp, and found by the browser's search."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "probe"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _figure(columns: int = 1, width: float = 5.2, height: float = 3.5) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _finish(axis: Axes, title: str, xlabel: str = "", ylabel: str = "", *, legend: bool = True) -> None:
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.grid(True, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if legend and axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, framealpha=0.8, edgecolor="none")


def _log(axis: Axes, values: Iterable[float]) -> None:
    positive = [value for value in values if 0 < value < math.inf]
    if not positive:
        return
    least = 10.0 ** math.floor(math.log10(max(min(positive), 1e-7)))
    axis.set_yscale("symlog", linthresh=least, linscale=0.4)
    axis.set_ylim(bottom=-0.15 * least, top=3 * max(positive))  # a curve at exactly 0 is seen above the frame


def _bounds(axis: Axes, key: str) -> None:
    band = next(band for band in BANDS if band.key == key)
    for bound, color, label in ((band.warn, "#E69F00", "warn"), (band.stop, "#C00000", "stop")):
        if bound is not None:
            axis.axhline(bound, color=color, linewidth=1, linestyle="--", label=f"{label} {bound:g}")


def _agreement(result: ProbeResult) -> Figure:
    """k3 of every arm by format, over the bands."""
    figure, (axis,) = _figure(1, 10.4, 3.8)
    divergence, names = result.parts["divergence"], list(result.plan.formats)
    every = []
    for offset, (arm, color) in enumerate(ARMS.items()):
        points = [
            (i, divergence[name]["arms"][arm]["metrics"][K3])
            for i, name in enumerate(names)
            if arm in divergence[name]["arms"]
        ]
        if points:
            x = [i + (0.0 if arm == "floor" else 0.26 * (offset - 1)) for i, _ in points]
            axis.bar(x, [value for _, value in points], 0.24, color=color, label=arm)
            for at, (_, value) in zip(x, points, strict=True):
                if value == 0:  # no bar, and yet the best of all
                    axis.text(at, 0.02, "0", color=color, ha="center", transform=axis.get_xaxis_transform())
            every += [value for _, value in points]
    _log(axis, [*every, 0.015])
    _bounds(axis, K3)
    axis.set_xticks(range(len(names)), names)
    _finish(axis, "trainer against rollout: k3 KL by format and trainer", ylabel="k3, nats")
    return figure


def _curve(axis: Axes, row: dict[str, Any], **style: Any) -> list[float]:
    curve = row["positions"]
    values = [point["mean_abs_dlogp"] for point in curve]
    axis.plot([point["first"] for point in curve], values, marker="o", markersize=3, linewidth=1.4, **style)
    return values


def _positions_axis(axis: Axes) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}" if at < 1024 else f"{at / 1024:g}k"))


def _positions(result: ProbeResult) -> Figure:
    """Mean gap over the position, one panel per format."""
    names = [name for name in result.plan.formats if name != "bf16"]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(5.2, 3.5 * columns), 2.9 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    floor, every = result.parts["divergence"]["bf16"]["arms"]["floor"], []
    legend = max(names, key=lambda name: len(result.parts["divergence"][name]["arms"]))
    for axis, name in zip(axes, names, strict=False):
        every += _curve(axis, floor, color=ARMS["floor"], label="BF16 floor")
        for arm, row in result.parts["divergence"][name]["arms"].items():
            if arm in ARMS:
                every += _curve(axis, row, color=ARMS[arm], label=arm)
        _positions_axis(axis)
        _finish(axis, name, "position in the answer", "mean |Δ log p|", legend=False)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    for axis in axes[: len(names)]:
        _log(axis, every)
    handles = axes[names.index(legend)].get_legend_handles_labels()
    title = "trainer against rollout along the answer"
    figure.legend(*handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False, title=title)
    return figure


def _same_tokens(result: ProbeResult) -> Figure:
    figure, (axis,) = _figure(1, 7.0, 3.8)
    every = []
    for color, (name, row) in zip(COLORS, result.parts["same_tokens"].items(), strict=False):
        every += _curve(axis, row, color=color, label=name)
    _positions_axis(axis)
    _log(axis, every)
    _finish(axis, "each format against BF16 on the same tokens", "position in the answer", "mean |Δ log p|")
    return figure


def _switches(result: ProbeResult) -> Figure:
    target, every = result.plan.target, []
    figure, (axis,) = _figure(1, 7.0, 3.8)
    for color, (name, row) in zip(COLORS, result.parts["switches"][target].items(), strict=False):
        every += _curve(axis, row, color=color, label=f"{name} alone")
    every += _curve(axis, result.parts["same_tokens"][target], color="#000000", label="all", linestyle="--")
    _positions_axis(axis)
    _log(axis, every)
    _finish(axis, f"{target}: which part causes the error", "position in the answer", "mean |Δ log p|")
    return figure


def _layers(result: ProbeResult) -> Figure:
    """Solo error, local errors and K's channels, over the layers."""
    rows = result.parts["layers"][result.plan.target]
    layers = [row["layer"] for row in rows]
    figure, (solo, local, channels) = _figure(3, 3.5, 3.4)
    solo.bar(layers, [row["solo_mean_abs_dlogp"] for row in rows], color=COLORS[0])
    _finish(solo, "this layer alone quantised", "layer", "mean |Δ log p|")
    names = [
        name
        for name in ("w:attn_in", "w:o_in", "w:mlp_in", "w:down_in", "attention_k", "attention_v")
        if any(name in row["errors"] for row in rows)
    ]
    for color, name in zip(COLORS, names, strict=False):
        label = name.replace("w:", "weights, ").replace("attention_", "attention, ").replace("_in", "")
        local.plot(
            layers, [row["errors"].get(name, math.nan) for row in rows], "o-", color=color, markersize=3, label=label
        )
    local.axhline(0.3, color="#C00000", linewidth=1, linestyle="--")
    local.set_ylim(bottom=0)
    _finish(local, "error of the output, own inputs", "layer", "relative")
    ratios = [row.get("k_channel", {}).get("ratio", math.nan) for row in rows]
    channels.bar(layers, ratios, color=COLORS[3])
    for axis in (solo, local, channels):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    channels.set_ylim(bottom=0)
    _finish(channels, "K: largest channel / median", "layer", "ratio")
    return figure


def _sites(result: ProbeResult) -> Figure:
    """D_act of every FP4 site over the layers: a trainer on its own, and the guided one."""
    figure, axes = _figure(2, 5.2, 3.4)
    arms, every = result.parts["divergence"][result.plan.target]["arms"], []
    for axis, (arm, key, title) in zip(axes, _D_ACT, strict=True):
        for color, site in zip(COLORS, SITES, strict=False):
            rows = [row for row in arms[arm]["sites"] if row["site"] == site and key in row]
            axis.plot([r["layer"] for r in rows], [r[key] for r in rows], "o-", markersize=3, color=color, label=site)
            every += [row[key] for row in rows]
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axis, title, "layer", "D_act, relative", legend=axis is axes[0])
    for axis in axes:
        _log(axis, every)
    return figure


def _errorbars(axis: Axes, names: list[str], found: list[dict[str, float] | None], color: str, label: str = "") -> None:
    known = [(i, value) for i, value in enumerate(found) if value is not None]
    means = [value["mean"] for _, value in known]
    below = [value["mean"] - value["low"] for _, value in known]
    above = [value["high"] - value["mean"] for _, value in known]
    axis.errorbar([i for i, _ in known], means, yerr=[below, above], fmt="o", color=color, capsize=3, label=label)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)


def _quality(result: ProbeResult) -> Figure:
    names = list(result.parts["quality"])
    figure, (reward, loops, lengths) = _figure(3, 3.5, 3.6)
    _errorbars(reward, names, [interval(result.parts["quality"][n]["questions"]) for n in names], COLORS[0])
    reward.set_ylim(bottom=0)
    _finish(reward, "held-out reward, 95 %", "", "mean reward")
    divergence = result.parts["divergence"]
    _errorbars(loops, names, [share(divergence[n]["outputs"]["repeats"]) for n in names], COLORS[1], "end in a loop")
    _errorbars(loops, names, [share(divergence[n]["outputs"]["broken"]) for n in names], COLORS[3], "broken text")
    loops.set_ylim(-0.05, 1.05)
    _finish(loops, "long answers", "", "share")
    outputs = [result.parts["quality"][n]["outputs"] for n in names]
    _errorbars(lengths, names, [interval(o["lengths"]) for o in outputs], COLORS[2])
    lengths.set_ylim(0, 1.2 * max(max(o["lengths"]) for o in outputs))
    _finish(lengths, "length of held-out answers, 95 %", "", "tokens")
    return figure


def _speed(result: ProbeResult) -> Figure:
    names = list(result.speed)
    figure, (tokens, cache) = _figure(2, 5.2, 3.4)
    tokens.bar(names, [result.speed[n]["decode_tokens_per_s"] for n in names], color=COLORS[0], label="measured")
    bound = [result.speed[n]["roofline_tokens_per_s"] or math.nan for n in names]
    if any(not math.isnan(value) for value in bound):
        tokens.plot(names, bound, "_", color="#000000", markersize=18, label="roofline")
    _finish(tokens, f"decoding here ({result.machine['device']})", "", "tokens per second")
    known = [n for n in names if "kv_bytes_per_token" in result.speed[n]]
    cache.bar(known, [result.speed[n]["kv_bytes_per_token"] / 1024 for n in known], color=COLORS[2])
    _finish(cache, "K and V", "", "KB per token")
    for axis in (tokens, cache):
        axis.tick_params(axis="x", rotation=30, labelsize=8)
    return figure
