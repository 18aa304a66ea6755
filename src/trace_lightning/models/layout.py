"""Where the quantisation sites of a Hugging Face causal LM are: found from the module tree, not from a list of models.

A decoder layer holds linears that share an input and are run as one matmul by any fast engine. Such a fused group has
one input site and one outer weight scale:

    attn_in  q_proj k_proj v_proj      o_in  o_proj      mlp_in  gate_proj up_proj      down_in  down_proj

Embeddings and `lm_head` sit outside the decoder layers and routers have no role, so none of them is ever quantised.
Linears inside a decoder layer whose role is unknown, and weights that are not `nn.Linear` at all (stacked experts,
GPT-2's Conv1D), stay in high precision and are *reported*, so that a model of which 9 % is quantised cannot pass for an
FP4 model.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from trace_lightning.recipe import QuantRecipe

# The last part of a linear's name -> its site. `c_proj`, `dense` and `out_proj` occur in attention and MLP: see _role.
_ROLES = {
    "attn_in": {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "query", "key", "value", "Wqkv"},
    "o_in": {"o_proj"},
    "mlp_in": {"gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "dense_h_to_4h", "w1", "w3"},
    "down_in": {"down_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"},
}
_AMBIGUOUS = {"dense", "c_proj", "out_proj"}
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_ROUTER = re.compile(r"(^|\.)(router|gate)$", re.IGNORECASE)


@dataclass(frozen=True)
class LinearGroup:
    """The linears of one decoder layer that share one input, with their names in the model."""

    layer: int
    site: str
    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]


@dataclass(frozen=True)
class Layout:
    """The decoder layers of a model and the groups in them that a recipe quantises."""

    layers: tuple[nn.Module, ...]
    groups: tuple[LinearGroup, ...]
    plain: tuple[LinearGroup, ...]  # sites of a known role that the recipe leaves in high precision
    kept: dict[str, str]  # name of a linear inside the layers -> why it stays in high precision
    quantized_parameters: int
    layer_parameters: int

    @property
    def plain_sites(self) -> set[tuple[int, str]]:
        """The (layer, site) pairs at which some or all linears stay in high precision, or none are known."""
        found = {(group.layer, group.site) for group in self.groups}
        return {(group.layer, group.site) for group in self.plain} | {
            (layer, site) for layer in range(len(self.layers)) for site in _ROLES if (layer, site) not in found
        }

    def report(self) -> str:
        """One line for the log: how much of the decoder layers is quantised, and what is not."""
        share = self.quantized_parameters / max(1, self.layer_parameters)
        text = (
            f"{self.quantized_parameters:,} of {self.layer_parameters:,} decoder-layer parameters "
            f"({share:.1%}) are quantised"
        )
        if not self.kept:
            return text
        shown = ", ".join(f"{name} ({why})" for name, why in list(self.kept.items())[:4])
        return f"{text}; kept in high precision: {shown}" + (" ..." if len(self.kept) > 4 else "")


def find_decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and ModuleList of the decoder layers: the list that holds most of the parameters.

    Raises:
        ValueError: if the model has no such list.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers, so its sites cannot be found")
    return max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _role(name: str) -> str | None:
    leaf = name.rpartition(".")[2]
    if leaf in _AMBIGUOUS:
        return "o_in" if _ATTENTION.search(name.rpartition(".")[0]) else "down_in"
    return next((site for site, leaves in _ROLES.items() if leaf in leaves), None)


def read_layout(model: PreTrainedModel, recipe: QuantRecipe) -> Layout:
    """Find the groups of `model` that `recipe` quantises; with weights and activations `none` there are none.

    Raises:
        ValueError: if an `exclude` pattern matches no module (a typo would otherwise quantise what was to be kept), or
            `bf16_layers` leaves no layer to quantise.
    """
    prefix, layers = find_decoder_layers(model)
    active = recipe.weights != "none" or recipe.activations != "none"
    left = [index for index in recipe.quantized_layers(len(layers)) if index < len(layers)]
    if (active or recipe.kv_cache != "none") and not left:
        raise ValueError(
            f"recipe.bf16_layers={recipe.bf16_layers} leaves none of the {len(layers)} layers of "
            f"{type(model).__name__} to quantise: name fewer, or set recipe.weights, activations and kv_cache to none"
        )
    wanted = recipe.quantized_layers(len(layers)) if active else range(0)
    kept: dict[str, str] = {}
    found: dict[tuple[int, str, str], list[tuple[str, nn.Linear]]] = {}
    plain: dict[tuple[int, str, str], list[tuple[str, nn.Linear]]] = {}
    unmatched = set(recipe.exclude)
    for index, layer in enumerate(layers):
        for local, module in layer.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            name = f"{prefix}.{index}.{local}"
            hits = {pattern for pattern in recipe.exclude if re.search(pattern, name)}
            unmatched -= hits
            role = None if _ROUTER.search(local) else _role(local)
            chosen = active and not hits and role is not None and index in wanted
            if not chosen:
                kept[name] = _why(active, bool(hits), role, local)
            if role is not None:
                of_site = (index, role, local.rpartition(".")[0])
                (found if chosen else plain).setdefault(of_site, []).append((name, module))
    # What is never quantised may be named all the same; `lm_head` often is.
    unmatched -= {pattern for pattern in unmatched for name, _ in model.named_modules() if re.search(pattern, name)}
    if unmatched:
        linears = [name for name, module in layers[0].named_modules() if isinstance(module, nn.Linear)]
        leaves = {name.rpartition(".")[2] for name in linears}
        near = [leaf for pattern in sorted(unmatched) for leaf in difflib.get_close_matches(pattern, leaves, n=2)]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"recipe.exclude patterns {sorted(unmatched)} match no module of {type(model).__name__}; {hint}"
            f"Names look like {prefix}.0.{linears[0] if linears else ''}"
        )
    groups = _groups(found)
    quantized = sum(m.in_features * m.out_features for group in groups for m in group.linears)
    matrices = sum(p.numel() for p in layers.parameters() if p.ndim > 1)
    return Layout(tuple(layers), groups, _groups(plain), kept if active else {}, quantized, matrices)


def _groups(found: dict[tuple[int, str, str], list[tuple[str, nn.Linear]]]) -> tuple[LinearGroup, ...]:
    return tuple(
        LinearGroup(index, site, tuple(n for n, _ in members), tuple(m for _, m in members))
        for (index, site, _), members in found.items()
    )


def _why(active: bool, excluded: bool, role: str | None, local: str) -> str:
    if not active:
        return "recipe"
    if excluded:
        return "recipe.exclude"
    if _ROUTER.search(local):
        return "router"
    return "unknown role" if role is None else "recipe.bf16_layers"


def attention_module(layer: nn.Module) -> nn.Module | None:
    """The attention module of a decoder layer: the one that transformers numbers with `layer_idx`."""
    for name, module in layer.named_modules():
        if hasattr(module, "layer_idx") and _ATTENTION.search(name):
            return module
    return None
