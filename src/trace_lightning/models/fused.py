"""Norms, rotary embeddings and gated activations of the trainer in one kernel each, for families that have them alike.

transformers writes them as dozens of torch operators, most of them over FP32 tensors. On a GPU these take longer than
the matmuls of a 1.7B model, whatever the recipe. `fuse_modules` swaps each RMSNorm and MLP for one that owns the same
parameters (names, optimizer and state_dict do not change), and `apply_rotary_pos_emb` in the family's module of
transformers for one with the same values: attention calls it as a global, so there is no narrower place. On a CPU all
three compute what they did before, bit for bit.

What was left out: other families. Gemma multiplies by 1 + weight, OLMo casts in another order; they keep their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_kernels.rms_norm import rms_norm
from trace_kernels.rotary import rotary
from trace_kernels.swiglu import swiglu

FUSED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class FusedRMSNorm(nn.Module):
    """`gain * x / rms(x)` in one launch; shares its parameter with the norm it stands for."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = original.weight, original.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class FusedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` with one launch between the linears; they are those of the MLP it stands for."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = original.gate_proj, original.up_proj, original.down_proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        down: Tensor = self.down_proj(swiglu(self.gate_proj(hidden_states), self.up_proj(hidden_states)))
        return down


class FusedRotary:
    """`apply_rotary_pos_emb` of a family, queries and keys in one launch each."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.original = original

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1]:
            return self.original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotary(q, cos, sin), rotary(k, cos, sin)


def fuse_modules(model: PreTrainedModel) -> None:
    """Swap norms and MLPs of `model`, and its family's rotary embedding, in place; other families stay as they are.

    Only what transformers itself defines for the family: a model that brings code of its own may compute otherwise.
    """
    kind = model.config.model_type
    family: Any = sys.modules.get(f"transformers.models.{kind}.modeling_{kind}")
    if kind not in FUSED_FAMILIES or family is None:
        return
    fused = {"RMSNorm": FusedRMSNorm, **({"MLP": FusedMLP} if model.config.hidden_act == "silu" else {})}
    for name, module in list(model.named_modules()):
        if type(module).__module__ != family.__name__:
            continue
        for ending, swapped in fused.items():
            if type(module).__name__.endswith(ending):
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, swapped(module))
    if not isinstance(family.apply_rotary_pos_emb, FusedRotary):
        family.apply_rotary_pos_emb = FusedRotary(family.apply_rotary_pos_emb)
