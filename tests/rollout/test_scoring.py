"""What the trainer scores: the same numbers alone and in a batch, under the rollout's temperature, of its very ids."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tiny import BATCH_LENGTHS, EOS, make_batch, make_policy
from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rl import token_and_topk_logprobs, token_logprobs
from trace_lightning.rollout.microbatch import collate_rollout, take
from trace_lightning.rollout.reference import ReferencePolicy
from trace_lightning.rollout.scoring import score, score_all
from trace_lightning.types import Completion, Problem, Prompt, RolloutBatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_alone_or_padded_in_a_batch(family: str) -> None:
    """GPT-2 has learned absolute positions: wrong position ids would show there and not under RoPE."""
    model, batch = make_policy(family, QuantRecipe()), make_batch()
    together, _ = score(model, take(batch, [0, 1, 2, 3], CPU), temperature=0.7)
    for b, (prompt, completion) in enumerate(batch.sequences()):
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        logits = logits_head(model)(final_hidden(model, ids))[0]
        plain = torch.log_softmax(logits.float() / 0.7, dim=-1).gather(-1, ids[0].roll(-1)[:, None])[:, 0]
        start, end = len(prompt.token_ids), ids.shape[1]
        torch.testing.assert_close(together[b, start:end], plain[start - 1 : end - 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("scorer", [score, score_all, token_logprobs, token_and_topk_logprobs, ReferencePolicy.score])
def test_no_scorer_has_a_temperature_of_its_own(scorer: Any) -> None:
    parameter = inspect.signature(scorer).parameters["temperature"]
    assert parameter.default is parameter.empty
    assert parameter.kind is parameter.KEYWORD_ONLY


def test_masks_never_look_at_ids() -> None:
    """Pad and EOS share an id: the EOS that was drawn is learned from, the padding is not."""
    prompt = Prompt(token_ids=[EOS, 7, EOS], problem=Problem(prompt=""), uid=0)
    rows = [[8, 9, EOS], [8, 9, 10, 11]]
    completions = [
        Completion(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", policy_version=0) for ids in rows
    ]
    batch = RolloutBatch(prompts=[prompt], num_generations=2)
    collate_rollout(batch, completions, EOS)
    assert batch.token_ids_BT is not None
    assert batch.completion_mask_BT is not None
    assert batch.token_ids_BT[0].tolist() == [EOS, 7, EOS, 8, 9, EOS, EOS]
    assert batch.completion_mask_BT[0].tolist() == [False, False, False, True, True, True, False]
    assert batch.completion_mask_BT[1].tolist() == [False] * 3 + [True] * 4


def test_ids_without_their_log_probs_are_refused() -> None:
    completion = Completion(token_ids=[8, 9], logprobs=[-1.0], finish_reason="stop", policy_version=0)
    batch = RolloutBatch(prompts=[Prompt(token_ids=[7], problem=Problem(prompt=""), uid=0)])
    with pytest.raises(ValueError, match=r"2 token ids but 1 log-probs.*must not be decoded and encoded again"):
        collate_rollout(batch, [completion], 0)


@pytest.mark.parametrize("which", [[], [3]], ids=["no rows", "an empty answer"])
def test_nothing_to_learn_from_is_finite_and_without_gradient(which: list[int]) -> None:
    model = make_policy("qwen3", QuantRecipe())
    batch = make_batch(lengths=[*BATCH_LENGTHS[:3], (4, 0)])
    batch.advantages_B = torch.zeros(4)
    scores = score_all(model, take(batch, which, CPU), temperature=1.0, entropy_gradient=True)
    (scores.logprobs_BT.sum() + scores.entropy_BT.sum()).backward()
    assert scores.logprobs_BT.eq(0).all()
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters() if parameter.grad is not None)
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_the_entropys_gradient_is_that_of_the_softmax() -> None:
    model, batch = make_policy("qwen3", QuantRecipe()), make_batch()
    micro = take(batch, [0, 2], CPU)
    entropy = score_all(model, micro, temperature=0.7, entropy_gradient=True).entropy_BT
    weight = model.get_output_embeddings().weight
    (got,) = torch.autograd.grad(entropy.sum(), weight)
    hidden = final_hidden(model, micro.token_ids_BT[:, :-1])[micro.mask_BT[:, 1:]]
    logprobs = torch.log_softmax(logits_head(model)(hidden) / 0.7, dim=-1)
    wanted_value = -(logprobs.exp() * logprobs).sum(-1)
    (wanted,) = torch.autograd.grad(wanted_value.sum(), weight)
    torch.testing.assert_close(entropy[micro.mask_BT], wanted_value, atol=1e-5, rtol=0)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert not score_all(model, micro, temperature=0.7).entropy_BT.requires_grad


def test_under_truncation_the_entropy_and_its_gradient_are_finite() -> None:
    hidden, head = torch.randn(5, 8, requires_grad=True), torch.nn.Linear(8, 20)
    targets = torch.randint(20, (5,))
    support = torch.stack([targets, (targets + 1) % 20, torch.full((5,), -1)], dim=1)
    _, entropy = token_logprobs(hidden, head, targets, temperature=0.7, support_NK=support, entropy_gradient=True)
    entropy.sum().backward()
    assert (entropy >= 0).all()
    assert (entropy <= 0.6932).all()  # two tokens: log 2
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert hidden.grad.norm() > 0
