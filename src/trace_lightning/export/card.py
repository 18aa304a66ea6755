"""README.md of an exported policy, made from its `ExportRecord` alone: what it is, its training, how to serve it."""

from __future__ import annotations

from typing import Any

import yaml

from trace_lightning.export.record import ExportRecord
from trace_lightning.hparams import to_plain

_SERVE = {
    "hf": "```bash\nvllm serve PATH\npython -m sglang.launch_server --model-path PATH\n```",
    "compressed-tensors": "```bash\nvllm serve PATH                                    # reads config.json\n```\n\n"
    "```python\n"
    "# pip install 'trace-lightning[export]': the package compressed-tensors\n"
    "model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.bfloat16)\n```",
    "adapter": "```bash\nvllm serve BASE --enable-lora --lora-modules policy=PATH\n```\n\n"
    "```python\nmodel = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), PATH)\n```",
    "beside": "```bash\nvllm serve PATH --enable-lora --lora-modules policy=PATH/adapter\n```",
    "modelopt": "```bash\nvllm serve PATH --quantization modelopt_fp4\n"
    "python -m sglang.launch_server --model-path PATH --quantization modelopt_fp4\n```",
}


def model_card(record: ExportRecord) -> str:
    """Markdown with the card data that the Hub reads."""
    data: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    data["tags"] = ["reinforcement-learning", "trace-lightning", *([record.format] if record.dialect else [])]
    parts = [
        f"---\n{yaml.safe_dump(data, sort_keys=False)}---",
        "# A policy trained with trace-lightning",
        f"Started from `{record.base_model}`."
        + ("" if record.steps is None else f" {record.steps} optimizer steps of reinforcement learning."),
        _weights(record),
        _evaluation(record),
        "## Recipe of the rollout\n\n"
        f"`{record.recipe.label}`\n\n```yaml\n{yaml.safe_dump(_recipe(record), sort_keys=False)}```",
        _cache(record),
        f"## Serving\n\n{_serving(record)}",
        f"Written by trace-lightning {record.version}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _recipe(record: ExportRecord) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(record.recipe)["init_args"]
    plain["guidance"] = plain["guidance"]["init_args"]
    return plain


def _serving(record: ExportRecord) -> str:
    if record.format == "adapter" or record.adapters == "beside":
        return _SERVE["beside" if record.adapters == "beside" else "adapter"]
    return _SERVE[record.dialect or "hf"]


def _weights(record: ExportRecord) -> str:
    if record.format == "adapter":
        return "These are its low-rank adapters alone, in peft's format."
    adapters = {"merge": " Its low-rank adapters are merged into them.", "beside": " Its adapters are in `adapter/`."}
    return _quantisation(record) + adapters.get(record.adapters, "")


def _quantisation(record: ExportRecord) -> str:
    if not record.dialect:
        return "The weights are the trainer's masters, not quantised."
    whose = "the rollout's own, byte for byte" if record.quantized_as_trained else "rounded for this export"
    text = f"Weights in {record.format}, dialect {record.dialect}; the codes are {whose}."
    if record.survival:
        text += (
            f" Of the update by training they keep {record.survival['kept']:.1%} along its own direction "
            f"({record.survival['changed']:.1%} of the weights have another value than before)."
        )
    if record.activations == "none":
        return text + " Inputs of linears are not quantised."
    if record.calibration:
        return text + f" Inputs of linears in {record.activations}, their scales measured on {record.calibration}."
    return text + f" Inputs of linears in {record.activations}."


def _evaluation(record: ExportRecord) -> str:
    if not record.evaluation:
        return ""
    rows = [f"| {name} | {_number(v[0])} | {_number(v[1])} |" for name, v in record.evaluation.items()]
    head = "| measured by the rollout policy | before | after |\n|---|---|---|"
    return "## Evaluation\n\n" + "\n".join([head, *rows])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _cache(record: ExportRecord) -> str:
    recipe = record.recipe
    if recipe.kv_cache == "none":
        return ""
    text = f"## KV cache\n\nThe rollout kept K and V in {recipe.kv_cache}"
    text += ", K rotated by a Hadamard matrix, which no serving tool does." if recipe.kv_rotation != "none" else "."
    return text + (" Its outer scales by layer and head are in `trace_export.json`." if record.kv_scales else "")
