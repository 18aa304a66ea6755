"""`trace-fit fit` on two processes, started by Lightning, torchrun and SLURM through the scripts in examples/launch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks import launch, worker
from ranks.launch import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "launch"
SMALL = ["--trainer.accelerator", "cpu", "--data.batch_size", "2", "--data.heldout_size", "4"]
SMALL += ["--config", str(ROOT / "configs" / "grpo_fp4.yaml"), "--rollout.num_generations", "2"]


def command(script: str, *arguments: str) -> list[str]:
    return [str(SCRIPTS / script), *SMALL, *arguments]


def environment(**settings: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "GLOO_SOCKET_IFNAME": "lo"} | settings


def run(folder: Path, script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    asked = {"cwd": folder, "env": environment(**settings), "capture_output": True, "text": True, "timeout": 280}
    return subprocess.run(command(script, *arguments), **asked)


def summary(folder: Path) -> dict:
    (path,) = folder.rglob("summary.json")
    return json.loads(path.read_text())


def check_run(done: subprocess.CompletedProcess[str], folder: Path, steps: int) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert (summary(folder)["status"], summary(folder)["steps"]) == ("finished", steps)
    assert done.stdout.count(f"finished after {steps} steps") == 1  # by one rank
    assert done.stderr.count("decoder-layer parameters") == 1
    assert "recommended to use" not in done.stderr


def test_the_scripts_say_what_they_are_for() -> None:
    assert {path.name for path in SCRIPTS.iterdir()} == {"one_node.sh", "torchrun.sh", "slurm.sbatch"}
    for path in SCRIPTS.iterdir():
        assert os.access(path, os.X_OK)
        assert f"examples/launch/{path.name}" in path.read_text()


def test_one_node(tmp_path) -> None:
    check_run(run(tmp_path, "one_node.sh", "--trainer.devices", "2", "--trainer.max_steps", "2"), tmp_path, 2)


def test_torchrun(tmp_path) -> None:
    arguments = ["--trainer.strategy", "fsdp2", "--trainer.max_steps", "2"]
    check_run(run(tmp_path, "torchrun.sh", *arguments, NPROC="2", PORT=str(free_port())), tmp_path, 2)
    assert (next(tmp_path.rglob("policy")) / "model.safetensors").is_file()


def test_bad_input_is_said_by_one_rank(tmp_path) -> None:
    arguments = [*SMALL, "--trainer.devices", "2", "--data.batch_size", "6000", "--runs_dir", str(tmp_path)]
    ranks = launch.start(worker.trace_fit, 2, tmp_path, "fit", *arguments)
    assert launch.finish(ranks, tmp_path) == [2, 2]
    said = launch.logs(tmp_path)
    assert said.count("trace-fit: error: on every rank: ValueError: TwoDigitAddition has") == 1, said


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job on a cluster of one node with two tasks."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("fake_slurm.py").read_text())
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(10_000 + free_port() % 10_000), "SLURM_NODELIST": "localhost"}
    job |= {"SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "RUN": "run", "EVERY": "1"}
    return job | {"PATH": f"{tmp_path}:{environment()['PATH']}"}


def test_slurm_requeues_and_goes_on(cluster, tmp_path) -> None:
    """TERM after the first step, as near the end of a job's time: saved, requeued; the next start takes it up."""
    arguments = ["--trainer.strategy", "ddp", "--trainer.max_steps", "400"]
    with (tmp_path / "log").open("w") as log:
        asked = {"cwd": tmp_path, "env": environment(**cluster), "stdout": log, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(command("slurm.sbatch", *arguments), **asked)
        end = time.monotonic() + 200
        while not list(tmp_path.rglob("last.ckpt")):
            assert job.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < end
            time.sleep(0.2)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGTERM)
        assert job.wait(100) == 143, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "requeued").read_text() == f"requeue {cluster['SLURM_JOB_ID']}"
    stopped = summary(tmp_path)
    assert stopped["status"] == "interrupted"
    steps = stopped["steps"] + 1
    done = run(tmp_path, "slurm.sbatch", *arguments[:-1], str(steps), **cluster)
    assert done.returncode == 0, done.stderr[-3000:]
    latest = max(tmp_path.rglob("summary.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(latest.read_text())["rollouts"] == steps
