"""The tables of a probe as text cells, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trace_lightning.probe.bands import BANDS, grades
from trace_lightning.probe.outputs import interval, unlikely_share
from trace_lightning.probe.run import ProbeResult
from trace_lightning.probe.study import K3, MAX, MEAN

Rows = list[list[str]]


def headline(result: ProbeResult) -> str:
    """The verdict in a line."""
    return f"{result.verdict.decision.upper()}: {result.plan.target} on {result.plan.model}"


def agreement_rows(result: ProbeResult) -> tuple[list[str], Rows, list[list[str]]]:
    """Columns, cells and grades of the table of divergence metrics."""
    columns, rows, marks = ["format, trainer", *(band.title for band in BANDS), "slope per doubling (95 %)"], [], []
    for name, part in result.parts["divergence"].items():
        for arm, row in part["arms"].items():
            if arm == "full":
                continue
            grade = grades(row["metrics"])
            rows.append([f"{name} {arm}", *(_number(row["metrics"].get(band.key)) for band in BANDS), _slope(row)])
            marks.append(["", *(grade.get(band.key, "") for band in BANDS), ""])
    return columns, rows, marks


def own_error_rows(result: ProbeResult) -> tuple[list[str], Rows]:
    """Columns and cells of the formats' own errors on the same tokens, the target's parts below."""
    named = dict(result.parts["same_tokens"])
    for part, row in result.parts.get("switches", {}).get(result.plan.target, {}).items():
        named[f"{result.plan.target}: {part} alone"] = row
    rows = [
        [name, _number(row["metrics"][MEAN]), _number(row["metrics"][MAX]), _number(row["metrics"][K3]), _slope(row)]
        for name, row in named.items()
    ]
    return ["against BF16", "mean |Δ log p|", "max |Δ log p|", "k3 KL", "slope per doubling (95 %)"], rows


def layer_rows(result: ProbeResult) -> tuple[list[str], Rows]:
    """Columns and cells of the layers of the target."""
    columns = [
        "layer",
        "alone: mean |Δ log p|",
        "worst weights",
        "K",
        "V",
        "largest K channel",
        "largest weight column / median",
    ]
    rows = []
    for row in result.parts["layers"][result.plan.target]:
        errors, channel, ratios = row["errors"], row.get("k_channel"), row["weight_outliers"]
        weights = {name[2:]: value for name, value in errors.items() if name.startswith("w:")}
        worst = max(weights, key=weights.__getitem__, default="")
        where = "" if channel is None else f"{channel['ratio']:.1f} x, head {channel['head']}, {channel['channel']}"
        rows.append(
            [
                *(str(row["layer"]), _number(row["solo_mean_abs_dlogp"])),
                f"{weights[worst]:.3f} {worst}" if worst else "",
                *(_number(errors.get(f"attention_{part}")) for part in ("k", "v")),
                *(where, f"{max(ratios.values()):.1f}" if ratios else ""),
            ]
        )
    return columns, rows


def _slope(row: dict[str, Any]) -> str:
    slope = row["slope"]
    return "" if slope is None else f"{slope['mean']:+.4f} ({slope['low']:+.4f} to {slope['high']:+.4f})"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def _share(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def verdict_rows(result: ProbeResult) -> tuple[list[str], Rows]:
    """Columns and cells of the verdicts, the target marked."""
    rows = [
        [f"{name} *" if name == result.plan.target else name, verdict.decision, verdict.reasons[0]]
        for name, verdict in result.verdicts.items()
    ]
    return ["format", "verdict", "first reason"], rows


def quality_rows(result: ProbeResult) -> tuple[list[str], Rows]:
    """Columns and cells of what the answers look like."""
    columns = [
        "format",
        "held-out reward (95 %)",
        "mean tokens",
        "cut",
        "loops",
        "broken text",
        "unlikely windows",
        "distinct 4-grams",
    ]
    reference, rows = result.parts["divergence"]["bf16"]["windows"], []
    for name, part in result.parts["divergence"].items():
        quality, long = result.parts.get("quality", {}).get(name), part["outputs"]
        cells = ["", "", ""]
        if quality is not None:
            lengths, clipped = quality["outputs"]["lengths"], quality["outputs"]["clipped"]
            cells = [_share(interval(quality["questions"])), f"{_mean(lengths):.1f}", f"{_mean(clipped):.1%}"]
        unlikely = unlikely_share(part["windows"], reference)
        odd = "" if unlikely is None else f"{unlikely:.1%}"
        rows.append(
            [
                name,
                *cells,
                _percent(long["repeats"]),
                _percent(long["broken"]),
                odd,
                f"{long['distinct_4grams']:.2f}",
            ]
        )
    return columns, rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(values: Sequence[float]) -> str:
    return f"{_mean(values):.0%}" if values else ""


def speed_rows(result: ProbeResult) -> tuple[list[str], Rows]:
    """Columns and cells of speed, memory and paths."""
    columns = [
        "format",
        "decode tokens/s",
        "roofline tokens/s",
        "KB of K/V per token",
        "fit",
        "weights",
        "activations",
        "K/V",
    ]
    rows = []
    for name, speed in result.speed.items():
        bound, fit, cache = speed["roofline_tokens_per_s"], speed["fit"], speed.get("kv_bytes_per_token")
        rows.append([
            name,
            f"{speed['decode_tokens_per_s']:.0f} ({speed['sequences']} sequences)",
            "" if bound is None else f"{bound:.0f}",
            "" if cache is None else f"{cache / 1024:.2f}",
            "" if fit is None else f"{fit['sequences']} of {fit['context']} tokens",
            *(speed["paths"][part] for part in ("weights", "activations", "kv_cache")),
        ])  # fmt: skip
    return columns, rows
