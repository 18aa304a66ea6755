"""The pages as a browser sees them: what is asked of the DOM was put there by the page's own scripts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from made_up_runs import write_run
from trace_lightning.cli import main
from trace_lightning.report.charts import CHARTS, other_drawings, run_drawings
from trace_lightning.report.compare import number_rows, run_labels, setting_rows
from trace_lightning.report.page import run_page
from trace_lightning.report.run import read_run
from trace_lightning.report.samples import SampleReader
from trace_lightning.report.series import Series

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")


def trace_fit(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["trace-fit", *map(str, arguments)])
    main()


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def dom(path, folder, fragment: str = "") -> str:
    """The page's document after three seconds of the browser's own time."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    command = [str(BROWSER), *options, "--virtual-time-budget=3000", f"{path.as_uri()}#{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def test_report_of_a_large_run_is_small(tmp_path, monkeypatch, capsys) -> None:
    folder = write_run(tmp_path / "r" / "version_0", steps=3000, completions=3000, tokens=30)
    trace_fit(monkeypatch, "report", folder)
    page = (folder / "report.html").read_text()
    assert f"written: {folder / 'report.html'}" in capsys.readouterr().out
    assert len(page) < 2e6
    assert "minimum and the maximum of 499 equal stretches" in page
    data = data_of(page)
    assert f"{len(data['samples'])} of 3,000 logged completions" in page
    assert len(data["samples"]) < 350
    spike = next(chart for chart in data["charts"] if chart["title"] == "Trainer against rollout")["curves"][0]
    assert max(spike["y"]) > 2  # one step of 3000
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page.replace(json.dumps(data), ""))
    assert page.count("</script>") == 3  # those in completions do not end the data


def test_the_phases_of_a_step_add_up_to_it_also_when_rollouts_are_ahead(tmp_path) -> None:
    run = read_run(write_run(tmp_path / "version_0", steps=3))
    rows = len(run.metrics["reward"])
    run.metrics["timing/rollout_wait_s"] = Series(list(range(rows)), [0.25] * rows)
    stacked = {drawing.title: [c.label for c in drawing.curves] for drawing in run_drawings(run) if drawing.stacked}
    assert stacked == {
        "Time per step": ["sync", "rollout wait", "train"],
        "Time beside training": ["rollout", "reward"],
    }
    assert "timing/rollout_wait_s" not in {drawing.title for drawing in other_drawings(run)}


@needs_browser
def test_the_scripts_draw_curves_and_samples(tmp_path) -> None:
    folder = write_run(tmp_path / "version_0", steps=30, completions=300, tokens=9, turns=True)
    samples = SampleReader(folder / "completions.jsonl")
    samples.update()
    page = run_page(read_run(folder), samples)
    path = tmp_path / "page.html"
    path.write_text(page)
    shown = [s for s in data_of(page)["samples"] if s["split"] == "train"]
    found = dom(path, tmp_path, f"split=train&sample={shown[3]['id']}")
    assert found.count("<figure>") == len(CHARTS)
    assert found.count('class="curve') >= len(CHARTS) - 1  # phase times are areas
    assert f"Samples: {len(shown)} of" in found
    assert re.search(rf'<button data-id="{shown[3]["id"]}" class="chosen"', found)
    assert "The calculator says 42." in found
    assert found.count('class="token"') == 9
    assert "p 0." in found


USED = """<script>
const [reward, gap] = document.querySelectorAll("figure");
const svg = reward.querySelector("svg"), box = svg.getBoundingClientRect();
const point = {clientX: box.left + box.width * 0.5, clientY: box.top + 50, bubbles: true};
svg.dispatchEvent(new PointerEvent("pointermove", point));
gap.querySelector(".scale").click();
reward.querySelectorAll(".legend button")[1].click();
document.querySelector("#sample .token").dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
const tips = [...document.querySelectorAll(".tip:not([hidden])")];
document.title = location.hash + " " + tips.map(tip => tip.innerText).join(" | ");
</script></body>"""


@needs_browser
def test_pointing_and_switching(tmp_path) -> None:
    folder = write_run(tmp_path / "version_0", steps=11, completions=20)
    samples = SampleReader(folder / "completions.jsonl")
    samples.update()
    page = run_page(read_run(folder), samples)
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", USED))
    found = dom(path, tmp_path)
    title = re.search(r"<title>(.*?)</title>", found, re.DOTALL)[1]
    assert "c1=linear" in title  # what a reload brings back
    rewards = read_run(folder).metrics["reward"].values
    step = int(re.search(r"step (\d+)", title)[1])
    assert 4 <= step <= 6  # the middle of the chart
    assert f"training: {float(f'{rewards[step]:.4g}'):g}" in title
    assert re.search(r"\| p [\d.e-]+, log p -[\d.]+", title)
    charts = found.split("<figure>")
    assert charts[1].count('class="curve') == 1  # one of two was clicked away
    assert ">linear<" in charts[2]


@needs_browser
def test_a_running_page_loads_itself_again_and_keeps_what_was_chosen(tmp_path) -> None:
    folder = write_run(tmp_path / "version_0", steps=5, completions=50)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))
    samples = SampleReader(folder / "completions.jsonl")
    samples.update()
    page = run_page(read_run(folder), samples, 12.0)
    assert data_of(page)["reload"] == 12
    path = tmp_path / "page.html"
    # The title tells how often the page was loaded; after the second time it takes itself for a page in the background.
    count = "<script>name = +name + 1; document.title = 'load ' + name;"
    count += "Object.defineProperty(document, 'hidden', {get: () => +name > 1})</script>"
    path.write_text(page.replace("</body>", f"{count}</body>").replace('"reload":12', '"reload":0.5'))
    found = dom(path, tmp_path, "sample=7&more=1")
    assert "<title>load 2</title>" in found
    assert re.search(r'<button data-id="7" class="chosen"', found)
    assert '<details id="more" open' in found


def test_half_written_runs_are_shown_with_a_note(tmp_path, monkeypatch, capsys) -> None:
    folder = write_run(tmp_path / "version_0")
    before = {}
    for name in ("metrics.csv", "completions.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-20])
        before[name] = path.read_bytes()
    trace_fit(monkeypatch, "report", folder, "--out", tmp_path / "elsewhere.html")
    page = (tmp_path / "elsewhere.html").read_text()
    for name, content in before.items():
        assert f"of {name} is half written" in page
        assert f"of {name} is half written" in capsys.readouterr().out or name == "completions.jsonl"
        assert (folder / name).read_bytes() == content


@pytest.mark.parametrize("command", ["report", "compare"])
def test_bad_folders_are_refused_in_one_line(tmp_path, monkeypatch, capsys, command) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.csv").touch()
    for folder, words in ((tmp_path / "none", "is no folder"), (tmp_path / "empty", "the run is empty")):
        with pytest.raises(SystemExit) as ended:
            trace_fit(monkeypatch, command, folder, *([folder] if command == "compare" else []))
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["metrics.csv"]


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    folder = write_run(tmp_path / "version_0")
    for out, why in ((".", "is a folder"), (folder / "run.json" / "a.html", "cannot be written: ")):
        with pytest.raises(SystemExit) as ended:
            trace_fit(monkeypatch, "report", folder, "--out", out)
        assert ended.value.code == 2
        assert f"--out {out} {why}" in capsys.readouterr().err


class TestCompare:
    @pytest.fixture
    def runs(self, tmp_path):
        first, second = (write_run(tmp_path / name / "version_0", steps=n) for name, n in (("a", 20), ("b", 30)))
        rows = [line.split(",") for line in (second / "metrics.csv").read_text().splitlines()]
        gone = rows[0].index("entropy")  # one run measured other things than the other
        rows[0][rows[0].index("grad_norm")] = "own_metric"
        (second / "metrics.csv").write_text("".join(",".join(r[:gone] + r[gone + 1 :]) + "\n" for r in rows))
        for folder, rate in ((first, 1e-5), (second, 2e-5)):
            (folder / "config.yaml").write_text(
                f"run_name: {folder}\nmodel:\n  learning_rate: {rate}\n  beta: 0\n"
                f"  corrections:\n  - class_path: x.TIS\n    init_args: {{cap: {rate * 1e5:.0f}}}\n"
            )
        return first, second

    def test_tables(self, runs) -> None:
        read = [read_run(folder) for folder in runs]
        rows = {row[0]: row[1:] for row in number_rows(read)}
        assert rows["steps"] == ["19", "29"]
        assert " → " in rows["held-out reward, first → last"][0]
        total = sum(read[0].metrics["timing/rollout_s"].values)
        assert rows["tokens/s while generating"][0] == f"{20 * 50_000 / total:,.0f}"
        differ = [["model.corrections", "TIS(cap=1)", "TIS(cap=2)"], ["model.learning_rate", "1e-05", "2e-05"]]
        assert setting_rows(read) == differ
        assert run_labels(read) == ["a", "b"]
        assert run_labels([read[0], read[0]]) == [str(runs[0])] * 2

    def test_settings_that_differ_late_or_inside_a_list_are_shown(self, runs) -> None:
        read = [read_run(folder) for folder in runs]
        for run, end in zip(read, "ab", strict=True):
            run.config = {"path": f"/data/{'x' * 80}/step_{end}", "sets": [{"name": end}], "same": "y" * 80}
        rows = setting_rows(read)
        assert [row[0] for row in rows] == ["path", "sets"]
        assert rows[0][1].endswith("x/step_a")
        assert rows[1][1:] == ['{"name": "a"}', '{"name": "b"}']

    def test_page(self, runs, tmp_path, monkeypatch, capsys) -> None:
        trace_fit(monkeypatch, "compare", *runs, "--out", tmp_path / "compare.html")
        assert "model.learning_rate" in capsys.readouterr().out
        data = data_of((tmp_path / "compare.html").read_text())
        curves = {chart["title"]: [curve["label"] for curve in chart["curves"]] for chart in data["charts"]}
        assert curves["Reward: training"] == ["a", "b"]
        assert curves["Entropy"] == ["a"]
        others = {chart["title"]: chart["curves"] for chart in data["others"]}
        assert [(curve["label"], curve["color"]) for curve in others["own_metric"]] == [("b", 1)]

    def test_one_run_is_not_a_comparison(self, runs, monkeypatch, capsys) -> None:
        with pytest.raises(SystemExit):
            trace_fit(monkeypatch, "compare", runs[0])
        assert "two runs or more" in capsys.readouterr().err
