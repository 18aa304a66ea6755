"""Tiny policies with adapters that do something, and engines that hold them."""

from __future__ import annotations

from typing import Any

import torch

from tiny import TinyTokenizer, make_model
from trace_lightning.models.lora import LoraConfig, install_lora
from trace_lightning.models.sharding import Weights
from trace_lightning.quantization.lora import adapter_parameters
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.engine import LocalEngine


def make_adapted(
    recipe: QuantRecipe,
    rollout: str = "adapter",
    *,
    family: str = "qwen3",
    targets: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Any:
    """A random policy whose B is not zero, so that an adapter which is forgotten somewhere shows."""
    policy = make_model(family, **settings).to(dtype)
    install_qat(policy, recipe.trained)
    install_lora(policy, LoraConfig(rank=4, alpha=8, rollout=rollout, target_modules=targets), recipe)
    for name, parameter in adapter_parameters(policy).items():
        if name.endswith("lora_B"):
            parameter.data.normal_(std=0.05)
    return policy


def engine_of(policy: Any, recipe: QuantRecipe, *, dtype: torch.dtype = torch.float32, **settings: Any) -> LocalEngine:
    engine = LocalEngine(**({"max_num_seqs": 16, "page_size": 4} | settings))
    engine.setup(policy, TinyTokenizer(), recipe, dtype=dtype)  # type: ignore[arg-type]
    engine.load_weights(Weights(policy), version=0)
    return engine
