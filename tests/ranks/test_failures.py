"""What goes wrong on one rank is raised on both, at once and with one voice; and what merely differs hangs nobody.

All scenarios run one after the other in the same two processes: had a rank left its step early, the next would hang.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import launch, worker

Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def seen(request, tmp_path_factory) -> tuple[Seen, Path]:
    """What both ranks saw, by scenario."""
    folder, kind = tmp_path_factory.mktemp("scenarios"), request.param
    launch.run(worker.scenarios, 2, folder, folder, kind)
    ranks = [torch.load(folder / f"{kind}_{rank}.pt") for rank in (0, 1)]
    return {name: [rank[name] for rank in ranks] for name in worker.SCENARIOS}, folder / kind


@pytest.mark.parametrize("name", ["not scored", "NaN", "alike"])
def test_a_rank_with_nothing_to_learn_from_takes_part(seen, name: str) -> None:
    """Rank one has no reward, or only groups of equal ones, at every step."""
    first, second = seen[0][name]
    assert first["error"] is None
    assert first["step"] == second["step"] == worker.STEPS
    assert first["sum"] == second["sum"]


def test_ranks_of_one_group_each(seen) -> None:
    """One prompt per rank, long or short, so that the ranks have unequal numbers of micro-batches; two iterations."""
    first, second = seen[0]["uneven"]
    assert first["error"] is None
    assert first["plans"] != second["plans"]
    assert first["step"] == second["step"] == 4  # two per rollout, counted between rollouts
    assert first["sum"] == second["sum"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "on rank 1: ValueError: all 16 reward calls of this rollout failed; the last one: raises_there"),
        ("engine", "on rank 1: MemoryError: no pages are left"),
        ("engine ahead", "on rank 1: MemoryError: no pages are left"),
        ("settings", "model.learning_rate is 0.001 on rank 0 and 0.002 on rank 1"),
        ("few", "on every rank: ValueError: FewSums has 64 training prompts, fewer than one batch of 96"),
        ("disk", "on rank 0: ValueError: the checkpoint of step 2 could not be written"),
    ],
)
def test_an_error_is_raised_on_both_and_said_once(seen, name: str, message: str) -> None:
    first, second = (rank["error"] for rank in seen[0][name])
    assert first[:2] == second[:2]
    assert first[0] == "RankError"
    assert message in first[1]
    assert (first[2], second[2]) == (True, False)


@pytest.mark.parametrize("name", ["hangs", "hangs ahead"])
def test_a_reward_that_hangs_is_cut_off_and_counted_on_both(seen, name: str) -> None:
    """One call on rank one never returns: its worker is killed, its completion is not scored, all ranks see the count.

    Drawn one rollout ahead the ranks go through the same: three steps, the first one on-policy.
    """
    first, second = seen[0][name]
    assert first["error"] is second["error"] is None
    assert first["step"] == second["step"] == worker.STEPS
    assert first["sum"] == second["sum"]
    for rank in (first, second):
        assert [step["rewards/hangs_once/timeouts"] for step in rank["metrics"]] == [1.0] * worker.STEPS
        assert [step["rewards/unscored_share"] for step in rank["metrics"]] == [1 / 32, 0.0, 0.0]
        old = [step.get("rollout/version_diff") for step in rank["metrics"]]
        assert old == ([0.0, 1.0, 1.0] if name == "hangs ahead" else [None] * 3)


@pytest.mark.parametrize("name", ["engine", "engine ahead"])
def test_what_was_learned_before_the_error_is_kept(seen, name: str) -> None:
    content = torch.load(seen[1] / name / "checkpoints/last.ckpt", weights_only=True)
    assert content["global_step"] == 1


def test_a_full_disk_leaves_the_last_good_checkpoint(seen) -> None:
    folder = seen[1] / "disk/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 1
    assert "the one of step 1 is intact" in seen[0]["disk"][0]["error"][1]
    assert seen[0]["disk"][0]["step"] == 2
