"""The models that are benchmarked: Qwen3's published shapes with random weights, or a checkpoint.

Speed does not depend on what the weights are, only on their shapes, so nothing has to be downloaded. Random weights are
drawn on the device they are used on: an 8B model never exists on the host.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

from trace_lightning.models.checkpoint import load_model
from trace_lightning.models.fused import FUSED_FAMILIES
from trace_lightning.models.resolve import resolve_model_path


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the cost of a decoder depends on."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    max_positions: int

    @property
    def linear_params(self) -> int:
        """Weights of the linears in all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        """Weights of the vocabulary projection."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All weights but those of the norms."""
        return self.linear_params + self.head_params * (1 if self.tied else 2)

    @property
    def kv_elements(self) -> int:
        """Numbers in K and V of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelShape:
        """The shape of a model of the families that the fused decoder knows.

        Raises:
            ValueError: for another family: its cost is not the one counted here.
        """
        if config.model_type not in FUSED_FAMILIES:
            raise ValueError(
                f"bench knows the families {', '.join(FUSED_FAMILIES)}, not {config.model_type}: other models run "
                "through transformers' own modules, so that there is nothing of ours to time"
            )
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
            tied=config.tie_word_embeddings,
            max_positions=config.max_position_embeddings,
        )


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelShape:
    sizes: dict[str, Any] = {"hidden": hidden, "intermediate": intermediate, "layers": layers, "heads": heads}
    return ModelShape(**sizes, kv_heads=8, head_dim=128, vocab=151936, tied=tied, max_positions=40960)


SHAPES = {
    "tiny": ModelShape(
        hidden=128,
        intermediate=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=512,
        tied=True,
        max_positions=4096,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
}


def lookup(kind: str, name: str, known: Iterable[str]) -> str:
    """`name`, if it is known.

    Raises:
        ValueError: if not; names what is spelled nearly the same, and all choices.
    """
    choices = list(known)
    if name in choices:
        return name
    near = difflib.get_close_matches(name, choices, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}; {hint}There are {', '.join(choices)}")


def read_shape(name: str, path: str | None) -> ModelShape:
    """The shape called `name`, or that of the checkpoint at `path`.

    Raises:
        ValueError: an unknown name, no model at `path`, or a family that is not benchmarked.
    """
    if path is None:
        return SHAPES[lookup("shape", name, SHAPES)]
    return ModelShape.of(AutoConfig.from_pretrained(resolve_model_path(path)))


def make_model(shape: ModelShape, path: str | None, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A Qwen3 of this shape with random BF16 weights, or the checkpoint at `path`, in eval mode on `device`."""
    if path is not None:
        loaded = load_model(resolve_model_path(path), torch.bfloat16)
        return loaded.to(device).eval()  # type: ignore[arg-type]
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class NoTokenizer:
    """Stands in for the tokenizer that an engine asks for: benchmarks look at counts, never at text."""

    eos_token_id = None

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return ""
