"""Starts N ranks that talk over gloo, as Lightning, torchrun or SLURM would, without importing everything N times.

A fork server imports the library once; each rank is a fork of it, with the environment variables of its rank. Ranks
with a GPU are spawned: CUDA works in no fork of a process that has looked for it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trace_lightning.cli", "torch.distributed.fsdp"])  # installed, so found by the server


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank(rank: int, world_size: int, port: int, log: Path, function: Callable[..., None], arguments: Any) -> None:
    """The main function of a rank: its environment, its log, and the exit code of what it was asked to do."""
    file = log.open("a")
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(
    function: Callable[..., None], world_size: int, folder: Path, *arguments: Any, gpus: bool = False
) -> list[BaseProcess]:
    """The ranks, running; rank r writes to `rank<r>.log` in `folder`."""
    context = multiprocessing.get_context("spawn") if gpus else CONTEXT
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(world_size):
        log = folder / f"rank{rank}.log"
        process = context.Process(target=_rank, args=(rank, world_size, port, log, function, arguments))
        process.start()
        processes.append(process)
    return processes


def finish(processes: list[BaseProcess], folder: Path, timeout: float = 200) -> list[int | None]:
    """Exit codes of the ranks (negative: the signal); all are ended if one of them takes too long."""
    for process in processes:
        process.join(timeout)
    hangs = [process for process in processes if process.is_alive()]
    for process in hangs:
        process.kill()
        process.join()
    assert not hangs, f"a rank hangs:\n{logs(folder)}"
    return [process.exitcode for process in processes]


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("rank*.log")))


def run(function: Callable[..., None], world_size: int, folder: Path, *arguments: Any, gpus: bool = False) -> None:
    """Run `function(*arguments)` on all ranks; it must succeed on each."""
    codes = finish(start(function, world_size, folder, *arguments, gpus=gpus), folder)
    assert codes == [0] * world_size, logs(folder)
