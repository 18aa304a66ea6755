"""transformers on the same prompts: `generate`, and its continuous batching, with sdpa attention in BF16.

Both draw at temperature 1 without truncation and never stop early, as our engine does here. `generate` launches every
kernel from Python, so a ratio to it says more about launches than about number formats: the ratio to our own BF16
engine, which is in every report, is the one to quote for FP4.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from trace_lightning.bench.machine import wall_seconds
from trace_lightning.bench.measure import Rate
from trace_lightning.types import Prompt

BASELINES = ("generate", "generate_batch")
_WARM_TOKENS, _PAGE, _BATCH_TOKENS = 2, 256, 8192


def measure_baseline(name: str, policy: PreTrainedModel, prompts: list[Prompt], new_tokens: int) -> Rate:
    """Time one of `BASELINES`, after a short first call.

    Raises:
        RuntimeError: if it did not draw `new_tokens` tokens for every prompt.
    """
    run = {"generate": _generate, "generate_batch": _generate_batch}[name]
    inputs = [prompt.token_ids for prompt in prompts]
    run(policy, inputs, min(_WARM_TOKENS, new_tokens))
    seconds, drawn = run(policy, inputs, new_tokens)
    if drawn != [new_tokens] * len(prompts):
        raise RuntimeError(f"transformers' {name} drew {sum(drawn)} of {new_tokens * len(prompts)} tokens")
    return Rate(seconds=seconds, amount=float(sum(drawn)))


def _settings(new_tokens: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=new_tokens, pad_token_id=0, **more)


@torch.no_grad()
def _generate(policy: Any, inputs: list[list[int]], new_tokens: int) -> tuple[float, list[int]]:
    """Seconds, and the number of tokens drawn for each prompt."""
    ids = torch.tensor(inputs, device=policy.device)
    settings, out = _settings(new_tokens, min_new_tokens=new_tokens), []

    def run() -> None:
        out.append(policy.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings))

    seconds = wall_seconds(run, policy.device)
    return seconds, [out[0].shape[1] - ids.shape[1]] * len(inputs)


def _generate_batch(policy: Any, inputs: list[list[int]], new_tokens: int) -> tuple[float, list[int]]:
    """As `_generate`; from the first request to the last answer, the set-up of its cache and graphs not counted."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    longest = max(map(len, inputs)) + new_tokens
    cache = ContinuousBatchingConfig(
        num_blocks=(len(inputs) + 1) * -(-longest // _PAGE), max_batch_tokens=max(len(inputs), _BATCH_TOKENS)
    )
    settings = _settings(new_tokens, eos_token_id=-1)
    results = policy.generate_batch(inputs, generation_config=settings, continuous_batching_config=cache).values()
    if not results:
        return 0.0, []
    seconds = max(result.lifespan[1] for result in results) - min(result.created_time for result in results)
    return seconds, [len(result.generated_tokens) for result in results]
