"""The trainer's quantised forward: Hugging Face modules whose linears and attention round like the rollout.

    decoder layer --(kwarg trace_ctx)--> QATLinear: site(x), Q(W), F.linear      attention: rotate, k, v sites, sdpa

`install_qat(model, recipe)` swaps the `nn.Linear`s of the quantised groups for `QATLinear`s that own the *same*
parameters (names, optimizer and state_dict do not change), and points attention at a registered function. How a site
rounds travels with the call: `model(ids, trace_ctx=GuidedRounding(rows))`. transformers hands unknown keyword
arguments down to every decoder layer, also when gradient checkpointing calls it a second time in the backward pass, so
the recomputed forward is guided by the same rows. MLP linears get no keyword arguments; a hook on the layer tells them.
Norms, rotary embeddings and gated activations become one kernel each (`models/fused.py`), whatever the recipe.

What was left out: a cache object for K/V (training has none), and any rounding of gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trace_kernels import BlockFormat, get_format, straight_through
from trace_kernels.compensation import compensated
from trace_kernels.hadamard import rotate
from trace_lightning.models.fused import fuse_modules
from trace_lightning.models.layout import Layout, LinearGroup, attention_module, read_layout
from trace_lightning.quantization.kv import KVWeights, kv_outer_scales
from trace_lightning.quantization.rounding import NEAREST, Rounding, round_site
from trace_lightning.quantization.shared_cast import cast_for
from trace_lightning.quantization.weights import peaks, quantized_weight, shared_outer
from trace_lightning.recipe import QuantRecipe


class LayerState:
    """How the sites of one decoder layer round in the call that runs now."""

    def __init__(self) -> None:
        self.rounding: Rounding = NEAREST

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder layer."""
        self.rounding = kwargs.get("trace_ctx") or NEAREST


class QATGroup:
    """Linears that share one input: its site, their formats, and their common outer weight scale."""

    def __init__(self, group: LinearGroup, state: LayerState, weights: BlockFormat | None) -> None:
        self.layer, self.site, self.state = group.layer, group.site, state
        self.weights = weights
        self.activations: BlockFormat | None = None  # see QATState.round_inputs_by
        self.residual_share = 0.0
        self.members: list[QATLinear] = []
        self.base: Tensor | None = None  # rows of all members, frozen and without gradient, under LoRA (lora.py)
        self.cached: dict[int, Tensor] | None = None  # see QATState.cache_weights
        self.cached_outer: Tensor | None = None
        self._input: Tensor | None = None
        self._for_members: list[Tensor] = []  # one for each that has not taken it yet

    @property
    def is_plain(self) -> bool:
        """Whether what is rounded are the members' own weights: nothing is merged into them, nor held elsewhere."""
        return all(type(member).merged is QATLinear.merged for member in self.members)

    def round_input(self, x: Tensor) -> Tensor:
        """The input as the rollout would see it; rounded, and cast for the matmuls, once for all members."""
        dtype = matmul_dtype(x)
        if self.activations is None and (dtype == x.dtype or len(self.members) == 1):
            return x
        if self._input is not x:
            rounded = x
            if self.activations is not None:
                rounded = self._round(x.reshape(-1, x.shape[-1]), self.activations).view(x.shape)
            self._input, self._for_members = x, cast_for(rounded, dtype, len(self.members))
        taken = self._for_members.pop(0)
        if not self._for_members:
            self._input = None
        return taken

    def _round(self, x: Tensor, fmt: BlockFormat) -> Tensor:
        if not self.residual_share:
            return round_site(x, self.layer, self.site, fmt, self.state.rounding)
        with torch.no_grad():  # the recipe refuses guidance here: nothing to record and nothing to follow
            value = compensated(x, fmt, self.residual_share)
        return straight_through(x, value)

    def round_weight(self, linear: QATLinear) -> Tensor:
        """`DQ(Q(W))` under the group's outer scale, with a straight-through gradient."""
        if self.weights is None:
            merged = linear.merged()  # an own weight stays as it is: autocast keeps the cast ones of a forward
            return merged if merged is linear.weight else merged.to(matmul_dtype(linear.weight))
        value = None if self.cached is None else self.cached.get(id(linear))
        if value is None:
            with torch.no_grad():
                outer, dtype = self._weight_outer(self.weights), matmul_dtype(linear.weight)
                value = quantized_weight(linear.merged(), self.weights, outer, dtype=dtype)
            if self.cached is not None:
                self.cached[id(linear)] = value
        return straight_through(linear.merged(), value)

    def _weight_outer(self, fmt: BlockFormat) -> Tensor | None:
        """FP32 [1, 1]: the outer scale that all members share; None for formats without."""
        if self.cached_outer is not None:
            return self.cached_outer
        outer = shared_outer([member.merged() for member in self.members], fmt)
        if self.cached is not None:
            self.cached_outer = outer
        return outer


def matmul_dtype(x: Tensor) -> torch.dtype:
    """What autocast will multiply `x` in: a cast before it is the same, and a rounded weight takes half the memory."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class QATLinear(nn.Linear):
    """An `nn.Linear` whose input and weight are rounded like the rollout's. Shares parameters with its original."""

    def __init__(self, original: nn.Linear, group: QATGroup) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight, self.bias = original.weight, original.bias
        self.group = group
        group.members.append(self)

    def merged(self) -> Tensor:
        """What the rollout quantises: the weight itself, or under LoRA the weight and its adapter."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.group.round_input(x), self.group.round_weight(self), self.bias)


class QATKV:
    """The k and v sites of one attention module."""

    def __init__(
        self, layer: int, fmt: BlockFormat | None, attention: nn.Module, norm: nn.Module | None, rotated: bool
    ) -> None:
        self.layer, self.fmt, self.rotated = layer, fmt, rotated
        self.cached: list[tuple[Tensor | None, Tensor | None]] | None = None  # see QATState.cache_weights
        self._modules = (attention, norm)  # a tuple hides them from nn.Module's registration

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query, and key and value as attention reads them from the cache. All [B, H, T, D]."""
        if self.fmt is None:
            return query, key, value
        if self.rotated:
            query, key = rotate(query), rotate(key)
        k_outer, v_outer = self._outer_scales(self.fmt, key.shape[1], key.device)
        return query, self._round(key, "k", rounding, k_outer), self._round(value, "v", rounding, v_outer)

    def _outer_scales(self, fmt: BlockFormat, heads: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if self.cached:
            return self.cached[0]
        found = kv_outer_scales(KVWeights.of(*self._modules), heads, fmt, rotated=self.rotated, device=device)
        if self.cached is not None:
            self.cached.append(found)
        return found

    def _round(self, x_BHTD: Tensor, site: str, rounding: Rounding, outer: Tensor | None) -> Tensor:
        tokens = x_BHTD.transpose(1, 2)
        rounded = round_site(tokens.flatten(0, 1), self.layer, site, self.fmt, rounding, outer)
        return rounded.view(tokens.shape).transpose(1, 2)


def _attention(base: str) -> Any:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        rounding = kwargs.pop("trace_ctx", None) or NEAREST
        if hasattr(rounding, "attend"):  # the engine's context owns a paged cache
            return rounding.attend(module, query, key, value, kwargs), None
        kv: Any = module.trace_kv
        query, key, value = kv(query, key, value, rounding)
        return _implementation(base, module)(module, query, key, value, attention_mask, **kwargs)

    return attend


def _implementation(base: str, module: nn.Module) -> Any:
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    # transformers does not register it: every model file has its own.
    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]


def register_attention(base: str) -> str:
    """Register the quantising wrapper of an attention implementation of transformers; returns its name."""
    name = f"trace_{base}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _attention(base))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


@dataclass
class QATState:
    """What `install_qat` put into a model; found again as `model.trace_qat`."""

    layout: Layout
    groups: list[QATGroup] = field(default_factory=list)
    kvs: list[QATKV] = field(default_factory=list)
    states: list[LayerState] = field(default_factory=list)

    def forget_linears(self) -> None:
        """Let go of the linears that were replaced: under LoRA nobody else holds their weights any more."""
        groups, plain = (
            tuple(replace(group, linears=()) for group in found) for found in (self.layout.groups, self.layout.plain)
        )
        self.layout = replace(self.layout, groups=groups, plain=plain)

    def round_inputs_by(self, recipe: QuantRecipe) -> None:
        """Round the inputs of all linears by `recipe`: a rollout may round them where the trainer does not."""
        for group in self.groups:
            group.activations = get_format(recipe.activations, four_over_six=recipe.four_over_six)
            group.residual_share = recipe.residual_share

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """Run the model in full precision inside the block: what an unquantised decoder must reproduce."""
        holders = [(g, n) for g in self.groups for n in ("weights", "activations")] + [(kv, "fmt") for kv in self.kvs]
        saved = [getattr(holder, name) for holder, name in holders]
        for holder, name in holders:
            setattr(holder, name, None)
        try:
            yield
        finally:
            for (holder, name), value in zip(holders, saved, strict=True):
                setattr(holder, name, value)

    @contextmanager
    def cache_weights(self, *, keep: bool = True) -> Iterator[None]:
        """Find the outer scales of weights, K and V, and quantise each weight, once inside the block.

        No optimizer step may happen in it. Of a sharded model it is a collective.

        Leaving it also lets go of the guidance of the last micro-batch, which the layers hold for recomputation.

        Args:
            keep: off, each forward quantises anew: of a sharded model the cache would hold every layer in full.
        """
        for group in self.groups:
            group.cached = {} if keep else None
        for kv in self.kvs:
            kv.cached = []
        self._cache_outer_scales()
        try:
            yield
        finally:
            for group in self.groups:
                group.cached = group.cached_outer = None
            for kv in self.kvs:
                kv.cached = None
            for state in self.states:
                state.rounding = NEAREST

    @torch.no_grad()
    def _cache_outer_scales(self) -> None:
        """Those of all weights in a few launches: taken group by group, a small model waits for them."""
        fmt = next((group.weights for group in self.groups), None)
        groups = [group for group in self.groups if group.is_plain]
        if fmt is None or not fmt.guidable or not groups:
            return
        most = max(len(group.members) for group in groups)
        # A group with fewer members counts its first one several times.
        members = [member.weight for group in groups for member in (group.members[:1] * most + group.members)[-most:]]
        outers = fmt.outer_from_amax(peaks(members).view(len(groups), most).amax(1, keepdim=True))
        if outers is not None:
            for group, outer in zip(groups, outers.split(1), strict=True):
                group.cached_outer = outer


def _check_attention(attention: str) -> None:
    names = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if not name.startswith("trace_")]
    if attention not in (*names, "eager"):
        raise ValueError(f"attention {attention!r} is unknown; choose one of {', '.join(sorted(names))}")
    if attention.startswith("flash_attention_"):
        available = getattr(transformers.utils, f"is_flash_attn_{attention[-1]}_available")
        # Asked here, because transformers checks its own names only and ours would fail in the first forward.
        if not available():
            raise ImportError(
                f"attention {attention!r} needs the flash-attn package: pip install 'trace-lightning[flash-attn]', or "
                "use sdpa"
            )


def install_qat(model: PreTrainedModel, recipe: QuantRecipe, *, attention: str = "sdpa") -> QATState:
    """Make the forward of `model` round by `recipe`, in place.

    Args:
        model: any causal LM of transformers whose layers pass keyword arguments on to attention.
        recipe: weights, activations and kv_cache formats; for a trainer, `recipe.trained`.
        attention: the implementation of transformers that attends to the rounded K/V, e.g. `sdpa`.

    Raises:
        ValueError: if `attention` is unknown, or `kv_rotation` meets a head dim that 16 does not divide.
        ImportError: if `attention` is a flash-attention that is not installed.
    """
    _check_attention(attention)
    layout = read_layout(model, recipe)
    states = [LayerState() for _ in layout.layers]
    for layer, state in zip(layout.layers, states, strict=True):
        layer.register_forward_pre_hook(state, with_kwargs=True)
    qat = QATState(layout, states=states)
    weights = get_format(recipe.weights, four_over_six=recipe.four_over_six)
    for group in layout.groups:
        qat_group = QATGroup(group, states[group.layer], weights)
        qat.groups.append(qat_group)
        for name, linear in zip(group.names, group.linears, strict=True):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QATLinear(linear, qat_group))
    qat.round_inputs_by(recipe)
    fuse_modules(model)
    qat.kvs = _install_kv(model, layout, recipe, attention)
    model.trace_qat = qat  # type: ignore[assignment]
    return qat


def _install_kv(model: PreTrainedModel, layout: Layout, recipe: QuantRecipe, attention: str) -> list[QATKV]:
    kvs: list[QATKV] = []
    wanted = recipe.quantized_layers(len(layout.layers))
    fmt, rotated = get_format(recipe.kv_cache, four_over_six=recipe.four_over_six), recipe.kv_rotation == "hadamard"
    for index, layer in enumerate(layout.layers):
        module = attention_module(layer)
        if module is None:
            raise ValueError(f"layer {index} of {type(model).__name__} has no attention module that could be quantised")
        head_dim = getattr(module, "head_dim", 16)
        if rotated and head_dim % 16:
            raise ValueError(f"recipe.kv_rotation=hadamard needs a head dim divisible by 16, this model has {head_dim}")
        norm = getattr(layer, "input_layernorm", None)
        kvs.append(QATKV(index, fmt if index in wanted else None, module, norm, rotated))
        module.trace_kv = kvs[-1]  # type: ignore[assignment]
    model.set_attn_implementation(register_attention(attention))
    return kvs
