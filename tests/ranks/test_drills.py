"""Fault drills on two ranks: killed at five points of a step, or asked to stop; resumed, they are the unbroken run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import launch, worker

LAST = Path("checkpoints/last.ckpt")
# Rank one is the victim, but for the file, which rank zero writes.
POINTS = {"rollout": 1, "reward": 1, "update": 1, "after": 1, "write": 0}


def left(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}_{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unbroken")
    launch.run(worker.drill, 2, folder, folder, "whole", "ddp", "nowhere", 0, None)
    return left(folder, "whole")


def check_resumed(unbroken: list[dict[str, Any]], resumed: list[dict[str, Any]], first_step: int) -> None:
    for whole, rest in zip(unbroken, resumed, strict=True):
        assert list(rest["drawn"]) == list(range(first_step, worker.STEPS))
        for step, drawn in rest["drawn"].items():
            assert drawn == whole["drawn"][step]
        for name, value in whole["state"].items():
            assert torch.equal(rest["state"][name], value), name
        for mine, reference in zip(rest["metrics"], whole["metrics"][first_step:], strict=True):
            for name in ("reward", "learning_rate", "grad_norm", "policy_version", "num_tokens"):
                assert mine[name] == reference[name], name


def test_ranks_have_generators_of_their_own(unbroken) -> None:
    first, second = (rank["metrics"][0] for rank in unbroken)
    assert first["reward"] == second["reward"]  # the mean over both
    assert not unbroken[0]["drawn"][0].keys() & unbroken[1]["drawn"][0].keys()


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_is_the_unbroken_run(unbroken, point: str, tmp_path) -> None:
    """SIGKILL: nobody can tidy up. The other rank ends by itself, with a message, and one step at most is lost."""
    victim = POINTS[point]
    ranks = launch.start(worker.drill, 2, tmp_path, tmp_path, "broken", "ddp", point, victim, None)
    codes = launch.finish(ranks, tmp_path, timeout=60)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    log = (tmp_path / f"rank{1 - victim}.log").read_text()
    assert f"rank {1 - victim} failed by itself: RuntimeError" in log
    assert "the last checkpoint is that of step 1" in log or point == "write"
    (checkpoint,) = tmp_path.glob(f"broken/{LAST}")
    launch.run(worker.drill, 2, tmp_path, tmp_path, "resumed", "ddp", "nowhere", 0, str(checkpoint))
    check_resumed(unbroken, left(tmp_path, "resumed"), first_step=1)


def test_a_signal_while_the_next_rollout_is_drawn_stops_both(tmp_path) -> None:
    """SIGTERM to one rank in the second step, one rollout ahead: both end after it, and no thread keeps them alive."""
    ranks = launch.start(worker.drill, 2, tmp_path, tmp_path, "broken", "ddp", "sigterm in update", 1, None, 1)
    assert launch.finish(ranks, tmp_path, timeout=60) == [1, 1]
    assert "failed by itself" not in launch.logs(tmp_path)
    (checkpoint,) = tmp_path.glob(f"broken/{LAST}")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(unbroken, tmp_path) -> None:
    """SIGTERM in the middle of a rollout: the step is given up on both ranks, and repeated when the run is resumed."""
    ranks = launch.start(worker.drill, 2, tmp_path, tmp_path, "broken", "ddp", "sigterm", 1, None)
    codes = launch.finish(ranks, tmp_path, timeout=60)
    assert codes == [1, 1]
    assert "failed by itself" not in launch.logs(tmp_path)
    (checkpoint,) = tmp_path.glob(f"broken/{LAST}")
    launch.run(worker.drill, 2, tmp_path, tmp_path, "resumed", "ddp", "nowhere", 0, str(checkpoint))
    check_resumed(unbroken, left(tmp_path, "resumed"), first_step=1)
