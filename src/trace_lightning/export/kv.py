"""The outer scales of K and V that the rollout derives from the weights, layer by layer, for an export.

They are powers of two by KV head. A dialect knows one number per layer: the largest of its heads. A larger power of two
moves exponents between outer and block scale and changes no value, down to the smallest normal block scale.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_kernels import get_format
from trace_lightning.models.layout import attention_module, find_decoder_layers
from trace_lightning.quantization.kv import KVWeights, kv_outer_scales
from trace_lightning.recipe import QuantRecipe


def attention_names(model: PreTrainedModel) -> list[str]:
    """Name of each layer's attention module."""
    prefix, layers = find_decoder_layers(model)
    names = []
    for index, layer in enumerate(layers):
        module = attention_module(layer)
        local = next((name for name, other in layer.named_modules() if other is module), "")
        names.append(f"{prefix}.{index}.{local}")
    return names


def measured_kv_scales(
    model: PreTrainedModel, weights: Mapping[str, Tensor], recipe: QuantRecipe
) -> list[dict[str, list[float]]]:
    """The scales of each layer, `{"k": [by head], "v": [by head]}`; [] without a K/V format.

    Args:
        model: on the meta device.
        weights: masters.
        recipe: of the rollout; layers that it keeps in high precision have no scales, `{}`.
    """
    fmt = get_format(recipe.kv_cache, four_over_six=recipe.four_over_six)
    if fmt is None or not fmt.has_outer:
        return []
    prefix, layers = find_decoder_layers(model)
    wanted, config = recipe.quantized_layers(len(layers)), model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    found: list[dict[str, list[float]]] = []
    for index, layer in enumerate(layers):
        if index not in wanted:
            found.append({})
            continue
        small = _materialised(layer, f"{prefix}.{index}.", weights)
        attention = attention_module(small)
        assert attention is not None
        kv = KVWeights.of(attention, getattr(small, "input_layernorm", None))
        rotated = recipe.kv_rotation == "hadamard"
        outers = kv_outer_scales(kv, heads, fmt, rotated=rotated, device=torch.device("cpu"))
        found.append(
            {site: outer.flatten().tolist() for site, outer in zip("kv", outers, strict=True) if outer is not None}
        )
    return found


def _materialised(layer: torch.nn.Module, prefix: str, weights: Mapping[str, Tensor]) -> torch.nn.Module:
    """A copy of one layer, which has no weights, with those that K and V depend on."""
    twin = copy.deepcopy(layer)
    needed = {
        name: weights[prefix + name].float().cpu()
        for name, _ in twin.named_parameters()
        if any(part in name for part in ("k_proj", "v_proj", "norm"))
    }
    twin.load_state_dict(needed, strict=False, assign=True)
    return twin
