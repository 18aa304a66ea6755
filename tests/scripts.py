"""Programs run as `python FILE ...` would run them, but without the five seconds in which each imports the library.

They are forks of the server that also starts the ranks of `ranks.launch`; code, arguments, working directory and output
are a program's own.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from ranks.launch import CONTEXT

Program = Path | Callable[[], None]  # a script, or the main function of an entry point


def _child(program: Program, arguments: tuple[str, ...], folder: Path, out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    os.chdir(folder)
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        program()


def start(program: Program, *arguments: str, folder: Path, out: Path, err: Path) -> BaseProcess:
    """The program, running in `folder`."""
    process = CONTEXT.Process(target=_child, args=(program, arguments, folder, out, err))
    process.start()
    return process


def run(program: Program, *arguments: str, folder: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run it to its end in `folder`."""
    with tempfile.TemporaryDirectory() as logs:
        out, err = Path(logs) / "out", Path(logs) / "err"
        process = start(program, *arguments, folder=folder, out=out, err=err)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode
        return subprocess.CompletedProcess(sys.argv, -1 if code is None else code, out.read_text(), err.read_text())
