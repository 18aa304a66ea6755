"""Low-rank adapters on their way out: merged into their base, beside it, or alone.

    merge     W + s B A in FP32, weight by weight when it is asked for; FP4 rounds the sum once, never Q(Q(W) + D)
    beside    the base as it is exported without adapters, and `adapter/` in peft's format: what a rollout ran that
              kept the base in FP4 and added the low-rank product
    alone     the same `adapter/`, as the export itself (`--format adapter`)

Adapters are read from a directory that peft wrote, or from a checkpoint, which holds them without their base.

What was left out: peft's variants that are more than a sum (DoRA, modules saved whole, ranks by pattern). They are
refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from trace_lightning.models.checkpoint import read_json
from trace_lightning.quantization.lora import adapter_parameters, lora_state

CONFIG, TENSORS, FOLDER = "adapter_config.json", "adapter_model.safetensors", "adapter"
_PREFIX = "base_model.model."
_VARIANTS = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_pattern",
    "trainable_token_indices",
)


@dataclass(frozen=True)
class Adapters:
    """Adapters of the linears of one model.

    Args:
        pairs: A [R, K] and B [N, R] by linear.
        rank: R.
        alpha: the product is scaled by `scaling`.
        scaling: alpha / rank, or what peft's rank-stabilised variant makes of it.
        base: path of the model they belong to.
        merged_in_rollout: whether the rollout quantised the sum; else it added the product to an FP4 base.
    """

    pairs: dict[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float
    scaling: float
    base: str
    merged_in_rollout: bool = False

    def write(self, directory: Path, base: str) -> None:
        """The two files that `PeftModel.from_pretrained` reads; FP32, `base` as the model they belong to."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{_PREFIX}{name}.lora_{letter}.weight": matrix.detach().float().cpu().contiguous()
            for name, pair in self.pairs.items()
            for letter, matrix in zip("AB", pair, strict=True)
        }
        save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
        stable = not math.isclose(self.scaling, self.alpha / self.rank)
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": stable,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.pairs}),
        }
        (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class MergedWeights(Mapping[str, Tensor]):
    """The weights of a base with adapters added in FP32, each when it is asked for.

    Raises:
        ValueError: an adapter of a weight that the base does not have, or of another shape.
    """

    def __init__(self, base: Mapping[str, Tensor], adapters: Adapters) -> None:
        self.base, self.adapters = base, adapters
        for name, (a, b) in adapters.pairs.items():
            if f"{name}.weight" not in base:
                raise ValueError(f"the adapter of {name} belongs to another model: its base has no {name}.weight")
            of = getattr(base, "shape", None)
            shape = of(f"{name}.weight") if of is not None else tuple(base[f"{name}.weight"].shape)
            if shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
                raise ValueError(
                    f"the adapter of {name} is {tuple(b.shape)} x {tuple(a.shape)}, its base's weight {shape}"
                )

    def __getitem__(self, name: str) -> Tensor:
        weight, pair = self.base[name], self.adapters.pairs.get(name.removesuffix(".weight"))
        if pair is None or not name.endswith(".weight"):
            return weight
        a, b = (matrix.to(weight.device, torch.float32) for matrix in pair)  # a policy in training may be on a GPU
        return torch.addmm(weight.float(), b, a, alpha=self.adapters.scaling)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def read_peft(directory: Path) -> Adapters:
    """What peft saved.

    Raises:
        ValueError: no LoRA, a variant that is no plain sum, or damaged files.
    """
    config = read_json(directory / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{directory / CONFIG} is of type {config.get('peft_type')}; LORA can be exported")
    used = [name for name in _VARIANTS if config.get(name)]
    if used or config.get("bias", "none") != "none":
        raise ValueError(f"{directory / CONFIG} uses {', '.join(used) or 'bias'}, which is more than a low-rank sum")
    try:
        stored = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory / TENSORS} cannot be read: {error}") from error
    matrices = {name.removeprefix(_PREFIX).removesuffix(".weight"): tensor for name, tensor in stored.items()}
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    pairs = _pairs(matrices, str(directory / TENSORS))
    return Adapters(pairs, rank, alpha, scaling, str(config.get("base_model_name_or_path") or ""))


def adapters_of(state: Mapping[str, Tensor], hparams: Mapping[str, Any], where: str) -> Adapters | None:
    """Those in the `state_dict` of a run; None if it trained all weights.

    Args:
        state: names begin with `policy.`.
        hparams: of the PolicyModule, as plain data.
        where: for messages.

    Raises:
        ValueError: half of a pair, or adapters without their settings.
    """
    matrices = {name.removeprefix("policy."): t for name, t in state.items() if name.endswith((".lora_A", ".lora_B"))}
    if not matrices:
        return None
    settings = (hparams.get("lora") or {}).get("init_args")
    if not settings:
        raise ValueError(f"{where} holds adapters, but not their rank and alpha")
    rank, alpha = int(settings["rank"]), float(settings["alpha"])
    merged = settings.get("rollout") == "merged"
    return Adapters(_pairs(matrices, where), rank, alpha, alpha / rank, str(hparams["path"]), merged)


def adapters_in(policy: PreTrainedModel, base: str) -> Adapters | None:
    """Those of a policy in memory, over the model at `base`; None if all its weights are trained."""
    state = lora_state(policy)
    if state is None:
        return None
    parameters = adapter_parameters(policy)
    pairs = _pairs(parameters, "the policy")
    rank = next(iter(pairs.values()))[0].shape[0]
    return Adapters(pairs, rank, state.scaling * rank, state.scaling, base, state.merged)


def _pairs(matrices: Mapping[str, Tensor], where: str) -> dict[str, tuple[Tensor, Tensor]]:
    names = sorted({name.rpartition(".")[0] for name in matrices})
    for name in names:
        for letter in "AB":
            if f"{name}.lora_{letter}" not in matrices:
                raise ValueError(f"{where} is incomplete: the tensor {name}.lora_{letter} is missing")
    return {name: (matrices[f"{name}.lora_A"].detach(), matrices[f"{name}.lora_B"].detach()) for name in names}
