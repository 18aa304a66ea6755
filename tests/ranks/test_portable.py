"""A checkpoint is plain tensors: written under one strategy and number of ranks, it goes on under any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import checkpoints
import tiny
from ranks import launch, worker
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.fp4 import quantize_group
from trace_lightning.export.source import open_source
from trace_lightning.models.policy import load_tokenizer

RANKS = {"auto": 1, "ddp": 2, "fsdp2": 2}
LAST = Path("checkpoints/last.ckpt")


def run(folder: Path, name: str, kind: str, steps: int, checkpoint: Path | None = None) -> list[dict[str, Any]]:
    arguments = (folder, name, kind, steps, None if checkpoint is None else str(checkpoint))
    launch.run(worker.part, RANKS[kind], folder, *arguments)
    return [torch.load(folder / f"{name}_{rank}.pt") for rank in range(RANKS[kind])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("portable")


@pytest.fixture(scope="module")
def whole(folder) -> dict[str, Any]:
    """Three steps of one process."""
    return run(folder, "whole", "auto", 3)[0]


@pytest.fixture(scope="module")
def begun(folder) -> dict[str, Path]:
    """The checkpoint of two steps under each strategy."""
    for kind in RANKS:
        run(folder, f"begun_{kind}", kind, 2)
    return {kind: folder / f"begun_{kind}" / LAST for kind in RANKS}


def test_files_are_plain_and_alike(begun) -> None:
    contents = {kind: torch.load(path, weights_only=True) for kind, path in begun.items()}
    reference = contents["auto"]
    for kind, content in contents.items():
        assert content["global_step"] == 2
        assert len(content["random_states"]) == RANKS[kind]
        assert content["state_dict"].keys() == reference["state_dict"].keys()
        for name, value in content["state_dict"].items():
            assert type(value) is torch.Tensor
            torch.testing.assert_close(value, reference["state_dict"][name], atol=1e-5, rtol=0)
        optimizer = content["optimizer_states"][0]["state"]
        assert optimizer.keys() == reference["optimizer_states"][0]["state"].keys()
        for index, state in optimizer.items():
            shape = reference["optimizer_states"][0]["state"][index]["exp_avg"].shape
            assert type(state["exp_avg"]) is torch.Tensor
            assert state["exp_avg"].shape == shape


@pytest.mark.parametrize(("before", "after"), [("fsdp2", "auto"), ("auto", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "auto")])
def test_goes_on_elsewhere(folder, whole, begun, before: str, after: str) -> None:
    """The third step draws the same completions, and its optimizer still knows the two before."""
    name = f"{before}_{after}"
    ranks = run(folder, name, after, 3, begun[before])
    drawn = [rank["drawn"][2] for rank in ranks]
    assert {uid: texts for share in drawn for uid, texts in share.items()} == whole["drawn"][2]
    reference = whole["metrics"][2]
    for metric in ("learning_rate", "reward", "num_tokens"):
        assert ranks[0]["metrics"][0][metric] == pytest.approx(reference[metric])
    for name, value in whole["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], value, atol=2e-5, rtol=0)  # a step of AdamW is 1e-3


def test_a_sharded_run_leaves_an_ordinary_model(folder, begun) -> None:
    model = AutoModelForCausalLM.from_pretrained(begun["fsdp2"].parents[1] / "policy")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    state = torch.load(begun["fsdp2"], weights_only=True)["state_dict"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[f"policy.{name}"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_export_does_not_see_the_strategy(begun, kind: str, tmp_path) -> None:
    """The checkpoint, and the `policy/` that was gathered in the run, give the same FP4 weights."""
    for name, place in (("file", begun[kind]), ("run", begun[kind].parents[1])):
        how = ExportFormat(format="nvfp4", activations="none")
        export_source(open_source(str(place)), tmp_path / name, how)
    assert (
        checkpoints.content(tmp_path / "file")["model.safetensors"]
        == checkpoints.content(tmp_path / "run")["model.safetensors"]
    )
    group = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    masters = torch.load(begun[kind], weights_only=True)["state_dict"]
    packed = quantize_group([masters[f"policy.{name}.weight"] for name in group], "nvfp4", False)
    tensors = checkpoints.stored(tmp_path / "file")
    for name, weight in zip(group, packed, strict=True):
        assert torch.equal(tensors[f"{name}.weight_packed"], weight.qdata)


@pytest.mark.parametrize("kind", ["auto", "fsdp2"])
def test_a_checkpoint_of_another_model_is_refused(folder, begun, kind: str, tmp_path) -> None:
    path = tmp_path / "llama"
    tokenizer = load_tokenizer("builtin:tiny-qwen3")
    tiny.make_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    launch.run(worker.other_model, RANKS[kind], tmp_path, tmp_path, kind, str(path), str(begun["auto"]))
    said = [torch.load(tmp_path / f"other_{rank}.pt") for rank in range(RANKS[kind])]
    assert all("the checkpoint is of another model than" in message for message, _ in said)
    assert [mine for _, mine in said] == ([None] if kind == "auto" else [True, False])
