"""Runs programs that a policy wrote: each in a process of its own, confined by `confine.py`, and says how it ended.

All traffic goes through files in a temporary folder (input, output, results), so no pipe can fill up and no answer has
to be waited for: a program is started, ends or is killed, and what it left is read. Expected outputs stay on this side.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trace_lightning.tasks import confine

_READ = 1 << 18  # bytes of output that are looked at
_SIGNALS = {
    signal.SIGXCPU: "CPU time limit",
    signal.SIGXFSZ: "file size limit",
    signal.SIGSYS: "a forbidden system call",
}


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Args:
        seconds: from start to end, whatever it does; an interpreter starts in some hundredths of a second.
        memory_mb: address space.
        file_mb: size of any file, of its output, and of its working directory where it has one of its own.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_mb: int = 16

    def __post_init__(self) -> None:
        for name, least in {"seconds": 0.1, "memory_mb": 64, "file_mb": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"limits.{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run: a source, its standard input, expressions to evaluate after it, and statements to execute."""

    source: str
    stdin: str = ""
    calls: Sequence[str] = ()
    checks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a program ended. `reason` is empty if it ended by itself without an error.

    Attributes:
        reason: `time limit (5 s)`, `memory limit (512 MB)`, or the exception it died of.
        stdout: the beginning of what it printed.
        values: `repr` of each call that returned, None where it raised or was not reached.
        errors: exception of each call that raised.
        checks: number of checks that went through.
        check_errors: exception of each check that raised.
    """

    reason: str = ""
    stdout: str = ""
    values: list[str | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    checks: int = 0
    check_errors: dict[int, str] = field(default_factory=dict)


@functools.cache
def protection() -> tuple[bool, str]:
    """Whether programs get a file system of their own here, and the protection in force in words.

    Raises:
        ValueError: this machine cannot confine a program.
    """
    with tempfile.TemporaryDirectory(prefix="trace-code-") as folder:
        _, _, results = _execute(Program(source=""), Limits(seconds=30), Path(folder), confined=True, namespaces=None)
    first = results[0] if results else {"refused": "the confined interpreter did not start"}
    if "refused" in first:
        raise ValueError(
            f"programs cannot be confined on this machine ({first['refused']}), so network and files would be open to "
            "them. Run where the kernel has seccomp, or set unconfined=true if you trust every program"
        )
    if first["own_files"]:
        return True, "no network, no processes, no signals (seccomp, namespaces); a file system of its own"
    return False, "no network, no processes, no signals, no file changes (seccomp); files of this user can be read"


def run(program: Program, limits: Limits, *, confined: bool = True) -> Ending:
    """Run a program to its end, or to the end of its time.

    Args:
        program: what to run.
        limits: what it may use.
        confined: False runs it with resource limits alone.

    Raises:
        ValueError: this machine cannot confine a program.
        OSError: it could when asked first, and now could not; nothing was run.
    """
    namespaces = protection()[0] if confined else False
    with tempfile.TemporaryDirectory(prefix="trace-code-") as name:
        folder, token = Path(name), secrets.token_hex(16)
        code, stderr, results = _execute(program, limits, folder, confined=confined, namespaces=namespaces, token=token)
        stdout = _beginning(folder / "stdout")
    if code == confine.REFUSED and results and "refused" in results[0]:
        raise OSError(f"a program could not be confined: {results[0]['refused']}")
    calls, checks = ({r[kind]: r for r in results[1:] if isinstance(r.get(kind), int)} for kind in ("call", "check"))
    values = [calls.get(index, {}).get("value") for index in range(len(program.calls))]
    return Ending(
        reason=_reason(code, stderr, limits),
        stdout=stdout,
        values=[value if isinstance(value, str) else None for value in values],
        errors={index: str(call["error"]) for index, call in calls.items() if "error" in call},
        checks=sum(checks.get(index, {}).get("token") == token for index in range(len(program.checks))),
        check_errors={index: str(check["error"]) for index, check in checks.items() if "error" in check},
    )


def _execute(
    program: Program, limits: Limits, folder: Path, *, confined: bool, namespaces: bool | None, token: str = ""
) -> tuple[int | None, str, list[dict[str, Any]]]:
    """Exit code (None: out of time), the end of stderr, and the lines of the results file."""
    paths = {name: folder / name for name in ("stdin", "stdout", "stderr", "results", "job", "root")}
    paths["root"].mkdir()
    paths["stdin"].write_text(program.stdin, encoding="utf-8")
    paths["results"].touch()
    job: dict[str, Any] = {
        "source": program.source,
        "calls": list(program.calls),
        "checks": list(program.checks),
        "token": token,
    }
    job |= {"results": str(paths["results"]), "confined": confined, "namespaces": namespaces}
    job["limits"] = asdict(limits) | {"cpu_seconds": int(limits.seconds) + 1}
    paths["job"].write_text(json.dumps(job))
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with contextlib.ExitStack() as stack:
        stdin = stack.enter_context(paths["stdin"].open("rb"))
        stdout, stderr = (stack.enter_context(paths[name].open("wb")) for name in ("stdout", "stderr"))
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", confine.__file__, str(paths["job"]), str(paths["root"])],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder if not confined else "/",
        )
        try:
            code: int | None = process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
    return code, _end(paths["stderr"]), _lines(paths["results"])


def _reason(code: int | None, stderr: str, limits: Limits) -> str:
    if code is None:
        return f"time limit ({limits.seconds:g} s)"
    if code == 0:
        return ""
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    if last.startswith("MemoryError"):
        return f"memory limit ({limits.memory_mb} MB)"
    if code < 0:
        number = signal.Signals(-code)
        return _SIGNALS.get(number, f"died of {number.name}")
    return last[:200] or f"exit code {code}"


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_READ).decode("utf-8", errors="replace")


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        return file.read().decode("utf-8", errors="replace")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Results up to the first line that is none: a program can write to the file as well."""
    found: list[dict[str, Any]] = []
    for line in _beginning(path).splitlines():
        try:
            result = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(result, dict):
            break
        found.append(result)
    return found
