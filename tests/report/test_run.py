from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from made_up_runs import write_run
from trace_lightning.report.run import read_metrics, read_run


def test_rows_that_a_crash_has_torn_are_left_out_and_said(tmp_path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,reward,loss\n0,.5,1\n1,.6\n2,.7,nan\n3,x\0y,2\n4,.8,\xff\n5,.9,3\n6,1.")
    notes: list[str] = []
    metrics = read_metrics(path, notes)
    assert metrics["reward"].steps == [0, 2, 5]
    assert metrics["loss"].values == [1, 3]
    text = " ".join(notes)
    assert "3 broken rows" in text
    assert "half written" in text
    assert "loss was not finite in 1 row" in text


def test_the_folder_is_not_a_run(tmp_path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        read_run(tmp_path / "missing")
    with pytest.raises(ValueError, match="not the folder of a run"):
        read_run(tmp_path)
    write_run(tmp_path / "grpo" / "version_0")
    with pytest.raises(ValueError, match=r"It holds runs: .*version_0"):
        read_run(tmp_path / "grpo")


@pytest.mark.parametrize("text", ["", "step,reward\n", "step,rew"])
def test_an_empty_run(tmp_path, text) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ValueError, match="the run is empty"):
        read_run(tmp_path).require_metrics()


def test_a_run_whose_process_is_gone_was_killed(tmp_path) -> None:
    folder = write_run(tmp_path / "version_3")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    def status(pid: int, host: str = platform.node()) -> str:
        facts = {"status": "running", "pid": pid, "host": host}
        (folder / "run.json").write_text(json.dumps(facts))
        return read_run(folder).status

    assert status(os.getpid()) == "running"
    assert status(gone.pid) == "killed"
    assert status(gone.pid, host="another") == "running"


def test_broken_side_files_and_a_resumed_run(tmp_path) -> None:
    folder = write_run(tmp_path / "version_0")
    (folder / "summary.json").write_text('{"model": ')
    (folder / "config.yaml").write_text("model: [")
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join([lines[0], *lines[10:]]))
    run = read_run(folder)
    assert [note.split()[0] for note in run.notes] == ["summary.json", "config.yaml", "resumed"]
    assert run.status == "finished"
    (folder / "run.json").write_text('{"resumed_from": null}')  # not resumed, but logged only now and then
    assert len(read_run(folder).notes) == 2
