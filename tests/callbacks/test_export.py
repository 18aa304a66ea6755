from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_lightning.callbacks import HFExport
from trace_lightning.callbacks.export import export_policy
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.types import GuidanceConfig, QuantRecipe

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


def test_loads_in_plain_transformers(policy, tmp_path) -> None:
    export_policy(policy, load_tokenizer(PATH), tmp_path / "policy")
    assert "trace" not in (tmp_path / "policy" / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    weights = dict(model.named_parameters())
    for name, parameter in policy.named_parameters():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], parameter), name
    with policy.trace_qat.unquantized(), torch.no_grad():
        ids = AutoTokenizer.from_pretrained(tmp_path / "policy")("12+34=", return_tensors="pt")["input_ids"]
        torch.testing.assert_close(model(ids).logits, policy(ids).logits)
    generation = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == policy.generation_config.eos_token_id


def test_is_a_model_path(policy, tmp_path) -> None:
    export_policy(policy, load_tokenizer(PATH), tmp_path / "policy")
    again = load_policy(str(tmp_path / "policy"), RECIPE, dtype=torch.float32)
    ids = load_tokenizer(str(tmp_path / "policy"))("12+34=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, policy(ids).logits)


def test_replaces_the_directory_as_a_whole(policy, tmp_path) -> None:
    for leftover in ("policy", "policy.part", "policy.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "stale.safetensors").touch()
    export_policy(policy, load_tokenizer(PATH), tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert not (tmp_path / "policy" / "stale.safetensors").exists()


def test_a_failed_save_leaves_the_old_policy(policy, tmp_path, monkeypatch) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("old")

    def full(*args, **kwargs) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(policy, "save_pretrained", full)
    with pytest.raises(OSError, match="no space"):
        export_policy(policy, load_tokenizer(PATH), tmp_path / "policy")
    assert (tmp_path / "policy" / "config.json").read_text() == "old"


def test_an_unsavable_generation_config_is_found_before_training(policy) -> None:
    from transformers import GenerationConfig

    bad = GenerationConfig()
    bad.do_sample, bad.temperature = False, 0.3
    module = SimpleNamespace(policy=SimpleNamespace(generation_config=bad), path=PATH)
    with pytest.raises(ValueError, match=r"generation_config\.json of builtin:tiny-qwen3"):
        HFExport().on_train_start(SimpleNamespace(global_step=0), module)
