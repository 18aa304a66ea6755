"""Adapters on a GPU: packed and unpacked matmuls, decode graphs and the sync's graph give the policy's log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora import engine_of
from numerics import assert_no_worse_than_torch
from test_gpu_engine import GREEDY, W4A16KV4, model_on_gpu, policy_logprobs, tokens
from tiny import make_prompts, rollout_logprobs
from trace_lightning.models.lora import LoraConfig, install_lora
from trace_lightning.models.sharding import Weights
from trace_lightning.quantization.lora import adapter_parameters
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import QuantRecipe
from trace_lightning.types import SamplingParams

pytestmark = pytest.mark.gpu
W4 = QuantRecipe(weights="nvfp4")


def adapted_on_gpu(recipe: QuantRecipe, rollout: str) -> Any:
    policy = model_on_gpu()
    install_qat(policy, recipe.trained)
    install_lora(policy, LoraConfig(rank=32, alpha=64, rollout=rollout), recipe)
    change(policy, 0.02)
    return policy.to("cuda")


def change(policy: Any, size: float) -> None:
    for name, parameter in adapter_parameters(policy).items():
        if name.endswith("lora_B"):
            parameter.data.normal_(std=size)


@pytest.mark.parametrize(("rollout", "crossover"), [("adapter", 256), ("adapter", 0), ("merged", None)])
def test_engine_equals_the_policy_in_bf16(rollout: str, crossover: int | None) -> None:
    policy = adapted_on_gpu(W4, rollout)
    engine = engine_of(policy, W4, dtype=torch.bfloat16, page_size=64, max_num_seqs=128)
    for layer in engine.decoder.layers:  # type: ignore[attr-defined]
        for linear in layer.linears:
            linear.crossover = linear.crossover if crossover is None else crossover
    prompts = make_prompts(1, 63, 64, 65, 200, 700)
    drawn = engine.generate(prompts, SamplingParams(max_new_tokens=48, ignore_eos=True))
    in_bf16 = policy_logprobs(policy, prompts, drawn)
    exact = policy_logprobs(policy.float(), prompts, drawn)
    assert_no_worse_than_torch(rollout_logprobs(drawn), in_bf16, exact)
    with policy.trace_lora.off():
        assert (policy_logprobs(policy, prompts, drawn) - exact).abs().mean() > 0.05, "the adapters must matter"


@pytest.mark.parametrize("rollout", ["adapter", "merged"])
def test_syncs_from_a_graph_bring_new_adapters(rollout: str) -> None:
    policy, prompts = adapted_on_gpu(W4A16KV4, rollout), make_prompts(30, 70)
    settings = {"dtype": torch.bfloat16, "page_size": 64, "max_num_seqs": 128}
    engine = engine_of(policy, W4A16KV4, **settings)
    seen = []
    for version in range(1, 5):  # run, captured, replayed
        change(policy, 0.02 * version)
        engine.load_weights(Weights(policy), version=version)
        seen.append(tokens(engine.generate(prompts, GREEDY)))
    assert len({str(drawn) for drawn in seen}) == 4
    assert seen[-1] == tokens(engine_of(policy, W4A16KV4, **settings).generate(prompts, GREEDY))
