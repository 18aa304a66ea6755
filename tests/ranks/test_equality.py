"""Two ranks are one process with the same global batch: completions, parameters and metrics, under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from ranks import launch, worker
from trace_lightning.models.policy import load_tokenizer

# FP32: the ranks' sums are added in another order than one process adds its sequences.
TOLERANCE = 1e-6
LOCAL = ("timing/", "throughput/", "guidance/share_of_rollout_time")  # seconds are not alike from run to run


def run(folder: Path, variant: str, path: str, *kinds: str) -> dict[str, list[dict[str, Any]]]:
    """What each rank left, by strategy; `one` is the single process."""
    folder.mkdir(exist_ok=True)
    worker.equality(folder, variant, path, "auto")
    launch.run(worker.equality, 2, folder, folder, variant, path, *kinds)
    left = {kind: [torch.load(folder / f"{kind}_{rank}.pt") for rank in (0, 1)] for kind in kinds}
    return left | {"one": [torch.load(folder / "auto_0.pt")]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("plain"), "plain", "builtin:tiny-qwen3", "ddp", "fsdp2", "fsdp2_gathered")


def check_same(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert one["drawn"].keys() == set(range(worker.STEPS))
    for step, drawn in one["drawn"].items():
        first, second = (rank["drawn"][step] for rank in ranks)
        assert not first.keys() & second.keys()
        assert first | second == drawn
    for name, value in one["state"].items():
        for rank in ranks:
            torch.testing.assert_close(rank["state"][name], value, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2_gathered"])
def test_two_ranks_are_one_process(plain, kind: str) -> None:
    """Same completions token by token, same parameters after three steps; and they did move."""
    check_same(plain["one"][0], plain[kind])
    start = tiny_start()
    moved = max((plain["one"][0]["state"][name] - value).abs().max() for name, value in start.items())
    assert moved > 100 * TOLERANCE


def test_layers_are_gathered_once_per_step_where_that_is_asked_for(plain) -> None:
    """What a micro-batch finds in full: nothing, or all that the one before it in its step has left."""
    for rank in (0, 1):
        found = plain["fsdp2_gathered"][rank]["gathered"]
        assert set(plain["fsdp2"][rank]["gathered"]) == {0}
        assert len(found) > worker.STEPS
        assert found.count(0) == worker.STEPS
        assert set(found) == {0, 2}


def test_layers_left_gathered_never_outlive_an_optimizer_step(tmp_path) -> None:
    """Several steps per rollout, and old log-probs before them, which gather layers and free none."""
    launch.run(worker.equality, 2, tmp_path, tmp_path, "several", "builtin:tiny-qwen3", "fsdp2", "fsdp2_gathered")
    for rank in (0, 1):
        plain, gathered = (torch.load(tmp_path / f"{kind}_{rank}.pt") for kind in ("fsdp2", "fsdp2_gathered"))
        assert set(gathered["gathered"]) == {0, 2}
        assert gathered["gathered"][0] == 2, "by the old log-probs"
        assert gathered["drawn"] == plain["drawn"]
        for name, value in plain["state"].items():
            torch.testing.assert_close(gathered["state"][name], value, atol=0, rtol=0, msg=name)


def tiny_start() -> dict[str, torch.Tensor]:
    module = worker.Sgd(path="builtin:tiny-qwen3", recipe=worker.GUIDED)
    module.configure_model()
    return worker.full_state(module)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_metrics_are_those_of_the_union(plain, kind: str) -> None:
    """On both ranks, at each step and in the validation, whose last batch leaves rank one without a prompt."""
    whole = plain["one"][0]["metrics"]
    assert whole[-1].keys() >= {"heldout/reward", "heldout/mean_length"}
    for rank in plain[kind]:
        assert len(rank["metrics"]) == len(whole)
        for mine, reference in zip(rank["metrics"], whole, strict=True):
            assert mine.keys() == reference.keys()
            for name, value in reference.items():
                if not name.startswith(LOCAL):
                    assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_metrics_of_one_collective_are_torchmetrics_own(tmp_path) -> None:
    launch.run(worker.metrics_together, 2, tmp_path, tmp_path)
    for rank in (0, 1):
        expected, found, again, gathers = torch.load(tmp_path / f"metrics_{rank}.pt")
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
        torch.testing.assert_close(again, expected, atol=0, rtol=0)
        assert gathers == 2, "one for each call"


def test_untied_heads_frozen_parts_recomputation_and_the_other_decoder(tmp_path) -> None:
    """FSDP2 with all that could be gathered wrongly: a head of its own, groups in which nothing is trained, ..."""
    path = tmp_path / "llama"
    tokenizer = load_tokenizer("builtin:tiny-qwen3")
    tiny.make_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    left = run(tmp_path / "runs", "hard", str(path), "fsdp2", "ddp")
    check_same(left["one"][0], left["fsdp2"])
    check_same(left["one"][0], left["ddp"])


def test_adapters_over_a_base_that_each_rank_holds(tmp_path) -> None:
    """DDP sums the gradients of A and B alone, and syncs them; nothing of the base moves."""
    left = run(tmp_path, "lora", "builtin:tiny-qwen3", "ddp")
    check_same(left["one"][0], left["ddp"])
    state = left["one"][0]["state"]
    moved = {name for name, value in state.items() if name.endswith("lora_B") and value.abs().max() > 100 * TOLERANCE}
    assert len(moved) == 14
    start = tiny_start()
    assert all(torch.equal(value, start[name]) for name, value in state.items() if name in start)
