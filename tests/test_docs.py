"""The page of logged metrics names every column that a run writes, and README links lead somewhere."""

from __future__ import annotations

import csv
import itertools
import re
import sys
from pathlib import Path

import pytest

from trace_lightning.cli import main

ROOT = Path(__file__).parent.parent
NOT_METRICS = {"step", "epoch"}


def documented_keys() -> set[str]:
    """Keys of the table in docs/metrics.md, `{a,b}` and `<name>` spelled out as a pattern."""
    keys: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if not line.startswith("| `"):
            continue
        for key in re.findall(r"`([^`]+)`", line.split("|")[1]):
            parts = [part.split(",") for part in re.split(r"[{}]", key)]
            keys |= {"".join(choice) for choice in itertools.product(*parts)}
    return keys


def undocumented(columns: set[str]) -> list[str]:
    patterns = [re.escape(key).replace(r"\.\.\.", ".*") for key in documented_keys()]
    patterns = [re.sub(r"<[^>]+>", "[^/]+", pattern) for pattern in patterns]
    return sorted(column for column in columns if not any(re.fullmatch(pattern, column) for pattern in patterns))


def test_every_logged_metric_is_documented(tmp_path, monkeypatch):
    config = str(ROOT / "configs" / "grpo_fp4.yaml")
    small = [
        "--trainer.max_steps",
        "1",
        "--data.batch_size",
        "2",
        "--data.heldout_size",
        "4",
        "--rollout.num_generations",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["trace-fit", "fit", "--config", config, *small, "--runs_dir", str(tmp_path)])
    main()
    (path,) = tmp_path.glob("*/version_0/metrics.csv")
    with path.open() as file:
        columns = set(next(csv.reader(file))) - NOT_METRICS
    assert not undocumented(columns), f"docs/metrics.md does not name {undocumented(columns)}"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *map(str, Path("docs").rglob("*.md"))]
)
def test_relative_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
