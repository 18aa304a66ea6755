"""`model.lora`: which linears get adapters, what becomes of the base, and the files that peft reads.

The package peft decides which modules match, initialises A and B (A random, B zero) and defines the format of the
files; how an adapter runs over an FP4 base is ours (quantization/lora.py).

    rollout=adapter   base packed in FP4 once, read by trainer and rollout; only adapters are synced
    rollout=merged    base in high precision in the trainer; W + s B A in FP32 is quantised at each sync

A checkpoint holds the adapters, the path of the base, a checksum of it as it was held, and the identity of its files:
adapters over another base are another model. What was left out: peft's other initialisations and variants (PiSSA moves
the base, DoRA needs its norms), and adapters on embeddings and heads.
"""

from __future__ import annotations

import difflib
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_lightning.quantization.dialects import TENSOR_CLASSES
from trace_lightning.quantization.lora import AdapterLinear, LoraState, MergedLinear, adapter_parameters, lora_state
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.quantization.qat import QATGroup, QATState
from trace_lightning.recipe import QuantRecipe

_PIECE = 2**24
_HELD_ONCE = ("none", *TENSOR_CLASSES)  # formats of a base that both sides can read


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on the linears of a frozen policy.

    Args:
        rank: of B A.
        alpha: the product is scaled by alpha / rank.
        target_modules: names, or ends of names, of the linears that get an adapter; default: every linear of the
            decoder layers whose site is known.
        dropout: only 0: it would be noise on the trainer's side alone.
        rollout: `adapter` holds the base once, in the recipe's weight format, and adds the low-rank product in the
            rollout; `merged` keeps the base in high precision, merges in FP32 and quantises the sum at each sync.

    Raises:
        ValueError: an argument out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] | None = None
    dropout: float = 0.0
    rollout: Literal["adapter", "merged"] = "adapter"

    def __post_init__(self) -> None:
        for name, value in {"rank": self.rank, "alpha": self.alpha}.items():
            if value <= 0:
                raise ValueError(f"model.lora.{name}={value} must be above 0")
        if self.dropout:
            raise ValueError(
                f"model.lora.dropout={self.dropout} would be noise in the trainer that the rollout does not have, and "
                "importance ratios would measure it: set it to 0"
            )
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("model.lora.target_modules is empty: name linears, or leave it out for all of them")
        if self.rollout not in ("adapter", "merged"):
            raise ValueError(f"model.lora.rollout={self.rollout!r}: expected adapter or merged")

    def check(self, recipe: QuantRecipe) -> None:
        """Refuse recipes whose base cannot be held once.

        Raises:
            ValueError: with the way out.
        """
        if self.rollout == "merged":
            return
        if recipe.weights not in _HELD_ONCE:
            raise ValueError(
                f"recipe.weights={recipe.weights} keeps no packed form that trainer and rollout could share: use "
                f"{', '.join(_HELD_ONCE)}, or model.lora.rollout=merged"
            )
        if recipe.weights != "none" and recipe.trainer == "bf16":
            raise ValueError(
                "recipe.trainer=bf16 wants a base in high precision, and model.lora.rollout=adapter holds it once, in "
                f"{recipe.weights}: use recipe.trainer=qat or qat_weights, or model.lora.rollout=merged"
            )


def import_peft() -> Any:
    """The package peft.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("model.lora needs the package peft: pip install 'trace-lightning[peft]'") from error
    return peft


def install_lora(
    model: PreTrainedModel, config: LoraConfig, recipe: QuantRecipe, *, device: torch.device | None = None
) -> LoraState:
    """Freeze a model on which `install_qat` was called, and put adapters on its linears, in place.

    Args:
        model: its linears still have their weights; the parameters become frozen.
        config: which linears, and how the rollout sees them.
        recipe: formats of the base.
        device: where the packed base is put; default: where the weights are.

    Raises:
        ValueError: a target that matches no linear of a known site, or a recipe that `LoraConfig.check` refuses.
        ImportError: peft is not installed.
    """
    config.check(recipe)
    qat: QATState = model.trace_qat  # type: ignore[assignment]
    sites = {name: group for group in (*qat.layout.groups, *qat.layout.plain) for name in group.names}
    targets = _targets(model, config, list(sites))
    peft_config, adapters = _place(model, config, targets)
    model.requires_grad_(False)
    state = LoraState(config.alpha / config.rank, config.rollout == "merged", peft_config)
    held = dict(zip(map(id, qat.layout.groups), qat.groups, strict=True))
    for site in dict.fromkeys(sites.values()):
        if state.merged and id(site) not in held and not any(name in adapters for name in site.names):
            continue
        group = held.get(id(site)) or QATGroup(site, qat.states[site.layer], None)
        linears: list[Any] = [model.get_submodule(name) for name in site.names]
        if not state.merged:
            group.base = _base(linears, group, recipe, device)
        group.members.clear()
        for name, linear in zip(site.names, linears, strict=True):
            replacement = MergedLinear if state.merged else AdapterLinear
            _replace(model, name, replacement(linear, group, adapters.get(name), state))
    qat.forget_linears()
    for parameter in adapter_parameters(model).values():
        parameter.requires_grad_(True)
    model.trace_lora = state  # type: ignore[assignment]
    return state


def _targets(model: PreTrainedModel, config: LoraConfig, names: list[str]) -> list[str]:
    """The names to hand to peft, each of which matches a linear of a known site and nothing else."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    if not leaves:
        raise ValueError(f"model.lora: {type(model).__name__} has no nn.Linear of a known site to put adapters on")
    wanted = leaves if config.target_modules is None else list(config.target_modules)
    for target in wanted:
        matched = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
        foreign = [name for name in matched if name not in names]
        if not matched or foreign:
            near = difflib.get_close_matches(target, leaves, n=2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            why = f"matches {foreign[0]}, which is no linear of a known site" if foreign else "matches no module"
            raise ValueError(
                f"model.lora.target_modules: {target!r} {why} of {type(model).__name__}; {hint}"
                f"Its linears are {', '.join(leaves)}"
            )
    return wanted


def _place(model: PreTrainedModel, config: LoraConfig, targets: list[str]) -> tuple[Any, dict[str, Any]]:
    """Let peft initialise A and B for each target; the modules it wraps are put back as they were."""
    peft = import_peft()
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path,
    )
    peft.inject_adapter_in_model(peft_config, model)
    adapters: dict[str, Any] = {}
    for name, wrapper in list(model.named_modules()):
        if isinstance(wrapper, peft.tuners.lora.LoraLayer):
            wide = torch.promote_types(wrapper.base_layer.weight.dtype, torch.float32)
            pair = (wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight)
            adapters[name] = tuple(nn.Parameter(matrix.detach().to(wide)) for matrix in pair)
            _replace(model, name, wrapper.base_layer)
    return peft_config, adapters


def _base(linears: list[nn.Linear], group: QATGroup, recipe: QuantRecipe, device: torch.device | None) -> Tensor:
    """The weights of a group as one tensor, packed if the recipe quantises them."""
    whole = torch.cat([linear.weight.detach().to(device) for linear in linears])
    packed = TENSOR_CLASSES.get(recipe.weights) if group.weights is not None else None
    return whole if packed is None else packed.from_hp(whole, four_over_six=recipe.four_over_six)


def _replace(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def frozen_tensors(policy: PreTrainedModel) -> list[Tensor]:
    """Everything of a policy with adapters that is not trained: packed bases, embeddings, norms, biases."""
    adapters = {id(parameter) for parameter in adapter_parameters(policy).values()}
    found = [parameter for parameter in policy.parameters() if id(parameter) not in adapters]
    bases = {id(m.group): m.group.base for m in policy.modules() if isinstance(m, AdapterLinear)}
    return [*found, *(base for base in bases.values() if base is not None)]


@torch.no_grad()
def base_checksum(policy: PreTrainedModel) -> int:
    """A number that tells one frozen base, or another weight of the adapters beside it, from another.

    It is the same on every device, and for equal values in any dtype.
    """
    state = lora_state(policy)
    sums: list[float] = [] if state is None else [state.scaling]
    for tensor in frozen_tensors(policy):
        if isinstance(tensor, PackedFP4Tensor):
            sums += [_byte_sum(part) for part in tensor.packed_tensors().values()]
        else:  # piece by piece: the FP32 copy of an embedding would be the largest tensor of all
            sums.append(sum(_byte_sum(part.float()) for part in tensor.detach().flatten().split(_PIECE)))
    return zlib.crc32(repr(sums).encode())


def _byte_sum(tensor: Tensor) -> int:
    return int(tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64))


def describe_base(policy: PreTrainedModel, path: str) -> dict[str, Any]:
    """What a checkpoint of adapters notes about their base at `path`: for a resume, and for an export."""
    state = lora_state(policy)
    return {
        "path": path,
        "checksum": base_checksum(policy),
        "identity": "" if state is None else state.base_identity,
    }


def check_base(policy: PreTrainedModel, path: str, stored: dict[str, Any]) -> None:
    """Refuse adapters that were trained over another base.

    Args:
        policy: what the checkpoint is for.
        path: of its base.
        stored: `describe_base` of then.

    Raises:
        ValueError: the base has changed since.
    """
    if base_checksum(policy) != stored["checksum"]:
        raise ValueError(
            f"the checkpoint's adapters were trained over {stored['path']}, and {path} holds other weights, holds them "
            "in another format or precision, or model.lora.alpha is another: resume with the model.path, model.lora, "
            "recipe and trainer.precision of its run"
        )
