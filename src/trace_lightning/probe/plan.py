"""What is probed: model, formats, prompts, how long; and everything that can be refused before anything is drawn.

A format is a name: `bf16`, `fp8`, `nvfp4`, `mxfp4` (that format everywhere), `recipe` (the config's own), or the bits
of weights, activations and KV cache, `w4a16kv8`, in NVFP4 unless it ends in `-mxfp4`. 8 bits are FP8, 16 nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trace_kernels import get_format
from trace_lightning.recipe import FP4, GuidanceConfig, QuantRecipe
from trace_lightning.types import Problem, Prompt, SamplingParams

PARTS = ("divergence", "same_tokens", "layers", "quality", "sync")
FORMATS = ("bf16", "fp8", "w4a16kv4", "w4a4kv4", "w4a16kv4-mxfp4", "w4a4kv4-mxfp4")
_BITS = re.compile(r"w(4|8|16)a(4|8|16)kv(4|8|16)(-mxfp4|-nvfp4)?")


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How much is measured.

    Args:
        formats: names of number formats with commas between them, see the top of this file. `bf16` is always probed:
            it is the floor.
        target: the format that the verdict is about; null: the config's recipe if it quantises, else w4a16kv4.
        max_new_tokens: length of the trajectories; null: what the context leaves, at most 8192, on a CPU 256.
        trajectories: trajectories per format, in equal shares of `num_prompts` prompts.
        num_prompts: training problems they start from.
        prompt: a text, or several, to start from instead, in the chat template of a model that has one.
        stop_at_eos: end trajectories where the model ends them; off, they go on to `max_new_tokens`, for the question
            is what happens late.
        heldout: held-out problems whose reward is measured in every format.
        heldout_samples: completions of each.
        layer_tokens: tokens of the bf16 trajectories that the study of single layers reads.
        parts: of divergence, same_tokens, layers, quality, sync, with commas between them.
        seed: of sampling, and of the step that moves the weights off the grid of their checkpoint.
    """

    formats: str = ",".join(FORMATS)
    target: str | None = None
    max_new_tokens: int | None = None
    trajectories: int = 16
    num_prompts: int = 8
    prompt: str | list[str] | None = None
    stop_at_eos: bool = False
    heldout: int = 64
    heldout_samples: int = 4
    layer_tokens: int = 2048
    parts: str = ",".join(PARTS)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("trajectories", "num_prompts", "heldout", "heldout_samples", "layer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: give at least 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 8:
            raise ValueError(f"--max_new_tokens {self.max_new_tokens}: curves over positions need at least 8 tokens")
        for part in words(self.parts):
            if part not in PARTS:
                raise ValueError(f"--parts {part}: there are {', '.join(PARTS)}")
        if "divergence" not in words(self.parts):
            raise ValueError("--parts needs divergence: the other parts read its trajectories")

    @property
    def texts(self) -> list[str]:
        """The texts of `prompt`."""
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt or ())


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """A probe that has been checked: formats by name, the target among them, prompts as tokens, sampling by purpose."""

    model: str
    settings: ProbeSettings
    formats: dict[str, QuantRecipe]
    target: str
    prompts: list[Prompt]
    heldout: list[Prompt]
    sampling: SamplingParams
    eval_sampling: SamplingParams

    @property
    def num_samples(self) -> int:
        """Trajectories per prompt."""
        return max(1, self.settings.trajectories // len(self.prompts))

    def guidance_of(self, name: str) -> GuidanceConfig | None:
        """Guidance that `name` would train with: the recipe's where it has one, else parity; None if not guidable."""
        recipe = self.formats[name]
        if not {recipe.activations, recipe.kv_cache} & set(FP4):
            return None
        return recipe.guidance if recipe.guidance.mode != "none" else GuidanceConfig(mode="parity")


def parse_format(name: str, base: QuantRecipe) -> QuantRecipe:
    """The recipe called `name`; layers kept in BF16, rotation and the rule for scales are those of `base`.

    Raises:
        ValueError: a name that means nothing.
    """
    if name == "bf16":
        return QuantRecipe()
    if name == "recipe":
        return replace(base, trainer="qat")
    if name in ("fp8", "nvfp4", "mxfp4"):
        bits: dict[str, Any] = dict.fromkeys(("weights", "activations", "kv_cache"), name)
    elif found := _BITS.fullmatch(name):
        four = (found[4] or "-nvfp4")[1:]
        words = {"4": four, "8": "fp8", "16": "none"}
        bits = dict(zip(("weights", "activations", "kv_cache"), (words[found[i]] for i in (1, 2, 3)), strict=True))
    else:
        raise ValueError(
            f"--formats {name}: write bf16, fp8, nvfp4, mxfp4, recipe, or the bits of weights, activations and KV "
            "cache such as w4a16kv4 or w4a4kv8-mxfp4"
        )
    return replace(base, **bits, trainer="qat", guidance=GuidanceConfig(), residual_share=0.0)


def choose_formats(settings: ProbeSettings, base: QuantRecipe) -> tuple[dict[str, QuantRecipe], str]:
    """All formats by name, bf16 first, and the target among them.

    Raises:
        ValueError: an unknown name, a target that is not quantised, or a residual, which cannot be recorded.
    """
    if base.residual_share:
        raise ValueError(
            f"recipe.residual_share={base.residual_share} adds a second code per element, which the record does "
            "not hold: probe with recipe.residual_share=0"
        )
    formats: dict[str, QuantRecipe] = {}
    for name in ("bf16", *words(settings.formats)):
        recipe = parse_format(name, base)
        if all(_bits(recipe) != _bits(other) for other in formats.values()):  # nvfp4 is w4a4kv4
            formats[name] = recipe
    target = settings.target or ("recipe" if _quantises(base) else "w4a16kv4")
    recipe = parse_format(target, base)
    if not _quantises(recipe):
        raise ValueError(f"--target {target} is not quantised: there is nothing to decide about")
    same = [name for name, other in formats.items() if _bits(other) == _bits(recipe)]
    target = same[0] if same else target
    return formats | {target: recipe}, target


def _quantises(recipe: QuantRecipe) -> bool:
    return {recipe.weights, recipe.activations, recipe.kv_cache} != {"none"}


def _bits(recipe: QuantRecipe) -> tuple[str, str, str]:
    return recipe.weights, recipe.activations, recipe.kv_cache


def check_formats(formats: dict[str, QuantRecipe], device: torch.device, head_dim: int) -> None:
    """Refuse formats that this device or model cannot run.

    Raises:
        ValueError: FP8 on a GPU that cannot convert it, or K and V that are no whole blocks.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the kernels need 8.0 (BF16 "
            "and Triton). Probe on a newer card, or with --device cpu."
        )
    for name, recipe in formats.items():
        fmt = get_format(recipe.kv_cache)
        block = 1 if fmt is None or recipe.kv_cache not in FP4 else fmt.block_size
        if device.type == "cuda" and head_dim % max(block, 16):
            raise ValueError(f"--formats {name}: a head dim of {head_dim} is no whole number of blocks of {block}")


def trajectory_sampling(
    settings: ProbeSettings, sampling: SamplingParams, room: int, device: torch.device
) -> SamplingParams:
    """Sampling of the trajectories: as in training, but long; `room` is what the context leaves.

    Raises:
        ValueError: more tokens than the context has, or sampling that no trainer could score.
    """
    sampling.check_trainable()
    wanted = settings.max_new_tokens or min(room, 8192 if device.type == "cuda" else 256)
    if wanted > room:
        raise ValueError(
            f"--max_new_tokens {wanted}: the model's context leaves {room} beside the prompts. Lower it, or probe a "
            "model with a longer context."
        )
    if room < 8:
        raise ValueError(f"the prompts leave {room} tokens of the model's context: give shorter ones (--prompt)")
    changes: dict[str, Any] = {"max_new_tokens": wanted, "seed": settings.seed, "record_logprobs": 0}
    if not settings.stop_at_eos:
        changes |= {"ignore_eos": True, "stop": [], "stop_token_ids": []}
    return replace(sampling, **changes)


def as_problems(texts: Sequence[str], has_template: bool) -> list[Problem]:
    """Own texts as problems: chat messages where the model has a template."""
    if has_template:
        return [Problem(prompt=[{"role": "user", "content": text}]) for text in texts]
    return [Problem(prompt=text) for text in texts]
