from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import content, stored
from trace_lightning.callbacks import HFExport
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.recipe import GuidanceConfig, QuantRecipe

PATH = "builtin:tiny-qwen3"
RECIPE = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity"))


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    model = load_policy(PATH, RECIPE, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def finish(policy, folder: Path, callback: HFExport | None = None, *, saves: int = 0) -> Path:
    """What a run of one process leaves below `folder`."""
    trainer = SimpleNamespace(
        log_dir=str(folder),
        fast_dev_run=False,
        is_global_zero=True,
        global_step=7,
        world_size=1,
        state=None,
        callbacks=[],
    )
    module = SimpleNamespace(policy=policy, tokenizer=load_tokenizer(PATH), recipe=RECIPE, path=PATH)
    callback = callback or HFExport()
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    for _ in range(saves):
        callback.on_save_checkpoint(trainer, module, {})
        trainer.global_step += 1
    callback.on_fit_end(trainer, module)
    return folder / "policy"


def test_loads_in_plain_transformers(policy, tmp_path) -> None:
    directory = finish(policy, tmp_path)
    assert "trace" not in (directory / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(directory)
    weights = dict(model.named_parameters())
    for name, parameter in policy.named_parameters():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], parameter), name
    with policy.trace_qat.unquantized(), torch.no_grad():
        ids = AutoTokenizer.from_pretrained(directory)("12+34=", return_tensors="pt")["input_ids"]
        torch.testing.assert_close(model(ids).logits, policy(ids).logits)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == policy.generation_config.eos_token_id


def test_is_a_model_path(policy, tmp_path) -> None:
    directory = str(finish(policy, tmp_path))
    again = load_policy(directory, RECIPE, dtype=torch.float32)
    ids = load_tokenizer(directory)("12+34=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, policy(ids).logits)


def test_replaces_the_directory_as_a_whole(policy, tmp_path) -> None:
    finish(policy, tmp_path)
    (tmp_path / "policy" / "stale.safetensors").touch()
    finish(policy, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert not (tmp_path / "policy" / "stale.safetensors").exists()


def test_a_failed_save_leaves_the_old_policy(policy, tmp_path, monkeypatch) -> None:
    directory = finish(policy, tmp_path)
    before = content(directory)

    def full(*args, **kwargs) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(type(policy), "save_pretrained", full)
    with pytest.raises(ValueError, match=r"policy could not be written: no space"):
        finish(policy, tmp_path)
    assert content(directory) == before


def test_fp4_and_every_second_checkpoint(policy, tmp_path) -> None:
    directory = finish(policy, tmp_path, HFExport(format="nvfp4", dialect="modelopt", every_n_checkpoints=2), saves=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "policy-step000008", "policy-step000010"]
    assert stored(directory)["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    record = json.loads((directory / "trace_export.json").read_text())
    assert record["steps"] == 12
    assert record["quantized_as_trained"]


def test_a_format_that_no_dialect_has_is_found_before_training(policy, tmp_path) -> None:
    with pytest.raises(ValueError, match="modelopt stores nvfp4, not mxfp4"):
        finish(policy, tmp_path, HFExport(format="mxfp4", dialect="modelopt"))
    with pytest.raises(ValueError, match="every_n_checkpoints=0"):
        HFExport(every_n_checkpoints=0)
    assert not (tmp_path / "policy").exists()


def test_an_unsavable_generation_config_is_found_before_training(policy) -> None:
    from transformers import GenerationConfig

    bad = GenerationConfig()
    bad.do_sample, bad.temperature = False, 0.3
    module = SimpleNamespace(policy=SimpleNamespace(generation_config=bad), path=PATH)
    with pytest.raises(ValueError, match=r"generation_config\.json of builtin:tiny-qwen3"):
        HFExport().on_train_start(SimpleNamespace(global_step=0), module)
