"""Gradients of A and B are autograd's over a dense weight, and the backward pass keeps no dense weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora import make_adapted
from tiny import make_model
from trace_lightning.models.policy import set_gradient_checkpointing
from trace_lightning.quantization.lora import AdapterLinear, adapter_parameters, merge
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import QuantRecipe

W4, W4A4KV4 = QuantRecipe(weights="nvfp4"), QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4")
IDS = torch.arange(6, 24).view(2, 9)


def gradients(policy: Any) -> dict[str, Tensor]:
    policy(IDS).logits.square().mean().backward()
    return {name: parameter.grad for name, parameter in adapter_parameters(policy).items()}


def dense_gradients(policy: Any, recipe: QuantRecipe, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same by autograd through `W + s B A` in a plain model that rounds by `recipe`, straight through."""
    plain = install_into(make_model("qwen3").double(), recipe)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in adapter_parameters(policy).items()}
    scaling = policy.trace_lora.scaling
    merged = {
        f"{name}.weight": weight + scaling * leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
        for name, weight in base.items()
    }
    torch.func.functional_call(plain, merged, (IDS,)).logits.square().mean().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def install_into(model: Any, recipe: QuantRecipe) -> Any:
    install_qat(model, recipe)
    return model


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert len(ours) == 28
    for name, gradient in ours.items():
        assert (gradient - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), name
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_over_a_packed_base(checkpointing: bool) -> None:
    policy = make_adapted(W4, dtype=torch.float64).train()
    set_gradient_checkpointing(policy, checkpointing)
    linears = {name: m for name, m in policy.named_modules() if isinstance(m, AdapterLinear)}
    base = {name: linear.base_values(torch.float64) for name, linear in linears.items()}
    assert_equal(gradients(policy), dense_gradients(policy, QuantRecipe(), base))


@pytest.mark.parametrize("recipe", [W4, W4A4KV4], ids=["W4", "W4A4KV4"])
def test_through_merged_weights(recipe: QuantRecipe) -> None:
    policy = make_adapted(recipe, "merged", dtype=torch.float64)
    base = {name[: -len(".weight")]: p for name, p in policy.named_parameters() if "_proj.weight" in name}
    assert_equal(gradients(policy), dense_gradients(policy, recipe, base))


def test_rounded_inputs_carry_the_adapter_too() -> None:
    """The low-rank product reads what the base reads: rounded inputs, straight through."""
    policy = make_adapted(W4A4KV4, dtype=torch.float64)
    linear = policy.model.layers[0].mlp.down_proj
    x = torch.randn(3, 96, dtype=torch.float64, requires_grad=True)
    linear(x).sum().backward()
    rounded = linear.group.round_input(x.detach().clone())
    assert not torch.equal(rounded, x)
    weight = merge(linear.base_values(torch.float64), linear.lora_A, linear.lora_B, policy.trace_lora.scaling)
    assert (linear(x) - rounded @ weight.T).abs().max() <= 1e-12
    assert (x.grad - weight.sum(0)).abs().max() <= 1e-12
    assert (linear.lora_B.grad - 2 * (rounded @ linear.lora_A.T).sum(0)).abs().max() <= 1e-12


def test_autograd_keeps_no_weight_of_the_base() -> None:
    policy = make_adapted(W4A4KV4, vocab_size=160)
    shapes = {(m.out_features, m.in_features) for m in policy.modules() if isinstance(m, AdapterLinear)}
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        policy(IDS)
    assert kept
    assert not shapes & {*kept, *(shape[::-1] for shape in kept)}
