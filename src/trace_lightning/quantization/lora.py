"""Linears with LoRA adapters: how they multiply, in the trainer and wherever else a policy's own modules run.

    AdapterLinear   y = W_q x_q + s B (A x_q)     the base is held once, packed, and never merged
    MergedLinear    y = Q(W + s B A) x_q          merged in FP32 and rounded once, as full fine-tuning does

x_q is the site's rounded input. The low-rank branch reads it too, not x: it is the one tensor that both sides hold, so
guidance that makes the base's products agree makes the adapter's agree as well.

The base of an `AdapterLinear` belongs to its fused group (q, k, v are one tensor under one outer scale) and is no
parameter: the rollout's decoder reads the very same tensor. Its values are made when they are needed, in the forward
pass and again in the backward pass, so that autograd keeps 4.5 bits per weight and never 16.

What was left out: dropout on the adapters (noise on one side), and merging into the packed base: Q(Q(W) + Δ) would
round an update away that Q(W) + Δ holds, and drift with every merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_lightning.models.layout import find_decoder_layers
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.quantization.qat import QATGroup, QATLinear, matmul_dtype

ADAPTER_NAMES = ("lora_A", "lora_B")


class LoraState:
    """What all adapters of a policy share; found again as `policy.trace_lora`.

    Args:
        scaling: factor of the low-rank product, alpha / rank.
        merged: whether adapters are merged before the rollout's quantiser (`MergedLinear`), or applied beside the base.
        peft_config: of the package peft, what `adapter_config.json` says.
    """

    def __init__(self, scaling: float, merged: bool, peft_config: Any) -> None:
        self.scaling, self.merged, self.peft_config = scaling, merged, peft_config
        self.base_identity = ""  # of the files that the base was read from, see models/identity.py
        self.enabled = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Block in which the policy is its base alone: the reference of a KL term."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


def lora_state(policy: nn.Module) -> LoraState | None:
    """The adapters of a policy, or None if it is trained in full."""
    return getattr(policy, "trace_lora", None)


def base_values(base: Tensor, dtype: torch.dtype) -> Tensor:
    """A frozen base, packed or not, as plain values in `dtype`."""
    return base.values(dtype) if isinstance(base, PackedFP4Tensor) else base.to(dtype)


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, scaled_b: Tensor) -> Tensor:
    """`y + s B (A x)` in the dtype of `y`: the one order of casts that trainer and decoder share.

    Args:
        y: [M, N], rounded to the compute dtype already.
        x: [M, K].
        a: [R, K].
        scaled_b: s B [N, R]; B times the scaling, rounded once.
    """
    hidden = F.linear(x.to(y.dtype), a.to(y.dtype))
    return torch.addmm(y, hidden, scaled_b.to(y.dtype).T)


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """`W + scaling B A` in FP32 (or wider), whatever autocast says."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scaling)


class _FrozenLinear(torch.autograd.Function):
    """`x W^T + bias` for a frozen W, which is made by `weight(dtype)` in both passes and kept in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[torch.dtype], Tensor], bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad @ ctx.weight(grad.dtype), None, None


class _Merge(torch.autograd.Function):
    """`merge` that keeps nothing but A and B for the backward pass."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scaling = scaling
        return merge(weight, a, b, scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype) * ctx.scaling
        return b.T @ grad, grad @ a.T, None, None


class AdapterLinear(QATLinear):
    """Rows of its group's frozen base, and an adapter beside them if it is a target. It has no weight of its own."""

    def __init__(
        self, original: nn.Linear, group: QATGroup, adapter: tuple[nn.Parameter, nn.Parameter] | None, state: LoraState
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.bias = original.bias
        first = sum(member.out_features for member in group.members)
        self.rows = slice(first, first + self.out_features)
        self.lora_A: nn.Parameter | None
        self.lora_B: nn.Parameter | None
        self.lora_A, self.lora_B = adapter or (None, None)
        self.group, self.state = group, state
        group.members.append(self)

    def base_values(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight [N, K] in `dtype`."""
        assert self.group.base is not None
        return base_values(self.group.base[self.rows], dtype)

    def merged(self) -> Tensor:
        """The frozen weight with the adapter added, FP32 [N, K]: for K/V bounds and export, never to multiply with."""
        assert self.group.base is not None
        weight = self.base_values(torch.promote_types(self.group.base.dtype, torch.float32))
        if self.lora_A is None or self.lora_B is None or not self.state.enabled:
            return weight
        return merge(weight, self.lora_A, self.lora_B, self.state.scaling)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group.round_input(x)
        x = x.to(matmul_dtype(x))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = _FrozenLinear.apply(x, self.base_values, bias)
        if self.lora_A is None or self.lora_B is None or not self.state.enabled:
            return y
        scaled = self.lora_B * self.state.scaling
        return add_low_rank(y.flatten(0, -2), x.flatten(0, -2), self.lora_A, scaled).view(y.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdapterLinear:
        """Follow `.to(device)`: the base is moved once, by the first of its group."""
        super()._apply(fn, recurse)
        if self is self.group.members[0] and self.group.base is not None:
            self.group.base = fn(self.group.base)
        return self


class MergedLinear(QATLinear):
    """A frozen weight in high precision; the group's quantiser sees it with the adapter merged into it."""

    def __init__(
        self, original: nn.Linear, group: QATGroup, adapter: tuple[nn.Parameter, nn.Parameter] | None, state: LoraState
    ) -> None:
        super().__init__(original, group)
        self.lora_A: nn.Parameter | None
        self.lora_B: nn.Parameter | None
        self.lora_A, self.lora_B = adapter or (None, None)
        self.state = state

    def merged(self) -> Tensor:
        if self.lora_A is None or self.lora_B is None or not self.state.enabled:
            return self.weight
        merged: Tensor = _Merge.apply(self.lora_A, self.lora_B, self.weight, self.state.scaling)
        return merged

    def forward(self, x: Tensor) -> Tensor:
        x = self.group.round_input(x)  # maybe narrower than the weight
        return F.linear(x, self.group.round_weight(self).to(matmul_dtype(x)), self.bias)


def adapter_parameters(policy: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of all adapters by name."""
    return {name: p for name, p in policy.named_parameters() if name.rpartition(".")[2] in ADAPTER_NAMES}


@torch.no_grad()
def merged_parts(policy: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """The weights of a policy with its adapters merged, under their Hugging Face names.

    Each decoder layer is a part, and so is each of the other tensors. Merged weights are FP32, the others have the
    dtype they are held in.
    """
    prefix, layers = find_decoder_layers(policy)
    for index, layer in enumerate(layers):
        yield _merged_of(layer, f"{prefix}.{index}.")
    for name, p in policy.named_parameters():
        if not name.startswith(f"{prefix}.") and name.rpartition(".")[2] not in ADAPTER_NAMES:
            yield {name: p.detach()}


def _merged_of(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    found = {
        f"{prefix}{name}": p.detach()
        for name, p in layer.named_parameters()
        if name.rpartition(".")[2] not in ADAPTER_NAMES
    }
    for name, module in layer.named_modules():
        if isinstance(module, AdapterLinear | MergedLinear):
            found[f"{prefix}{name}.weight"] = module.merged()
    return found


def merged_names(policy: PreTrainedModel) -> list[str]:
    """The names that `merged_parts` yields, without merging anything."""
    names = [name for name, _ in policy.named_parameters() if name.rpartition(".")[2] not in ADAPTER_NAMES]
    return names + [f"{name}.weight" for name, module in policy.named_modules() if isinstance(module, AdapterLinear)]


def merged_state(policy: PreTrainedModel) -> dict[str, Tensor]:
    """FP32 weights with the adapters merged, under Hugging Face names: what a plain model would be exported from."""
    return {name: tensor.float() for part in merged_parts(policy) for name, tensor in part.items()}
