"""Errors of single roundings are measured on a forward that stays unquantised, and are what they are defined as."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny import make_model
from trace_kernels import get_format
from trace_lightning.models.policy import final_hidden
from trace_lightning.probe.agreement import make_trainer
from trace_lightning.probe.local import LocalErrors, Only, local_errors, weight_outlier
from trace_lightning.quantization.weights import quantized_weight
from trace_lightning.recipe import QuantRecipe

W4A4KV4 = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4")
IDS = [torch.arange(40) % 120 + 6, torch.arange(25) * 7 % 120 + 6]


def plain_model(family: str) -> Any:
    source = make_model(family)
    make_trainer(source, QuantRecipe())
    return source


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_the_pass_stays_unquantised(family: str) -> None:
    """Weights off, sites passed on, attention exact: the hidden states are those of the plain trainer."""
    source = plain_model(family)
    policy, plain = make_trainer(source, W4A4KV4), make_trainer(source, QuantRecipe())
    seen = []
    policy.get_decoder().norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    local_errors(policy, IDS)
    for ids, hidden in zip(IDS, seen, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            expected = final_hidden(plain, ids[None])
        assert ((hidden - expected).norm() / expected.norm()).item() < 2e-2  # BF16, and masks of another kind
    assert all(group.weights is not None for group in policy.trace_qat.groups), "weights are rounded again afterwards"


@torch.no_grad()
def test_weight_errors_are_those_of_the_outputs() -> None:
    source = plain_model("qwen3")
    policy, inputs = make_trainer(source, W4A4KV4), []
    policy.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    errors = local_errors(policy, IDS).relative()
    weight, fmt = source.model.layers[1].mlp.down_proj.weight, get_format("nvfp4")
    change = quantized_weight(weight, fmt, fmt.outer_from_amax(weight.abs().amax().reshape(1, 1))) - weight
    x = torch.cat([each[0].float() for each in inputs])
    expected = ((x @ change.T).norm() / (x @ weight.T).norm()).item()
    assert errors[1, "w:down_in"] == pytest.approx(expected, rel=0.02)
    assert 0.05 < expected < 0.2
    assert {name for _, name in errors} == {
        *(f"{kind}{site}" for kind in ("", "w:") for site in ("attn_in", "o_in", "mlp_in", "down_in")),
        *("attention_attention", "attention_k", "attention_v"),
    }


@torch.no_grad()
def test_a_large_k_channel_is_found_where_it_is() -> None:
    source = plain_model("llama")
    attention = source.model.layers[0].self_attn
    attention.k_proj.weight[attention.head_dim + 3] *= 100  # KV head 1, channel 3
    measured = local_errors(make_trainer(source, QuantRecipe(kv_cache="nvfp4")), IDS)
    found = measured.k_outliers(0)
    assert found["head"] == 1
    assert found["channel"] in (3, 3 + attention.head_dim // 2), "RoPE mixes the two"
    assert found["ratio"] > 25 > measured.k_outliers(1)["ratio"]


def test_only_rounds_the_sites_it_is_given() -> None:
    x, fmt = torch.randn(5, 32), get_format("nvfp4")
    only = Only({"k"})
    assert only.values(0, "v", x, fmt) is x
    assert not torch.equal(only.values(0, "k", x, fmt), x)
    assert LocalErrors().values(0, "k", x, fmt) is x


def test_trainers_share_the_parameters_of_their_source() -> None:
    source = plain_model("qwen2")
    policy = make_trainer(source, W4A4KV4)
    assert {id(p) for p in policy.parameters()} == {id(p) for p in source.parameters()}
    assert not any("QAT" in type(module).__name__ for module in source.modules()), "the source stays as it was"


def test_weight_outlier_is_the_largest_column_over_the_median_one() -> None:
    policy = make_trainer(plain_model("qwen3"), W4A4KV4)
    group = next(group for group in policy.trace_qat.groups if group.site == "mlp_in")
    with torch.no_grad():
        for member in group.members:
            member.weight.fill_(0.5)
            member.weight[:, 3] = -6.0
    assert weight_outlier(group) == pytest.approx(12.0)
