"""Per-tensor scales of FP4 inputs, for the W4A4 layouts, measured on texts.

The rollout gives every token an outer scale of its own. The layouts know one number per linear, fixed beforehand. Both
are powers of two here, so the two roundings agree bit for bit as long as a block's own scale stays within the range of
E4M3: 15 octaves, of which the headroom below takes two. A run's own completions are the texts to measure on: they are
what the policy will write.

    amax of all inputs seen  ->  x HEADROOM  ->  the smallest power of two that represents it

What was left out: percentiles and clipping. A power of two too large costs range at the small end, one too small clips.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trace_kernels import get_format
from trace_lightning.export.source import Source
from trace_lightning.models.checkpoint import build_model, weight_names
from trace_lightning.models.layout import read_layout
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import QuantRecipe

HEADROOM = 4.0
_MAX_TEXTS, _MAX_TOKENS = 64, 1024


def read_texts(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Up to 64 texts, spread over a file: JSON lines with `prompt` and `completion`, or `text`; or plain lines.

    Raises:
        ValueError: no such file, or no text in it.
    """
    if not file.is_file():
        raise ValueError(f"--calibration: there is no file {file}")
    # Not splitlines(), which also splits at separators that JSON leaves inside a text.
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    texts = [_text(line, tokenizer) for line in lines[:: max(1, -(-len(lines) // _MAX_TEXTS))]]
    if not any(texts):
        raise ValueError(f"--calibration: {file} has no line with a `prompt`, `completion` or `text`")
    return texts


def _text(line: str, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    prompt = entry.get("prompt", entry.get("text", ""))
    if isinstance(prompt, list):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return f"{prompt}{entry.get('completion', '')}"


@torch.no_grad()
def input_scales(source: Source, recipe: QuantRecipe, texts: Sequence[str], dtype: torch.dtype) -> dict[str, float]:
    """The outer scale of the inputs of every quantised linear, from a forward pass over texts.

    The whole model is needed for this, in `dtype`. It rounds by `recipe`, as the rollout does.

    Raises:
        ValueError: inputs that are not finite.
    """
    state = {name: source.weights[name].to(dtype) for name in weight_names(source.model)}
    model = build_model(source.model.config, state, dtype).eval()
    fmt = get_format("nvfp4", four_over_six=recipe.four_over_six)
    assert fmt is not None
    groups = read_layout(model, dataclasses.replace(recipe, weights="nvfp4")).groups
    install_qat(model, recipe)
    peaks: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
            peak = arguments[0].abs().amax().float()
            peaks[name] = torch.maximum(peaks.get(name, peak), peak)

        return hook

    for group in groups:
        model.get_submodule(group.names[0]).register_forward_pre_hook(watch(group.names[0]))
    for text in texts:
        ids = source.tokenizer(text, return_tensors="pt")["input_ids"][:, :_MAX_TOKENS]
        if ids.shape[1]:
            model(input_ids=ids, use_cache=False)
    found: dict[str, float] = {}
    for group in groups:
        peak = peaks[group.names[0]]
        if not peak.isfinite():
            raise ValueError(f"calibration: the inputs of {group.names[0]} are not finite; this policy has diverged")
        outer = fmt.outer_from_amax(peak * HEADROOM)
        assert outer is not None
        found |= dict.fromkeys(group.names, float(outer))
    return found
