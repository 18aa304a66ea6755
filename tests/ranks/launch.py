"""Starts a worker script as N ranks that talk over gloo, as a launcher of Lightning, torchrun or SLURM would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What tells Lightning that its processes exist already."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    fixed = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | fixed | {name: str(value) for name, value in ranks.items()}


def start(arguments: list[str], world_size: int, folder: Path) -> list[subprocess.Popen[str]]:
    """The ranks, running; rank r writes to `rank<r>.log` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(world_size):
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=environment(rank, world_size, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return processes


def finish(processes: list[subprocess.Popen[str]], folder: Path, timeout: float = 240) -> list[int]:
    """Exit codes of the ranks; all are ended if one of them takes too long."""
    try:
        return [process.wait(timeout) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"a rank hangs:\n{logs(folder)}") from error
    finally:
        for process in processes:
            process.kill()


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("rank*.log")))


def run_worker(name: str, world_size: int, folder: Path, *arguments: str) -> None:
    """Run a function of worker.py on all ranks; it must succeed on each."""
    processes = start([str(WORKER), name, str(folder), *arguments], world_size, folder)
    codes = finish(processes, folder)
    assert codes == [0] * world_size, logs(folder)
