"""The fused decoder: a handful of kernels per layer over a snapshot of the weights, for `FUSED_FAMILIES`.

It covers decoders whose layer is: RMSNorm, q/k/v (bias optional, QK-norm optional), RoPE, attention, o, RMSNorm,
gate/up, activation, down: Llama (and SmolLM2), Qwen2, Qwen3, Mistral. It reads the live model's structure once and then
owns its weights. One layer, with what each kernel leaves behind:

    add_rms_norm        residual += last linear; normalised, rounded at site attn_in
    qkv                 partial sums
    kv_append           sums joined; QK-norm, RoPE, rotation; K and V rounded and written to their pages; q
    attend              over the pages
    round_rows          site o_in (left out when there is nothing to round or to permute)
    o, add_rms_norm (mlp_in), gate_up, gated_activation (down_in), down

Each kernel has a torch reference under the same name, and that is what a CPU runs: there is one forward pass, not two.
Dtypes follow the trainer under autocast, cast for cast: the residual stream has the dtype of the master weights,
linears and attention run in the compute dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_kernels import BlockFormat, get_format
from trace_kernels.compensation import compensated
from trace_kernels.gated_activation import gated_activation
from trace_kernels.kv_append import kv_append
from trace_kernels.norm import add_rms_norm
from trace_kernels.rows import RowRecord, round_rows
from trace_lightning.models.layout import read_layout
from trace_lightning.quantization.kv import KVWeights, kv_outer_scales
from trace_lightning.quantization.lora import AdapterLinear, lora_state
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.batch import ForwardBatch
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.rollout.shared_linear import SharedLinear
from trace_lightning.rollout.snapshot import SnapshotLinear

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}  # Hugging Face name -> kernel's
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that depend on the position alone


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
    kv_linears: dict[str, str]  # "k" and "v" -> Hugging Face name of the linear
    kv_names: dict[str, str]  # other fields of KVWeights -> Hugging Face name of the tensor

    @property
    def linears(self) -> tuple[SnapshotLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class FusedDecoder(Decoder):
    """Own forward for the families in `models.fused.FUSED_FAMILIES`.

    Raises:
        ValueError: an activation that no kernel has, or a recipe that excludes a part of a fused group.
    """

    def __init__(self, model: PreTrainedModel, recipe: QuantRecipe, dtype: torch.dtype) -> None:
        self.model, self.recipe, self.dtype = model, recipe, dtype
        config, body = model.config, model.get_decoder()
        layers: list[Any] = list(body.layers)  # type: ignore[arg-type]
        attention = layers[0].self_attn
        self.eps, self.head_dim, self.scaling = config.rms_norm_eps, attention.head_dim, attention.scaling
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        if config.hidden_act not in _ACTIVATIONS:
            raise ValueError(
                f"the fused decoder knows the activations {', '.join(_ACTIVATIONS)}, not {config.hidden_act}, which "
                f"{type(model).__name__} has: use engine.decoder=hf"
            )
        # A copy: where angles follow the length (longrope, dynamic) a forward pass rewrites the module's own.
        self.rotary, self.activation = copy.deepcopy(body.rotary_emb), _ACTIVATIONS[config.hidden_act]
        self.rope_is_static = getattr(body.rotary_emb, "rope_type", "default") in _STATIC_ROPE
        self._rope_table: tuple[Tensor, Tensor] | None = None
        quantized = {name for group in read_layout(model, recipe).groups for name in group.names}
        self.names = {id(module): name for name, module in model.named_modules()}
        wanted = recipe.quantized_layers(len(layers))
        kv = get_format(recipe.kv_cache, four_over_six=recipe.four_over_six)
        self.kv_formats = [kv if index in wanted else None for index in range(len(layers))]
        lora = lora_state(model)
        self._shares = lora is not None and not lora.merged  # what is frozen is the policy's own
        self._frozen: dict[str, Tensor] = {}
        self._small: dict[str, Tensor] = {}
        self.layers = [self._layer(layer, quantized) for layer in layers]
        self._outer: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.final_norm = self._copy_of(body.norm, "weight")
        self.embedding = self._copy_of(body.embed_tokens, "weight")
        self._embedding_name = f"{self.names[id(body.embed_tokens)]}.weight"
        head: Any = model.get_output_embeddings()
        self._head_name = "" if head.weight is body.embed_tokens.weight else f"{self.names[id(head)]}.weight"
        self.head = self._head_of(head)
        if not self._shares:
            for layer in self.layers:
                self._small |= layer.norms

    def _copy_of(self, module: nn.Module, field: str) -> Tensor:
        if self._shares:
            return self._share(f"{self.names[id(module)]}.{field}", getattr(module, field))
        copy = _zeros_for(getattr(module, field))
        self._small[f"{self.names[id(module)]}.{field}"] = copy
        return copy

    def _share(self, name: str, parameter: Tensor) -> Tensor:
        """A frozen tensor of the policy itself: it cannot change under the rollout, so no copy is needed."""
        return self._frozen.setdefault(name, parameter.detach())

    def _head_of(self, head: Any) -> Tensor:
        """The head's weight in the compute dtype: the embedding, where they are one, or room for it."""
        if not self._head_name and self.embedding.dtype == self.dtype:
            return self.embedding
        return head.weight.detach().to(self.dtype) if self._shares else _zeros_for(head.weight, self.dtype)

    def _linear(self, modules: list[nn.Linear], quantized: set[str]) -> SnapshotLinear:
        named = [(self.names[id(module)], module) for module in modules]
        if isinstance(modules[0], AdapterLinear):
            for name, module in named:
                if module.bias is not None:
                    self._share(f"{name}.bias", module.bias)
            return SharedLinear(named, self.dtype)  # type: ignore[arg-type]
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
            name = f"{self.names[id(module)]}.weight"
            return (
                self._share(name, module.weight) if self._shares else norms.setdefault(name, _zeros_for(module.weight))
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
            kv_linears={"k": k_name, "v": v_name},
            kv_names={
                "k_bias": f"{k_name}.bias",
                "v_bias": f"{v_name}.bias",
                "input_gain": f"{self.names[id(layer.input_layernorm)]}.weight",
                "k_gain": f"{self.names[id(attn.k_norm)]}.weight" if hasattr(attn, "k_norm") else "",
            },
        )

    def needed_names(self) -> set[str]:
        linears = [linear for layer in self.layers for linear in layer.linears]
        needed = {name for linear in linears for name in linear.weight_names} | set(self._small)
        return needed | ({self._head_name} if self._head_name and not self._shares else set())

    def load_part(self, tensors: dict[str, Tensor], *, quantize: bool) -> None:
        for index, (layer, fmt) in enumerate(zip(self.layers, self.kv_formats, strict=True)):
            if not tensors.keys() >= {name for linear in layer.linears for name in linear.weight_names}:
                continue
            for linear in layer.linears:
                linear.load(tensors, quantize=quantize)
            rotated, device = self.recipe.kv_rotation == "hadamard", self.head.device
            outer: tuple[Tensor | None, Tensor | None] = (None, None)
            if fmt is not None:
                kv = self._kv_weights(layer, tensors)
                outer = kv_outer_scales(kv, self.num_kv_heads, fmt, rotated=rotated, device=device)
            self._renew_outer(index, outer)
        for name in self._small.keys() & tensors.keys():
            self._small[name].copy_(tensors[name])
        head = self._head_name or self._embedding_name
        if self.head is not self.embedding and head in tensors:
            self.head.copy_(tensors[head])

    def _kv_weights(self, layer: _Layer, tensors: dict[str, Tensor]) -> KVWeights:
        k, v = (layer.qkv.master(layer.kv_linears[field], tensors) for field in ("k", "v"))
        small = {field: tensors.get(name, self._frozen.get(name)) for field, name in layer.kv_names.items()}
        return KVWeights(k=k, v=v, **small)

    @property
    def is_stale(self) -> bool:
        linears = (linear for layer in self.layers for linear in layer.linears)
        return any(linear.is_stale for linear in linears if isinstance(linear, SharedLinear))

    def _renew_outer(self, index: int, outer: tuple[Tensor | None, Tensor | None]) -> None:
        """Keep the K/V outer scales where they were, for graphs that read or write them."""
        held = self._outer.get(index)
        if held is None or (held[0] is None) != (outer[0] is None):
            self._outer[index] = tuple(None if scale is None else scale.clone() for scale in outer)  # type: ignore[assignment]
            return
        for target, source in zip(held, outer, strict=True):
            if target is not None and source is not None:
                target.copy_(source)

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

    def prepare(self, max_len: int) -> bool:
        """Tabulate the rotary angles of `max_len` positions, if a position determines them; whether it does."""
        if self.rope_is_static and (self._rope_table is None or len(self._rope_table[0]) < max_len):
            positions = torch.arange(max_len, device=self.head.device)
            self._rope_table = self._angles(positions)
        return self.rope_is_static

    def _angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        like = self.embedding[:1].unsqueeze(0)  # the rotary module looks at its dtype and device
        cos, sin = self.rotary(like, positions_N.unsqueeze(0))
        return cos[0], sin[0]

    def find_crossover(self) -> str:
        """Find for every linear up to how many rows its packed weights are the faster ones; the result in words."""
        found: dict[tuple[int, int], int] = {}
        for layer in self.layers:
            for linear in layer.linears:
                linear.find_crossover()
                found[linear.shape] = linear.crossover
        return ", ".join(f"{rows}x{width} up to {batch} rows" for (rows, width), batch in found.items() if batch)

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        residual = F.embedding(batch.token_ids_N, self.embedding)
        table = self._rope_table
        cos, sin = self._angles(batch.positions_N) if table is None else (t[batch.positions_N] for t in table)
        parts: Tensor | None = None
        for index, layer in enumerate(self.layers):
            forward = _LayerPass(self, index, layer, batch, residual)
            attended = forward.attention(parts, cos, sin, kv)
            parts = forward.mlp(attended)
        assert parts is not None, "a decoder without layers"
        last = batch.last(residual), batch.last(parts.transpose(0, 1)).transpose(0, 1).contiguous()
        return add_rms_norm(*last, self.final_norm, self.eps, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.dtype), self.head)


def _zeros_for(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a copy of a parameter; whole, where the parameter itself is cut over ranks."""
    return torch.zeros(parameter.shape, dtype=dtype or parameter.dtype, device=parameter.device)


class _LayerPass:
    """One layer of one forward pass."""

    def __init__(self, decoder: FusedDecoder, index: int, layer: _Layer, batch: ForwardBatch, residual: Tensor) -> None:
        self.decoder, self.index, self.layer, self.batch, self.residual = decoder, index, layer, batch, residual
        self.num_rows = len(residual)

    def attention(self, parts: Tensor | None, cos: Tensor, sin: Tensor, kv: PagedKV) -> Tensor:
        """Partial sums of `o`; `parts` are those of the layer before."""
        decoder, layer, batch = self.decoder, self.layer, self.batch
        k, v = kv.layers[self.index]
        x = self._norm(parts, layer.input_norm, "attn_in", layer.qkv)
        q = kv_append(
            layer.qkv(x),
            layer.q_norm,
            layer.k_norm,
            decoder.eps,
            cos,
            sin,
            batch.slots_N,
            k,
            v,
            num_heads=decoder.num_heads,
            dtype=decoder.dtype,
            rotated=k.fmt is not None and decoder.recipe.kv_rotation == "hadamard",
        )
        out = batch.attend(q.to(decoder.dtype), k, v, scaling=decoder.scaling, window=layer.window).flatten(1)
        return layer.o(self._round(out, "o_in", layer.o))

    def mlp(self, parts: Tensor) -> Tensor:
        """Partial sums of `down`."""
        layer = self.layer
        gate_up = layer.gate_up(self._norm(parts, layer.post_norm, "mlp_in", layer.gate_up))
        rounding = self._rounding("down_in", layer.down)
        x = gated_activation(gate_up, activation=self.decoder.activation, dtype=self.decoder.dtype, **rounding)
        return layer.down(self._compensated(x, "down_in", layer.down))

    def _norm(self, parts: Tensor | None, gain: Tensor, site: str, linear: SnapshotLinear) -> Tensor:
        rounding, dtype = self._rounding(site, linear), self.decoder.dtype
        x = add_rms_norm(self.residual, parts, gain, self.decoder.eps, dtype=dtype, **rounding)
        return self._compensated(x, site, linear)

    def _round(self, x: Tensor, site: str, linear: SnapshotLinear) -> Tensor:
        rounding = self._rounding(site, linear)
        if rounding["fmt"] is not None or rounding["permute"]:
            x = round_rows(x, dtype=self.decoder.dtype, **rounding)
        return self._compensated(x, site, linear)

    def _rounding(self, site: str, linear: SnapshotLinear) -> dict[str, Any]:
        """How the kernel before `linear` rounds, arranges and records its rows."""
        if self._is_compensated(site):
            return {"fmt": None, "permute": False, "record": None}
        fmt, permute = self.layer.activations.get(site), linear.reads_packed(self.num_rows)
        return {"fmt": fmt, "permute": permute, "record": self._new_record(site)}

    def _is_compensated(self, site: str) -> bool:
        return self.decoder.recipe.residual_share > 0 and site in self.layer.activations

    def _compensated(self, x: Tensor, site: str, linear: SnapshotLinear) -> Tensor:
        """The rows with a part of their rounding error added again, where the recipe wants that."""
        if not self._is_compensated(site):
            return x
        x = compensated(x, self.layer.activations[site], self.decoder.recipe.residual_share)
        return round_rows(x, dtype=self.decoder.dtype, fmt=None, permute=linear.reads_packed(self.num_rows))

    def _new_record(self, site: str) -> RowRecord | None:
        """Tensors for the codes of a site, if they are recorded."""
        recorder = self.batch.recorder
        if recorder is None or site not in self.layer.activations or not recorder.wants(self.index, site):
            return None
        return recorder.of(self.index, site, self.num_rows)
