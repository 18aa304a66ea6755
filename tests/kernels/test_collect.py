"""Collecting results: the worst of what matches, bounds in both directions, nothing filled in."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def collect():
    """kernels/bench/collect.py as a module."""
    spec = importlib.util.spec_from_file_location("collect", ROOT / "kernels" / "bench" / "collect.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks up its annotations
    spec.loader.exec_module(module)
    return module


def row(name: str, value: float, unit: str = "", **more: str) -> dict:
    return {"name": name, "value": value, "unit": unit, "must": None, "aim": None, "ok": None, **more}


def test_the_worst_row_stands_for_all(collect):
    rows = [row("a 1", 2.0, "x"), row("a 2", 1.0, "x"), row("b 1", 0.1, "x")]
    assert collect.pick(collect.Goal("n", "a .", "c", 1.5, 3.0), rows)["value"] == 1.0
    assert collect.pick(collect.Goal("n", "a .", "c", 1.5, 3.0, lower=True), rows)["value"] == 2.0


@pytest.mark.parametrize(("must", "lower", "ok"), [(1.0, False, True), (1.1, False, False), (0.9, True, False)])
def test_ok_follows_the_direction(collect, must, lower, ok):
    assert collect.pick(collect.Goal("n", "a", "c", must, must, lower=lower), [row("a", 1.0, "x")])["ok"] is ok


def test_a_number_without_a_bound_is_only_reported(collect):
    assert collect.pick(collect.Goal("n", "a", "c"), [row("a", 1.0, "x")])["ok"] is None


def test_command_and_unit(collect):
    goal = collect.Goal("n", "a", "bench.py")
    assert collect.pick(goal, [row("a", 0.5)]) == row("n", 0.5, "of copy", command="bench.py")
    said = collect.pick(goal, [row("a", 0.5, "x", command="trace-fit bench --shape s --json /tmp/j.json --fill")])
    assert said["command"] == "trace-fit bench --shape s --fill"


def test_what_was_not_measured_is_left_out_and_named(collect, tmp_path, capsys):
    kernels, engine, out = tmp_path / "kernels.json", tmp_path / "engine.json", tmp_path / "out.json"
    kernels.write_text(json.dumps([row("fp4 attention vs bf16 64x8k", 2.4, "x")]))
    engine.write_text(
        json.dumps({"rows": [row("qwen3-8b bf16 64x8192 fit", 96, "sequences", command="trace-fit bench")]})
    )
    collect.main([str(kernels), str(engine), "--out", str(out)])
    assert [entry["value"] for entry in json.loads(out.read_text())] == [2.4, 96]
    assert capsys.readouterr().out.count("not measured, left out") == len(collect.GOALS) - 2


def test_other_files_are_refused(collect, tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"record": 1}')
    with pytest.raises(ValueError, match="has no rows"):
        collect.read_rows(path)


def test_every_published_row_is_a_goal(collect):
    """Names and bounds of docs/results/h200.json are those of this script, and each verdict is the value's own."""
    goals = {goal.name: goal for goal in collect.GOALS}
    assert len(goals) == len(collect.GOALS)
    for published in json.loads((ROOT / "docs" / "results" / "h200.json").read_text()):
        goal = goals[published["name"]]
        assert (published["must"], published["aim"]) == (goal.must, goal.aim)
        if goal.must is not None:
            reached = published["value"] <= goal.must if goal.lower else published["value"] >= goal.must
            assert published["ok"] is reached
