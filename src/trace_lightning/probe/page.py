"""`report.html` of a probe: one file that opens offline. Styles and charts (SVG) are inside, nothing is loaded."""

from __future__ import annotations

import html
from collections.abc import Sequence

from trace_lightning.probe import cells
from trace_lightning.probe.bands import BANDS
from trace_lightning.probe.run import ProbeResult
from trace_lightning.probe.verdict import GO, STAY
from trace_lightning.report.html import Rows, document, table

_TEXTS = ("first reason", "published value", "verdict")


def _html_table(columns: Sequence[str], rows: Rows, marks: Rows | None = None) -> str:
    return table(columns, rows, marks, texts=_TEXTS)


def page(result: ProbeResult, pictures: dict[str, str], command: str) -> str:
    """The HTML report; `pictures` are SVG elements by chart."""
    verdict = result.verdict
    kind = {GO: "go", STAY: "stay"}.get(verdict.decision, "guided")
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in verdict.reasons)
    findings = "".join(
        f'<li class="{finding.severity}"><b>{finding.code}</b>: {html.escape(finding.text)}'
        + (f"<br><i>{html.escape(finding.way_out)}</i>" if finding.way_out else "")
        + "</li>"
        for finding in verdict.findings
    )
    versions = ", ".join(f"{name} {version}" for name, version in result.machine["versions"].items())
    bands = [[band.title, _bound(band.warn), _bound(band.stop), band.source] for band in BANDS]
    sections = [
        f"<h1>trace-fit probe: {html.escape(result.plan.model)}</h1>",
        f'<div class="verdict {kind}"><b>{html.escape(cells.headline(result))}</b><ul>{reasons}</ul></div>',
        f"<p class=note>{html.escape(result.machine['device'])}; {html.escape(versions)}<br>"
        f"<code>{html.escape(command)}</code></p>"
        + "".join(f"<p>{html.escape(text)}</p>" for text in result.machine["in_words"]),
        "<h2>Verdict of every format</h2>" + _html_table(*cells.verdict_rows(result)),
        f"<h2>Findings about {html.escape(result.plan.target)}</h2><ul>{findings or '<li>none</li>'}</ul>",
        f"<h2>Recipe to paste</h2><pre>{html.escape(result.recipe['yaml'])}</pre>{_recipe_note(result)}",
        "<h2>Trainer against rollout</h2>"
        "<p class=note>floor: BF16 on both sides. naive: the trainer does not round. qat: it rounds alike, on its own. "
        "guided: steered by the rollout's record. Yellow is beyond the warning bound, red beyond the stop.</p>"
        + _html_table(*cells.agreement_rows(result))
        + pictures.get("agreement", "") + pictures.get("positions", "") + pictures.get("sites", "")
        + "<h3>Where the bounds come from</h3>" + _html_table(["metric", "warn", "stop", "published value"], bands),
    ]  # fmt: skip
    if "same_tokens" in pictures:
        sections.append(
            "<h2>The format's own error, on the same tokens</h2><p class=note>Both sides are the trainer; no rollout "
            "takes part. This is what the format changes, not what training corrects for.</p>"
            + _html_table(*cells.own_error_rows(result)) + pictures["same_tokens"] + pictures.get("switches", "")
        )  # fmt: skip
    if "layers" in pictures:
        sections.append(
            f"<h2>Layers of {html.escape(result.plan.target)}</h2><p class=note>Each layer alone quantised; errors of "
            "the output of linears and of attention when one thing is rounded and its inputs are not.</p>"
            + pictures["layers"] + _html_table(*cells.layer_rows(result))
        )  # fmt: skip
    sections += [
        "<h2>Answers</h2>" + _html_table(*cells.quality_rows(result)) + pictures.get("quality", "") + _texts(result),
        "<h2>Speed and memory here</h2>"
        + _html_table(*cells.speed_rows(result)) + pictures.get("speed", ""),
    ]  # fmt: skip
    return document(cells.headline(result), "".join(sections))


def _texts(result: ProbeResult) -> str:
    """The first trajectory of every format, folded up: numbers say that something is odd, texts say what."""
    shown = {name: part["texts"][0] for name, part in result.parts["divergence"].items() if any(part["texts"])}
    blocks = (f"<b>{html.escape(name)}</b><pre>{html.escape(text)}</pre>" for name, text in shown.items())
    return f"<details><summary>the first answer of every format</summary>{''.join(blocks)}</details>" if shown else ""


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _recipe_note(result: ProbeResult) -> str:
    measured = result.recipe["same_tokens_mean_abs_dlogp"]
    if not measured:
        return ""
    if not result.recipe["changed"]:
        return "<p class=note>Changes that the findings suggest were measured; none brought enough.</p>"
    return (
        f"<p class=note>Measured on the bf16 trajectories: mean |Δ log p| to BF16 {measured['target']:.4f} as probed, "
        f"{measured['recipe']:.4f} with this recipe.</p>"
    )
