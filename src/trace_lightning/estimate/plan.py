"""The question: one model, recipe and card, the batch, and the settings that decide memory and time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trace_kernels import get_format
from trace_lightning.bench.shapes import ModelShape
from trace_lightning.estimate.adapters import adapter_params
from trace_lightning.estimate.cards import Card
from trace_lightning.models.lora import LoraConfig
from trace_lightning.quantization.guidance import Key
from trace_lightning.quantization.record_layout import SiteShape
from trace_lightning.recipe import FP4, SITES, GuidanceConfig, QuantRecipe

_LINEARS = {  # site -> linears behind it, as the families that are counted here call them
    "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_in": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "down_in": ("mlp.down_proj",),
}
PRECISIONS = ("bf16-mixed", "bf16-true")
REFERENCES = ("none", "bf16", "fp8")
LORA_ROLLOUTS = ("adapter", "merged")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training run, as far as its cost depends on it. `prompts` are those of a step on all GPUs together.

    `mean_new_tokens` 0 takes `new_tokens`. The settings from `precision` on carry the names and defaults of
    `PolicyModule` and `LocalEngine`.

    Raises:
        ValueError: a number out of range, more tokens than the model has positions, or an unknown precision.
    """

    model: str
    shape: ModelShape
    recipe: QuantRecipe
    card: Card
    gpus: int = 1
    prompts: int = 32
    samples: int = 16
    prompt_length: int = 512
    new_tokens: int = 4096
    mean_new_tokens: int = 0
    precision: str = "bf16-mixed"
    gradient_checkpointing: bool = False
    max_tokens_per_microbatch: int = 16384
    num_iterations: int = 1
    num_minibatches: int = 1
    memory_fraction: float = 0.4
    max_num_seqs: int = 512
    kv_cache_tokens: int = 0
    page_size: int = 64
    decode_window: int = 8
    prefill_tokens: int = 8192
    keep_snapshot: bool = True
    max_version_diff: int = 0  # 1: the engine draws while the trainer works
    reference: str = "none"  # of a KL term, see `model.reference`
    lora_rank: int = 0  # 0 trains all weights
    lora_rollout: str = "adapter"

    def __post_init__(self) -> None:
        for name in ("gpus", "prompts", "samples", "prompt_length", "new_tokens", "max_tokens_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: give at least 1")
        for name in ("num_iterations", "num_minibatches", "max_num_seqs", "page_size", "decode_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"--memory_fraction {self.memory_fraction} must be in (0, 1]")
        if not 0 <= self.mean_new_tokens <= self.new_tokens:
            raise ValueError(
                f"--mean_new_tokens {self.mean_new_tokens} exceeds --new_tokens {self.new_tokens}, or is < 0"
            )
        self._check_choices()
        if self.longest > self.shape.max_positions:
            raise ValueError(
                f"{self.prompt_length} + {self.new_tokens} tokens exceed the context of {self.model}, "
                f"{self.shape.max_positions}: lower --prompt_length or --new_tokens"
            )

    def _check_choices(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision {self.precision!r}: estimates know {', '.join(PRECISIONS)}")
        if self.reference not in REFERENCES:
            raise ValueError(f"--reference {self.reference!r}: expected {', '.join(REFERENCES)}")
        if self.lora_rank:
            LoraConfig(rank=self.lora_rank, rollout=self.lora_rollout).check(self.recipe)  # type: ignore[arg-type]
        if self.max_version_diff and not self.keep_snapshot:
            raise ValueError(
                "max_version_diff=1 draws while the trainer works, so the snapshot is kept: keep_snapshot=true"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_length + self.new_tokens

    @property
    def mean_new(self) -> int:
        """Tokens that a completion has on average."""
        return self.mean_new_tokens or self.new_tokens

    @property
    def own_prompts(self) -> int:
        """Prompts per GPU."""
        return -(-self.prompts // self.gpus)

    @property
    def sequences(self) -> int:
        """Sequences per GPU."""
        return self.own_prompts * self.samples

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight, of its gradient, and of each of AdamW's two moments."""
        return 4 if self.precision == "bf16-mixed" else 2

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number between the layers: as the masters, or BF16 like a frozen model's weights."""
        return 2 if self.lora_rank else self.master_bytes

    @property
    def shares_base(self) -> bool:
        """Whether trainer and rollout hold one set of linears."""
        return self.lora_rank > 0 and self.lora_rollout == "adapter"

    @property
    def trained_params(self) -> int:
        """Parameters with a gradient."""
        return adapter_params(self.shape, self.lora_rank) if self.lora_rank else self.shape.params

    @property
    def _begins_wide(self) -> bool:
        """Whether the engine records bits of every FP4 site from the start: it draws under other weights."""
        return bool(self.max_version_diff and self.recipe.guidance.fallback)

    @property
    def guidance(self) -> GuidanceConfig:
        """What is recorded."""
        return self.recipe.guidance.bits if self._begins_wide else self.recipe.guidance

    @property
    def guided_sites(self) -> dict[Key, SiteShape]:
        """What the record covers: the pairs that `LocalEngine` finds in a model of this shape."""
        recipe, layers = self.recipe, range(self.shape.layers)
        kept = {
            (layer, site): [self._excluded(layer, name) for name in names]
            for layer in layers
            for site, names in _LINEARS.items()
        }
        fp4 = [
            (layer, site)
            for layer in recipe.quantized_layers(len(layers))
            for site in SITES
            if recipe.site_format(site) in FP4 and not all(kept.get((layer, site), [False]))
        ]
        keys = fp4
        if not (self._begins_wide and recipe.guided_sites):
            keys = recipe.guided_keys(fp4, {key for key, which in kept.items() if any(which)}, len(layers))
        return {key: self._site_shape(key[1]) for key in keys}

    def _excluded(self, layer: int, name: str) -> bool:
        """Whether `recipe.exclude` names a linear, by its name in the families that are counted here."""
        return any(re.search(pattern, f"model.layers.{layer}.{name}") for pattern in self.recipe.exclude)

    def _site_shape(self, site: str) -> SiteShape:
        shape, recipe = self.shape, self.recipe
        attended = shape.heads * shape.head_dim
        widths = {"attn_in": shape.hidden, "o_in": attended, "mlp_in": shape.hidden, "down_in": shape.intermediate}
        fmt = get_format(recipe.site_format(site), four_over_six=recipe.four_over_six)
        assert fmt is not None, "the recipe refuses to guide what is not FP4"
        return SiteShape(fmt, widths.get(site, shape.head_dim), shape.kv_heads if site in ("k", "v") else None)
