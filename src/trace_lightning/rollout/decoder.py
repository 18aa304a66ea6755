"""The decoder: one forward pass over a snapshot of the weights. Base class, and the fast one for known families.

`FusedDecoder` covers the families whose layer is: RMSNorm, q/k/v (bias optional, QK-norm optional), RoPE, attention, o,
RMSNorm, gate/up, activation, down: Llama (and SmolLM2), Qwen2, Qwen3, Mistral. It reads the live model's structure once
and then owns its weights:

    per layer   qkv [(H + 2K) D, hidden]   o   gate_up [2 I, hidden]   down     packed FP4 (the truth) and, on this
                reference path, the dequantised values in the compute dtype that matmuls use: same numbers

Dtypes follow the trainer under autocast, cast for cast: the residual stream has the dtype of the master weights,
linears and attention run in the compute dtype. `HFDecoder` (hf_decoder.py) serves every other architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_kernels import BlockFormat, get_format
from trace_lightning.models.layout import read_layout
from trace_lightning.quantization.kv import KVWeights, kv_outer_scales, rotate
from trace_lightning.rollout.batch import ForwardBatch, paged_attention
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.rollout.snapshot import SnapshotLinear
from trace_lightning.types import QuantRecipe

FUSED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class Decoder(ABC):
    """A snapshot of the policy that can run `ForwardBatch`es against a `PagedKV`."""

    kv_formats: list[BlockFormat | None]
    num_kv_heads: int
    head_dim: int

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, quantize: bool = True) -> None:
        """Take over weights under their Hugging Face names, in place; `quantize=False` keeps them as they are.

        Raises:
            ValueError: if a weight that the decoder needs is missing, or one is unknown; nothing is changed then.
        """

    @abstractmethod
    def kv_outer(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Outer scales of K and V for the weights held now."""

    @abstractmethod
    def unquantized(self) -> AbstractContextManager[None]:
        """Block in which sites and K/V are left in full precision (with weights loaded by `quantize=False`)."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Hidden states after the final norm, [B, hidden]: of each sequence's last fed token."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [n, V]."""


@dataclass
class _Layer:
    qkv: SnapshotLinear
    o: SnapshotLinear
    gate_up: SnapshotLinear
    down: SnapshotLinear
    norms: dict[str, Tensor]  # Hugging Face name of the weight -> snapshot, in the master dtype
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    activations: dict[str, BlockFormat]  # by site; a linear that the recipe excludes has none
    kv_names: dict[str, str]  # field of KVWeights -> Hugging Face name

    @property
    def linears(self) -> tuple[SnapshotLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


def check_names(tensors: dict[str, Tensor], needed: set[str], model: PreTrainedModel) -> None:
    """Refuse an incomplete or foreign snapshot before any of it is copied: half a sync would be a policy of its own."""
    missing = needed - set(tensors)
    if missing:
        raise ValueError(f"weights are missing from the snapshot: {sorted(missing)[:5]} ({len(missing)} in all)")
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    unknown = set(tensors) - needed - known
    if unknown:
        raise ValueError(
            f"the snapshot has weights that {type(model).__name__} does not know: {sorted(unknown)[:5]} "
            f"({len(unknown)} in all). Pass them under their Hugging Face names."
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as transformers writes it: FP32 inside, cast to the dtype of `x`, then the gain."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def apply_rope(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of transformers."""
    first, second = x_NHD.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_NHD * cos_ND.unsqueeze(1) + rotated * sin_ND.unsqueeze(1)


class FusedDecoder(Decoder):
    """Own forward for the families in `FUSED_FAMILIES`."""

    def __init__(self, model: PreTrainedModel, recipe: QuantRecipe, dtype: torch.dtype) -> None:
        self.model, self.recipe, self.dtype = model, recipe, dtype
        config, body = model.config, model.get_decoder()
        layers: list[Any] = list(body.layers)  # type: ignore[arg-type]
        attention = layers[0].self_attn
        self.eps, self.head_dim, self.scaling = config.rms_norm_eps, attention.head_dim, attention.scaling
        self.num_kv_heads = config.num_key_value_heads
        self.rotary, self.activation = body.rotary_emb, layers[0].mlp.act_fn
        quantized = {name for group in read_layout(model, recipe).groups for name in group.names}
        self.names = {id(module): name for name, module in model.named_modules()}
        wanted = recipe.quantized_layers(len(layers))
        kv = get_format(recipe.kv_cache, four_over_six=recipe.four_over_six)
        self.kv_formats = [kv if index in wanted else None for index in range(len(layers))]
        self.layers = [self._layer(layer, quantized) for layer in layers]
        self._outer: list[tuple[Tensor | None, Tensor | None]] = []
        self._small: dict[str, Tensor] = {}
        self.final_norm = self._copy_of(body.norm, "weight")
        self.embedding = self._copy_of(body.embed_tokens, "weight")
        head: Any = model.get_output_embeddings()
        self._head_name = "" if head.weight is body.embed_tokens.weight else f"{self.names[id(head)]}.weight"
        same = not self._head_name and self.embedding.dtype == dtype
        self.head = self.embedding if same else torch.zeros_like(head.weight, dtype=dtype, requires_grad=False)
        for layer in self.layers:
            self._small |= layer.norms

    def _copy_of(self, module: nn.Module, field: str) -> Tensor:
        copy = torch.zeros_like(getattr(module, field), requires_grad=False)
        self._small[f"{self.names[id(module)]}.{field}"] = copy
        return copy

    def _linear(self, modules: list[nn.Linear], quantized: set[str]) -> SnapshotLinear:
        named = [(self.names[id(module)], module) for module in modules]
        inside = {name in quantized for name, _ in named}
        if len(inside) > 1:
            raise ValueError(
                f"recipe.exclude splits the fused group {[n for n, _ in named]}: exclude all of its linears or none"
            )
        fmt = self.recipe.weights if inside.pop() else "none"
        return SnapshotLinear(named, fmt, self.recipe.four_over_six, self.dtype)

    def _layer(self, layer: Any, quantized: set[str]) -> _Layer:
        attn, mlp = layer.self_attn, layer.mlp
        norms: dict[str, Tensor] = {}

        def norm(module: Any) -> Tensor:
            return norms.setdefault(
                f"{self.names[id(module)]}.weight", torch.zeros_like(module.weight, requires_grad=False)
            )

        activations = get_format(self.recipe.activations, four_over_six=self.recipe.four_over_six)
        first_of_site = {"attn_in": attn.q_proj, "o_in": attn.o_proj, "mlp_in": mlp.gate_proj, "down_in": mlp.down_proj}
        sites = [site for site, linear in first_of_site.items() if self.names[id(linear)] in quantized]
        config_window = getattr(self.model.config, "sliding_window", None)  # Mistral keeps it there
        k_name, v_name = self.names[id(attn.k_proj)], self.names[id(attn.v_proj)]
        return _Layer(
            qkv=self._linear([attn.q_proj, attn.k_proj, attn.v_proj], quantized),
            o=self._linear([attn.o_proj], quantized),
            gate_up=self._linear([mlp.gate_proj, mlp.up_proj], quantized),
            down=self._linear([mlp.down_proj], quantized),
            norms=norms,
            input_norm=norm(layer.input_layernorm),
            post_norm=norm(layer.post_attention_layernorm),
            q_norm=norm(attn.q_norm) if hasattr(attn, "q_norm") else None,
            k_norm=norm(attn.k_norm) if hasattr(attn, "k_norm") else None,
            window=getattr(attn, "sliding_window", config_window),
            activations={} if activations is None else dict.fromkeys(sites, activations),
            kv_names={
                "k": f"{k_name}.weight",
                "v": f"{v_name}.weight",
                "k_bias": f"{k_name}.bias",
                "v_bias": f"{v_name}.bias",
                "input_gain": f"{self.names[id(layer.input_layernorm)]}.weight",
                "k_gain": f"{self.names[id(attn.k_norm)]}.weight" if hasattr(attn, "k_norm") else "",
            },
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, quantize: bool = True) -> None:
        tensors = dict(weights)
        linears = [linear for layer in self.layers for linear in layer.linears]
        needed = {name for linear in linears for name in linear.weight_names} | set(self._small)
        check_names(tensors, needed | ({self._head_name} if self._head_name else set()), self.model)
        self._outer = []
        for layer, fmt in zip(self.layers, self.kv_formats, strict=True):
            for linear in layer.linears:
                linear.load(tensors, quantize=quantize)
            kv = KVWeights(**{field: tensors.get(name) for field, name in layer.kv_names.items()})  # type: ignore[arg-type]
            rotated, device = self.recipe.kv_rotation == "hadamard", self.head.device
            outer: tuple[Tensor | None, Tensor | None] = (None, None)
            if fmt is not None:
                outer = kv_outer_scales(kv, self.num_kv_heads, fmt, rotated=rotated, device=device)
            self._outer.append(outer)
        for name, copy in self._small.items():
            copy.copy_(tensors[name])
        if self.head is not self.embedding:
            self.head.copy_(tensors[self._head_name] if self._head_name else self.embedding)

    def kv_outer(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        return self._outer[layer]

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        saved = [layer.activations for layer in self.layers], self.kv_formats
        for layer in self.layers:
            layer.activations = {}
        self.kv_formats = [None] * len(self.layers)
        try:
            yield
        finally:
            for layer, activations in zip(self.layers, saved[0], strict=True):
                layer.activations = activations
            self.kv_formats = saved[1]

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        hidden = F.embedding(batch.token_ids_N, self.embedding)
        cos, sin = (part[0] for part in self.rotary(hidden.unsqueeze(0), batch.positions_N.unsqueeze(0)))
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attend(
                index, layer, rms_norm(hidden, layer.input_norm, self.eps), cos, sin, batch, kv
            )
            hidden = hidden + self._mlp(index, layer, rms_norm(hidden, layer.post_norm, self.eps), batch)
        last = hidden if batch.last_index_B is None else hidden[batch.last_index_B]
        return rms_norm(last, self.final_norm, self.eps)

    def _site(self, index: int, site: str, layer: _Layer, x: Tensor, batch: ForwardBatch) -> Tensor:
        fmt = layer.activations.get(site)
        return x if fmt is None else batch.rounding.values(index, site, x, fmt)

    def _attend(
        self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: PagedKV
    ) -> Tensor:
        qkv = layer.qkv(self._site(index, "attn_in", layer, x, batch)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((qkv.shape[1] - 2 * self.num_kv_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, self.eps), rms_norm(k, layer.k_norm, self.eps)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if self.kv_formats[index] is not None and self.recipe.kv_rotation == "hadamard":
            q, k = rotate(q), rotate(k)
        kv.write(index, batch.write_slots_N, k, v, batch.rounding)
        out = paged_attention(q, kv, index, batch, scaling=self.scaling, window=layer.window).flatten(1)
        return layer.o(self._site(index, "o_in", layer, out, batch))

    def _mlp(self, index: int, layer: _Layer, x: Tensor, batch: ForwardBatch) -> Tensor:
        gate, up = layer.gate_up(self._site(index, "mlp_in", layer, x, batch)).chunk(2, dim=-1)
        return layer.down(self._site(index, "down_in", layer, self.activation(gate) * up, batch))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.dtype), self.head).float()
