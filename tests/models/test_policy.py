"""Loading a policy and its tokenizer: what is missing is said at once, what is noise is switched off."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

from tiny import make_model
from trace_lightning.models.lora import LoraConfig
from trace_lightning.models.policy import load_policy, load_tokenizer, policy_structure
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.recipe import QuantRecipe


@pytest.fixture
def model_dir(tmp_path):
    """A copy of the embedded model that a test may spoil."""
    directory = tmp_path / "model"
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), directory)
    return directory


def drop_token(directory, name: str) -> None:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop(name)
    path.write_text(json.dumps(config))


def test_a_tokenizer_without_eos_is_refused_with_the_fix(model_dir):
    drop_token(model_dir, "eos_token")
    with pytest.raises(ValueError, match=r"no EOS token.*tokenizer_config\.json"):
        load_tokenizer(str(model_dir))


def test_a_tokenizer_without_pad_pads_with_eos(model_dir):
    drop_token(model_dir, "pad_token")
    tokenizer = load_tokenizer(str(model_dir))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_loaded_policy_has_no_dropout_and_recomputes_only_when_asked(tmp_path):
    model = make_model("gpt2", embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), QuantRecipe(), dtype=torch.float32)
    assert policy.training
    assert all(module.p == 0 for module in policy.modules() if isinstance(module, nn.Dropout))
    ids = torch.arange(7).unsqueeze(0)
    assert torch.equal(policy(ids, use_cache=False).logits, policy(ids, use_cache=False).logits)
    assert not recomputes(policy)
    assert recomputes(load_policy(str(tmp_path), QuantRecipe(), dtype=torch.float32, gradient_checkpointing=True))


def recomputes(policy) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in policy.modules())


def test_what_is_quantised_is_said_when_the_policy_loads(caplog):
    caplog.set_level("INFO")
    load_policy("builtin:tiny-qwen3", QuantRecipe(weights="nvfp4", bf16_layers=["first:1"]), dtype=torch.float32)
    assert "50.0%" in caplog.text
    assert "recipe.bf16_layers" in caplog.text


def test_the_structure_reads_no_weight_and_draws_no_number(model_dir):
    """Adapters that are drawn later start from the same numbers as without it."""
    (model_dir / "model.safetensors").unlink()
    before = torch.get_rng_state()
    structure = policy_structure(str(model_dir), QuantRecipe(weights="nvfp4"), lora=LoraConfig())
    assert {p.device.type for p in structure.parameters()} == {"meta"}
    assert any("lora_A" in name for name, _ in structure.named_parameters())
    assert torch.equal(torch.get_rng_state(), before)
