"""The command lines of `trace-fit report` and `trace-fit compare`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from trace_lightning.report.compare import compare_page, compare_tables
from trace_lightning.report.files import write_text
from trace_lightning.report.page import run_page
from trace_lightning.report.run import COMPLETIONS_FILE, read_run
from trace_lightning.report.samples import SampleReader

_WIDTH = 150  # of tables that go to a file


def report(arguments: list[str]) -> None:
    """Write the page of one run.

    Raises:
        ValueError: the folder is not that of a run, or nothing was measured yet.
    """
    parser = argparse.ArgumentParser(prog="trace-fit report", description="Write report.html of a run, from its files.")
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/grpo_fp4/version_0")
    parser.add_argument("--out", type=Path, help="file to write; default: report.html in the run's folder")
    parsed = parser.parse_args(arguments)
    run = read_run(parsed.run).require_metrics()
    samples = SampleReader(parsed.run / COMPLETIONS_FILE)
    samples.update()
    _write(parsed.out or parsed.run / "report.html", run_page(run, samples))
    for note in (*run.notes, *samples.notes()):
        print(f"note: {note}")


def compare(arguments: list[str]) -> None:
    """Print the tables of several runs and write their page.

    Raises:
        ValueError: fewer than two runs, or one that has nothing to show.
    """
    parser = argparse.ArgumentParser(prog="trace-fit compare", description="Put runs side by side.")
    parser.add_argument("runs", type=Path, nargs="+", help="the runs' folders")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="file to write; default: %(default)s")
    parsed = parser.parse_args(arguments)
    if len(parsed.runs) < 2:
        raise ValueError("trace-fit compare needs two runs or more; for one, there is trace-fit report")
    runs = [read_run(folder).require_metrics() for folder in parsed.runs]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in compare_tables(runs):
        console.print(table)
    _write(parsed.out, compare_page(runs))


def _write(path: Path, page: str) -> None:
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: name a file")
    try:
        write_text(path, page)
    except OSError as error:
        raise ValueError(f"--out {path} cannot be written: {error.strerror}") from error
    print(f"written: {path} ({len(page.encode()) / 1e6:.2f} MB)")
