"""FP4 checkpoints: exports of tiny policies, and what other programs write (by the package compressed-tensors)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tiny import make_model
from trace_lightning.export.record import ExportRecord
from trace_lightning.export.source import Source, source_of
from trace_lightning.models.policy import load_tokenizer
from trace_lightning.recipe import QuantRecipe

PACKED = "nvfp4-pack-quantized"
TOKENIZER = "builtin:tiny-qwen3"


def make_source(model: PreTrainedModel, recipe: QuantRecipe, run: Path | None = None) -> Source:
    """A policy in memory, as an export sees it."""
    return source_of(model, load_tokenizer(TOKENIZER), ExportRecord(recipe=recipe, base_model="tiny"), run)


def stored(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def content(directory: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def foreign_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """compressed-tensors NVFP4 with a per-tensor scale of each linear's own and block scales down to subnormal ones."""
    scheme, tensors = preset_name_to_scheme("NVFP4A16", ["Linear"]), {}
    for name, weight in model.state_dict().items():
        linear = name.removesuffix(".weight")
        if not linear.endswith("_proj"):
            tensors[name] = weight.bfloat16()
            continue
        weight = weight.clone()
        weight[:2, :16] *= 1e-5  # blocks far below the tensor's maximum
        divisor = (448 * 6 / weight.abs().amax()).reshape(1)
        amax = weight.unflatten(1, (-1, 16)).abs().amax(-1)
        scale = (divisor * amax / 6).clamp_min(2.0**-9).to(torch.float8_e4m3fn).float()
        local = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
        packed = BaseCompressor.get_value_from_registry(PACKED).compress(local, scheme)
        tensors |= {f"{linear}.{key}": tensor.contiguous() for key, tensor in packed.items()}
    return tensors


def write_foreign(directory: Path, *, modelopt: bool = False) -> dict[str, Tensor]:
    """A foreign checkpoint of a tiny Llama; returns its tensors."""
    model = make_model("llama")
    tensors = foreign_tensors(model)
    directory.mkdir()
    config = model.config.to_dict()
    if modelopt:
        tensors = as_modelopt(tensors)
        details = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        }
        content = {"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": details}
        (directory / "hf_quant_config.json").write_text(json.dumps(content))
    else:
        scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
        section = QuantizationConfig(
            config_groups={"group_0": scheme}, format=PACKED, quantization_status="compressed", ignore=["lm_head"]
        )
        config["quantization_config"] = section.model_dump()
    (directory / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, directory / "model.safetensors")
    load_tokenizer(TOKENIZER).save_pretrained(directory)
    return tensors


def as_modelopt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under modelopt's names, with scales of inputs and of an FP8 cache."""
    found = {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part == "weight_packed":
            found[f"{linear}.weight"], found[f"{linear}.input_scale"] = tensor, torch.tensor(0.00371)
        elif part == "weight_global_scale":
            found[f"{linear}.weight_scale_2"] = (1 / tensor).reshape(())
        else:
            found[name] = tensor
        if part == "weight_packed" and linear.endswith(("k_proj", "v_proj")):
            found[f"{linear}.{linear[-6]}_scale"] = torch.tensor(0.0213)
    return found
