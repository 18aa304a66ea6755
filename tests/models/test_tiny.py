"""The tiny model: its tokenizer, its packaged checkpoint, and the script that makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.models.tiny import BOS_ID, CHARACTERS, EOS_ID, PAD_ID, tiny_config, tiny_model, tiny_tokenizer
from trace_lightning.tasks import TwoDigitAddition

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_tiny.py"


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == tokenizer.vocab_size == 32
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    assert len({PAD_ID, BOS_ID, EOS_ID, tokenizer.unk_token_id}) == 4
    ids = tokenizer.encode(CHARACTERS)
    assert ids == list(range(4, 32))
    for text in (CHARACTERS, "12 + 34 = 46\n ? !", "  1", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("1é1") == [5, tokenizer.unk_token_id, 5]
    assert tokenizer.decode([*tokenizer.encode("46"), EOS_ID, PAD_ID], skip_special_tokens=True) == "46"
    assert tokenizer.encode("46<eos>")[-1] == EOS_ID


def test_tokenizer(tmp_path: Path) -> None:
    check_tokenizer(tiny_tokenizer())
    tiny_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    check_tokenizer(AutoTokenizer.from_pretrained(tmp_path, local_files_only=True))


def test_model_is_the_same_for_the_same_seed_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = tiny_model(3), tiny_model(3), tiny_model(4)
    assert torch.equal(torch.get_rng_state(), state)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    assert 0.39e6 < sum(p.numel() for p in first.parameters()) < 0.41e6


def test_packaged_checkpoint() -> None:
    path = resolve_model_path("builtin:tiny-qwen3")
    check_tokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    written, made = config.to_diff_dict(), tiny_config().to_diff_dict()
    assert {key: written.get(key) for key in made} == made
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (EOS_ID, PAD_ID)


def test_packaged_checkpoint_has_the_skill_and_the_headroom() -> None:
    path = resolve_model_path("builtin:tiny-qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    problems = [p for p in TwoDigitAddition().heldout_problems() if len(p.answer) == 2]
    ids = torch.tensor([[*tokenizer.encode(p.prompt + p.answer), EOS_ID] for p in problems])
    with torch.no_grad():
        logprobs = model(ids).logits[:, 5:-1].log_softmax(-1)  # positions that predict the answer and its EOS
    sampled = logprobs.gather(-1, ids[:, 6:, None]).sum((1, 2)).exp().mean().item()
    greedy = (logprobs.argmax(-1) == ids[:, 6:]).all(1).float().mean().item()
    assert 0.35 < sampled < 0.6  # probability that a sample at temperature 1 is right
    assert greedy > 0.9


def test_the_script_makes_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--out", str(tmp_path / "tiny")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "held-out accuracy, sampled: 0." in result.stdout
    packaged = {entry.name for entry in resolve_model_path("builtin:tiny-qwen3").iterdir()}
    assert {entry.name for entry in (tmp_path / "tiny").iterdir()} == packaged
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", local_files_only=True)
    assert model.get_parameter("model.norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_demonstrations(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import random

    from pretrain_tiny import Addition

    rng = random.Random(0)
    for problem in TwoDigitAddition().heldout_problems()[:50]:
        answer = Addition.demonstrate(problem, noise, rng)[1][0]
        assert len(answer) == len(problem.answer)
        assert sum(a != b for a, b in zip(answer, problem.answer, strict=True)) == int(noise)
