"""Tiny random models of many families, and the two sides of one policy: an engine that draws, a trainer that scores.

Norm gains and biases are noisy: at their usual initial values (1 and 0) a decoder that forgot them would still agree.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.quantization.guidance import GuidanceRows
from trace_lightning.quantization.qat import install_qat
from trace_lightning.quantization.rounding import GuidedRounding, Rounding
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rollout.base import Generation
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.microbatch import collate_rollout
from trace_lightning.types import Completion, Problem, Prompt, RolloutBatch, SamplingParams

VOCAB, EOS = 128, 5
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3_ROPE},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "phi": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.1}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal LM in FP32 and eval mode; `overrides` go to its config."""
    settings = _GPT2 if family == "gpt2" else _SHARED | _OWN[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        special = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": EOS}
        config = AutoConfig.for_model(family, **(settings | special | overrides))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = EOS
    return model


def make_policy(family: str, recipe: QuantRecipe, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The trainer's side: a tiny model that rounds by `recipe`."""
    policy = make_model(family, **settings).to(dtype)
    install_qat(policy, recipe)
    return policy


class TinyTokenizer:
    """Token i reads `<i>`; token 65 reads `A`, and so on for the printable characters."""

    eos_token_id = EOS

    def __len__(self) -> int:
        return VOCAB

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i == EOS)]
        return "".join(chr(i) if 32 <= i < 127 else f"<{i}>" for i in kept)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens, "what is appended to a prompt begins with no BOS"
        return {"input_ids": [ord(character) for character in text]}

    def batch_decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]


def make_prompts(*lengths: int, seed: int = 1) -> list[Prompt]:
    """Random prompts of these lengths, without EOS; uid = position."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(6, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(token_ids=row, problem=Problem(prompt=""), uid=uid) for uid, row in enumerate(rows)]


BATCH_LENGTHS = [(3, 4), (9, 2), (5, 7), (4, 1)]


def make_batch(pad: int = 0, *, lengths: Sequence[tuple[int, int]] = BATCH_LENGTHS) -> RolloutBatch:
    """A batch as if drawn: random (prompt, completion) tokens of these lengths, log-probs -1, advantages 0."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(6, VOCAB, (count,), generator=generator).tolist()

    prompts = [Prompt(token_ids=ids(p), problem=Problem(prompt=""), uid=i) for i, (p, _) in enumerate(lengths)]
    completions = [
        Completion(token_ids=ids(c), logprobs=[-1.0] * c, finish_reason="stop", policy_version=0) for _, c in lengths
    ]
    batch = RolloutBatch(prompts=prompts)
    collate_rollout(batch, completions, pad)
    batch.advantages_B = torch.zeros(len(lengths))
    return batch


def make_engine(
    policy: Any, recipe: QuantRecipe, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> LocalEngine:
    """An engine that holds the weights of `policy` as version 0. Defaults: 16 sequences, 4 tokens a page."""
    engine = LocalEngine(**({"max_num_seqs": 16, "page_size": 4} | settings))
    engine.setup(policy, TinyTokenizer(), recipe, dtype=dtype)  # type: ignore[arg-type]
    sync(engine, policy, version=0)
    return engine


def sync(engine: LocalEngine, policy: Any, version: int) -> None:
    engine.load_weights(policy.named_parameters(), version=version)


def rollout_logprobs(generation: Generation) -> Tensor:
    """The engine's log-probs of all completions, flat."""
    return torch.tensor([value for completion in generation.completions for value in completion.logprobs])


class Scorer:
    """The trainer's view of a generation: one right-padded micro-batch with its log-probs and guidance rows."""

    def __init__(self, prompts: list[Prompt], generation: Generation, num_samples: int) -> None:
        self.completions, self.record = generation.completions, generation.guidance
        self.starts = [len(prompts[i // num_samples].token_ids) for i in range(len(self.completions))]
        pairs = [(prompts[i // num_samples], completion) for i, completion in enumerate(self.completions)]
        self.sequences = [prompt.token_ids + completion.token_ids for prompt, completion in pairs]
        self.shape = len(self.sequences), max(map(len, self.sequences)) - 1

    def token_ids(self) -> Tensor:
        ids = torch.zeros(self.shape, dtype=torch.int64)
        for b, sequence in enumerate(self.sequences):
            ids[b, : len(sequence) - 1] = torch.tensor(sequence[:-1])
        return ids

    def guidance(self) -> GuidanceRows:
        assert self.record is not None
        rows = torch.full(self.shape, -1)
        for b, (sequence, completion) in enumerate(zip(self.sequences, self.completions, strict=True)):
            assert completion.guidance_rows is not None
            rows[b, : len(sequence) - 1] = completion.guidance_rows
        return GuidanceRows.from_rows(self.record, rows, torch.device("cpu"))

    def predicting(self) -> tuple[Tensor, Tensor]:
        """Indices (b, t) of the states that predict completion tokens, in the order of `rollout_logprobs`."""
        pairs = [(b, t - 1) for b, sequence in enumerate(self.sequences) for t in range(self.starts[b], len(sequence))]
        b, t = zip(*pairs, strict=True)
        return torch.tensor(b), torch.tensor(t)

    @torch.no_grad()
    def logprobs(
        self, policy: Any, temperature: float, rounding: Rounding | None = None, *, with_support: bool = False
    ) -> Tensor:
        hidden = final_hidden(policy, self.token_ids(), rounding)[self.predicting()]
        targets = torch.tensor([token for completion in self.completions for token in completion.token_ids])
        support = torch.cat([c.support_ids for c in self.completions]) if with_support else None  # type: ignore[misc]
        head = logits_head(policy)
        return token_logprobs(hidden, head, targets, temperature=temperature, support_NK=support)[0]

    def guided_logprobs(self, policy: Any, temperature: float) -> Tensor:
        return self.logprobs(policy, temperature, GuidedRounding(self.guidance()))


def perturbed(model: Any, scale: float, seed: int = 3) -> Any:
    """A copy whose parameters all moved by `scale` of their size."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        parameter.data *= 1 + scale * torch.randn(parameter.shape, generator=generator)
    return other


def sampling(**settings: Any) -> SamplingParams:
    """Short completions that do not stop early unless told to."""
    return SamplingParams(**({"max_new_tokens": 12, "temperature": 0.8} | settings))
