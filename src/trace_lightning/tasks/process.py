"""A worker process of ours: how it starts, how it is stopped, and how it never outlives its parent.

Workers are plain subprocesses, not `multiprocessing`'s: those import the user's script again, which fails in a notebook
and trains twice in a script without `if __name__ == "__main__"`. What they work with travels by cloudpickle, so
closures and functions of a notebook work. A forked copy of the trainer would hold its CUDA context and its locks.

A worker ends with its parent, however that ends and whatever the worker is doing: the parent holds one end of a pipe,
and when it is closed the kernel sends SIGIO, whose default is death. (PR_SET_PDEATHSIG is about the parent's thread.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Self

import cloudpickle

_GRACE = 1.0  # seconds


@dataclass(eq=False)
class WorkerProcess:
    """A started process, and the pipe to it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int  # a pipe; the process dies when it is closed

    @classmethod
    def start(cls, module: str, payload: bytes, *arguments: object) -> Self:
        """Run `module.main(descriptor, lifeline, *arguments)` in a new process, and send it `payload`."""
        ours, theirs = Pipe()
        read_end, lifeline = os.pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; "
        code += f"main({', '.join(map(repr, (theirs.fileno(), read_end, *arguments)))})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno(), read_end],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
        theirs.close()
        os.close(read_end)
        ours.send_bytes(payload)
        return cls(process, ours, lifeline)

    def bury(self) -> str:
        """`stop` one whose pipe has ended, which comes a moment before the process has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        return self.stop()

    def stop(self) -> str:
        """Kill the process with whatever it has started, and say how it had ended, if it had."""
        code = self.process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self.lifeline)
        return "was killed" if code is None else ending(code)


def ending(code: int) -> str:
    """How a process with this exit code, negative for a signal, has ended."""
    return f"ended with exit code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"


def parent_lives(lifeline: int) -> bool:
    """In a worker: die with the parent from here on; False if it is gone already."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    return not select.select([lifeline], [], [], 0)[0]


def packed(value: object, complaint: str, way_out: str) -> bytes:
    """`value` as bytes.

    Raises:
        ValueError: it cannot be sent; `complaint` says what, and `way_out` what helps.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except (TypeError, AttributeError, ValueError, RuntimeError, cloudpickle.pickle.PicklingError) as error:
        raise ValueError(f"{complaint}: {error}. {way_out}") from error
    return data
