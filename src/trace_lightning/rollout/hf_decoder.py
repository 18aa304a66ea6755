"""The compatibility decoder: any causal LM, through the modules of transformers.

It owns a second copy of the model whose linears hold the snapshot's dequantised weights, and runs flat tokens as one
row `[1, N]` with explicit positions. Everything but attention works token by token, and attention is ours: the context
passed as `trace_ctx` reaches the registered attention function, which writes K and V to the pages and reads them back.
Same quantisers, same cache, slower (one Python call per module). Architectures that mix tokens anywhere else (state
spaces, convolutions, attention that ignores the registered function) are caught by the engine's check against the
model's own logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_kernels import BlockFormat, get_format
from trace_kernels.compensation import compensated
from trace_kernels.hadamard import rotate
from trace_lightning.models.layout import attention_module, find_decoder_layers
from trace_lightning.models.lora import frozen_tensors
from trace_lightning.models.policy import logits_head
from trace_lightning.models.sharding import is_sharded, plain_twin
from trace_lightning.quantization.kv import KVWeights, kv_outer_scales
from trace_lightning.quantization.lora import adapter_parameters, lora_state
from trace_lightning.quantization.qat import QATLinear, QATState
from trace_lightning.quantization.rounding import NEAREST, NearestRounding
from trace_lightning.quantization.weights import quantized_weight, shared_outer
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.batch import ForwardBatch
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.kv_pool import PagedKV


class _EngineRounding(NearestRounding):
    """Rounds like the batch's own rounding, and answers the attention calls of one forward pass."""

    def __init__(self, decoder: HFDecoder, batch: ForwardBatch, kv: PagedKV) -> None:
        super().__init__(batch.recorder)
        self.decoder, self.batch, self.kv, self.calls = decoder, batch, kv, 0

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        share = self.decoder.recipe.residual_share
        return compensated(x, fmt, share) if share else super().values(layer, site, x, fmt, outer)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Called by the registered attention function with [1, heads, N, D]; returns [1, N, heads, D]."""
        ignored = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
        if ignored:
            raise ValueError(
                f"{type(module).__name__} caps its scores or has sinks ({', '.join(ignored)}); attention over the "
                "paged cache has neither, so this architecture cannot be rolled out"
            )
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self.calls += 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.decoder.kv_formats[layer] is not None and self.decoder.rotated:
            q, k = rotate(q), rotate(k)
        self.kv.write(layer, self.batch.slots_N, k, v, NEAREST)  # their record is read back from the pages
        scaling, window = kwargs.get("scaling") or q.shape[-1] ** -0.5, kwargs.get("sliding_window")
        pages = self.kv.layers[layer]
        return self.batch.attend(q.to(self.kv.dtype), *pages, scaling=scaling, window=window).unsqueeze(0)


def _twin(model: PreTrainedModel, shares: bool) -> PreTrainedModel:
    """A second model of the same structure; its weights are loaded later, but for those that it shares with `model`."""
    if shares:
        twin: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in frozen_tensors(model)})
        return twin
    if is_sharded(model) or lora_state(model) is not None:  # merged weights have a plain model's names
        return plain_twin(model, next(model.parameters()).device)
    return copy.deepcopy(model)


class HFDecoder(Decoder):
    """Runs a copy of the policy's own modules against the paged cache."""

    def __init__(self, model: PreTrainedModel, recipe: QuantRecipe, dtype: torch.dtype) -> None:
        from trace_lightning.quantization.qat import install_qat

        self.recipe, self.dtype, self.rotated = recipe, dtype, recipe.kv_rotation == "hadamard"
        lora = lora_state(model)
        shares = lora is not None and not lora.merged
        self.policy = model if shares else None
        self.model = _twin(model, shares).requires_grad_(False).eval()
        if not any(isinstance(module, QATLinear) for module in self.model.modules()):
            install_qat(self.model, recipe)
        qat: QATState = self.model.trace_qat  # type: ignore[assignment]
        qat.round_inputs_by(recipe)  # the copied trainer may round less than the rollout
        self.groups = {id(member): group for group in qat.groups for member in group.members}
        self.weight_format = None if shares else get_format(recipe.weights, four_over_six=recipe.four_over_six)
        own = adapter_parameters(self.model) if shares else dict(self.model.named_parameters())
        self.own: dict[str, nn.Parameter] = own  # what a sync brings; the rest of a shared model is the policy's
        for group in qat.groups:
            group.weights = None  # the copy holds values that are quantised already
        prefix, layers = find_decoder_layers(self.model)
        self.layer_names = [
            {name for name in self.own if name.startswith(f"{prefix}.{index}.")} for index in range(len(layers))
        ]
        self.attentions = [attention_module(layer) for layer in layers]
        self.norms = [getattr(layer, "input_layernorm", None) for layer in layers]
        config = self.model.config
        self.num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        wanted = recipe.quantized_layers(len(layers))
        kv = get_format(recipe.kv_cache, four_over_six=recipe.four_over_six)
        self.kv_formats = [kv if index in wanted else None for index in range(len(layers))]
        self._outer: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(layers)
        self._head = logits_head(self.model)

    @property
    def is_stale(self) -> bool:
        if self.policy is None:
            return False
        ours, theirs = ({id(tensor) for tensor in frozen_tensors(model)} for model in (self.model, self.policy))
        return ours != theirs

    def needed_names(self) -> set[str]:
        return set(self.own)

    def load_part(self, tensors: dict[str, Tensor], *, quantize: bool) -> None:
        for name, parameter in self.own.items():
            if name in tensors:
                parameter.copy_(tensors[name])
        renewed = [index for index, names in enumerate(self.layer_names) if names <= tensors.keys()]
        for index in renewed:  # the outer scales come from the masters, so before these are rounded
            self._outer[index] = self._outer_of(index)
        if quantize and self.weight_format is not None:
            for group in {id(g): g for g in self.groups.values() if g.layer in renewed}.values():
                outer = shared_outer([member.weight for member in group.members], self.weight_format)
                for member in group.members:
                    member.weight.copy_(quantized_weight(member.weight, self.weight_format, outer))

    def _outer_of(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        fmt, attention = self.kv_formats[index], self.attentions[index]
        if fmt is None:
            return None, None
        assert attention is not None
        weights, device = KVWeights.of(attention, self.norms[index]), next(self.model.parameters()).device
        return kv_outer_scales(weights, self.num_kv_heads, fmt, rotated=self.rotated, device=device)

    def kv_outer(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        return self._outer[layer]

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        saved, self.kv_formats = self.kv_formats, [None] * len(self.kv_formats)
        qat: QATState = self.model.trace_qat  # type: ignore[assignment]
        try:
            with qat.unquantized():
                yield
        finally:
            self.kv_formats = saved

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        context = _EngineRounding(self, batch, kv)
        with self._autocast():
            output = self.model.get_decoder()(
                input_ids=batch.token_ids_N.unsqueeze(0),
                position_ids=batch.positions_N.unsqueeze(0),
                use_cache=False,
                trace_ctx=context,
            )
        if context.calls != len(self.attentions):
            raise ValueError(
                f"{type(self.model).__name__} called the registered attention {context.calls} times for "
                f"{len(self.attentions)} layers, so it cannot run over a paged KV cache"
            )
        return batch.last(output.last_hidden_state[0])

    def logits(self, hidden: Tensor) -> Tensor:
        with self._autocast():
            return self._head(hidden)

    def _autocast(self) -> torch.autocast:
        parameter = next(self.model.parameters())
        return torch.autocast(parameter.device.type, self.dtype, enabled=parameter.dtype != self.dtype)
