"""The frozen reference: what it scores, in what precision, and that it is refused early where it cannot serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tiny import make_batch, make_model, make_policy, perturbed
from trace_lightning.models.policy import load_policy
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.microbatch import take
from trace_lightning.rollout.reference import ReferenceConfig, ReferencePolicy
from trace_lightning.rollout.scoring import score

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference")
    make_model("qwen3", tie_word_embeddings=False, hidden_size=128).save_pretrained(path)
    return path


def reference(folder: Path, dtype: str, policy: PreTrainedModel) -> ReferencePolicy:
    made = ReferencePolicy(ReferenceConfig(dtype=dtype), str(folder), "sdpa")
    made.load(policy, CPU)
    return made


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.05), ("fp8", 0.5)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_like_the_policy_it_was(folder: Path, dtype: str, bound: float, temperature: float) -> None:
    policy = make_policy("qwen3", QuantRecipe(), tie_word_embeddings=False, hidden_size=128)
    micro = take(make_batch(), [0, 1, 2, 3], CPU)
    exact, _ = score(policy, micro, temperature=temperature)
    got = reference(folder, dtype, policy).score(micro, temperature=temperature)
    gap = (got - exact)[micro.mask_BT].abs()
    assert 0 < gap.max() < bound
    assert got[~micro.mask_BT].eq(0).all()
    assert not got.requires_grad
    wrong, _ = score(policy, micro, temperature=2 * temperature)
    assert (wrong - exact)[micro.mask_BT].abs().max() > 1, "a forgotten temperature would show"


def test_it_does_not_follow_the_policy(folder: Path) -> None:
    policy = make_policy("qwen3", QuantRecipe(), tie_word_embeddings=False, hidden_size=128)
    micro = take(make_batch(), [0, 1], CPU)
    frozen = reference(folder, "bf16", policy)
    before = frozen.score(micro, temperature=1.0)
    policy.load_state_dict(perturbed(policy, 0.1).state_dict())
    frozen.load(policy, CPU)  # a second fit does not load it again
    assert torch.equal(frozen.score(micro, temperature=1.0), before)


def test_under_autocast_it_is_the_policy_bit_for_bit(tmp_path: Path) -> None:
    """FP32 masters under BF16 autocast against BF16 weights with an FP32 residual stream."""
    folder = tmp_path
    make_model("qwen3").bfloat16().save_pretrained(folder)
    policy = load_policy(str(folder), QuantRecipe(), dtype=torch.float32)
    micro = take(make_batch(), [0, 1, 2, 3], CPU)
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = score(policy, micro, temperature=0.7)
    assert torch.equal(reference(folder, "bf16", policy).score(micro, temperature=0.7), ours)
    narrow = load_policy(str(folder), QuantRecipe(), dtype=torch.bfloat16)
    pure, _ = score(narrow, micro, temperature=0.7)
    assert torch.equal(reference(folder, "bf16", narrow).score(micro, temperature=0.7), pure), "bf16-true"
    assert not torch.equal(pure, ours)


def test_fp8_takes_half_the_memory_of_the_linears(folder: Path) -> None:
    policy = make_policy("qwen3", QuantRecipe(), tie_word_embeddings=False, hidden_size=128)
    sizes = {}
    for dtype in ("bf16", "fp8"):
        model = reference(folder, dtype, policy).model
        assert model is not None
        weight = model.get_decoder().layers[0].mlp.up_proj.weight
        stored = [weight.qdata, weight.scale] if hasattr(weight, "qdata") else [weight]
        sizes[dtype] = sum(tensor.nbytes for tensor in stored)
        assert model.get_output_embeddings().weight.dtype == torch.bfloat16
        assert type(model.get_output_embeddings().weight.data) is torch.Tensor
    assert sizes["bf16"] == 2 * 96 * 128
    assert sizes["fp8"] == 96 * 128 + 96 * 4  # one FP32 scale per row


def test_another_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary of 128 tokens, the policy one of 96"):
        reference(folder, "bf16", make_model("qwen3", vocab_size=96))


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.reference\.dtype='fp4': expected bf16 or fp8"):
        ReferenceConfig(dtype="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no directory"):
        ReferencePolicy(ReferenceConfig(path="no/such/dir"), "x", "sdpa").load(make_model("qwen3"), CPU)
