"""`report.html` of one run: what it was, whether it learns, whether trainer and rollout agree, and what it says."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any

from trace_lightning.report.charts import BOUNDS, CODES, Drawing, other_drawings, run_drawings
from trace_lightning.report.html import document
from trace_lightning.report.run import RUNNING, Run
from trace_lightning.report.samples import SAMPLING_RULE, SampleReader
from trace_lightning.report.series import THINNING_RULE, Series

SCRIPTS = ("charts.js", "samples.js")
_SLEEP_SECONDS = 10  # between two looks of an open page, at least
_RECENT = 10  # steps behind a tile's mean
_DLOGP = "sampling/sampling_logp_difference"
_JUDGED: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    f"{_DLOGP}/mean": ("mean of the run", fmean),
    f"{_DLOGP}/max": ("of the run", max),
    "rollout_corr/k3_kl": ("mean of the run", fmean),
    "rollout_corr/ess": ("lowest", min),
    CODES: ("mean of the run", fmean),
}


def run_page(run: Run, samples: SampleReader, reload_seconds: float = 30.0) -> str:
    """The page; while the run goes it loads itself again every `reload_seconds`, keeping what is selected."""
    shown = samples.samples()
    data = {
        **chart_data(run_drawings(run), other_drawings(run)),
        "samples": shown,
        "reload": max(_SLEEP_SECONDS, round(reload_seconds)) if run.status == RUNNING else 0,
    }
    notes = [*run.notes, *samples.notes()]
    rules = f"{THINNING_RULE} {SAMPLING_RULE} Shown are {len(shown)} of {samples.lines:,} logged completions."
    body = [
        f"<header><h1>{html.escape(run.name)} <span class='pill {run.status}'>{run.status}</span></h1>",
        _error(run),
        f"<dl>{''.join(_facts(run))}</dl></header>",
        f"<section class=tiles>{''.join(_tiles(run))}</section>",
        f"<details open class=notes><summary>Notes</summary><ul>{_items(notes)}</ul></details>" if notes else "",
        charts_section(),
        _SAMPLES if shown else "<h2>Samples</h2><p class=note>No completions were logged.</p>",
        f"<footer class=note><p>{html.escape(rules)}</p></footer>",
    ]
    return document(f"{run.name}: {run.status}", "".join(body), scripts=SCRIPTS, data=data)


_SAMPLES = """<h2 id=samples-title>Samples</h2><div id=filters></div>
<div class=samples><div id=list></div><article id=sample></article></div>"""


def charts_section() -> str:
    """The places that charts.js fills."""
    return (
        "<h2>Curves</h2><p class=note>Horizontal axis: rollouts learned from before. Point at a chart for its "
        "values; click a name in a legend to hide its curve.</p><section class=grid id=charts></section>"
        "<details id=more><summary>All other metrics</summary><section class=grid id=others></section></details>"
    )


def chart_data(charts: list[Drawing], others: list[Drawing]) -> dict[str, Any]:
    """The data that charts.js draws."""
    return {"charts": [one.data() for one in charts], "others": [one.data() for one in others]}


def _items(texts: list[str]) -> str:
    return "".join(f"<li>{html.escape(text)}</li>" for text in texts)


def _error(run: Run) -> str:
    if run.status == "killed":
        return "<p class=stop>The process is gone and said nothing: killed, or the machine went down.</p>"
    error = run.facts.get("error")
    return f"<p class=stop>{html.escape(str(error))}</p>" if error else ""


def _facts(run: Run) -> Iterator[str]:
    facts = run.facts
    versions: dict[str, str] = facts.get("versions", {})
    devices = facts.get("world_size", 1)
    memory = facts.get("memory_gb", {})
    recipe = facts.get("recipe", {})
    hardware = f"{devices} x {versions['device']}" if devices > 1 else versions.get("device")
    rows = {
        "model": facts.get("model"),
        "task": facts.get("task"),
        "recipe": f"{recipe['label']}, trainer {recipe['trainer']}" if recipe else None,
        "hardware": hardware,
        "peak memory": ", ".join(f"{value:.2f} GB {name}" for name, value in memory.items()),
        "elapsed": duration(facts.get("seconds")),
        "policy version": facts.get("policy_version"),
        "seed": facts.get("seed"),
        "last written": _clock(facts.get("updated")),
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items() if name != "device"),
        "command": facts.get("command"),
    }
    for name, value in rows.items():
        if value not in (None, ""):
            place = " class=whole" if name in ("versions", "command") else ""
            yield f"<div{place}><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds."""
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _tiles(run: Run) -> Iterator[str]:
    """The numbers to look at first, those with a bound in its colour."""
    metrics = run.metrics
    heldout = metrics.get("heldout/reward")
    if heldout:
        yield _tile("held-out reward", ends(heldout))
    if "reward" in metrics:
        yield _tile(f"training reward, last {_RECENT} steps", number(recent(metrics["reward"])))
    for key, (how, reduce) in _JUDGED.items():
        if key in metrics:
            band, value = BOUNDS[key], reduce(metrics[key].values)
            yield _tile(f"{band.title}, {how}", number(value), band.grade(value))
    if "throughput/rollout_tokens_per_s" in metrics:
        speed = recent(metrics["throughput/rollout_tokens_per_s"])
        yield _tile(f"tokens/s generated, last {_RECENT} steps", number(speed))
    skipped = sum(metrics["skipped_steps"].values) if "skipped_steps" in metrics else 0
    if skipped:
        yield _tile("steps skipped, gradient not finite", number(skipped), "stop")


def _tile(label: str, value: str, grade: str = "") -> str:
    return f'<div class="tile {grade}"><b>{value}</b><span>{html.escape(label)}</span></div>'


def recent(series: Series, count: int = _RECENT) -> float:
    """Mean of the last values."""
    return fmean(series.values[-count:])


def ends(series: Series) -> str:
    """First and last value, or the only one."""
    shown = series.values[:1] if len(series) == 1 else [series.values[0], series.values[-1]]
    return " → ".join(map(number, shown))


def number(value: float | None) -> str:
    """Three to four digits that one can read."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"
