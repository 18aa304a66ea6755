"""A policy cut over ranks by FSDP2, and its weights put together again for the rollout, one layer at a time.

    unit i      decoder layer i: gathered before its forward and backward, freed after them
    root unit   what is left: embedding, final norm, head (a tied head is the embedding's own parameter)

The trainer calls the body and the head of a model one by one, never the model, so that [B, T, V] logits need not exist.
FSDP2 gathers in hooks on modules, and only calling the root would fire those of the root unit: `as_forward` runs a
function as the forward of the root for the time of one call.

Masters are gathered in FP32. Gathering in BF16 would halve the traffic, but the trainer would then quantise other
numbers than the rollout did, and single weights would land on other FP4 codes.

What was left out: a second dimension (tensor parallelism, replicas of shards), and loading without a whole copy of the
model in each rank's host memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trace_lightning.models.layout import find_decoder_layers
from trace_lightning.quantization.lora import adapter_parameters, lora_state, merged_names, merged_parts


def shard_policy(policy: PreTrainedModel, mesh: DeviceMesh, *, keep_gathered: bool = False) -> None:
    """Cut every decoder layer, and the rest of the model, over the ranks of a one-dimensional mesh, in place.

    The parameters become `DTensor`s under the names they had; they move to the device of the mesh. With
    `keep_gathered` layers stay whole after a forward pass until a backward pass that frees them: `free_after_backward`.
    """
    for layer in find_decoder_layers(policy)[1]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep_gathered)
    fully_shard(policy, mesh=mesh)


def free_after_backward(policy: nn.Module, free: bool) -> None:
    """Whether the next backward passes of a sharded policy free its gathered weights. A plain policy has none."""
    if isinstance(policy, FSDPModule):
        policy.set_reshard_after_backward(free)


def is_sharded(policy: nn.Module) -> bool:
    """Whether `shard_policy` was here."""
    return isinstance(policy, FSDPModule)


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class of a model before `fully_shard` put its own in front of it."""
    return type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor; of a `DTensor`, its global value. Collective for the latter: call it on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(policy: nn.Module, max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of all gradients, also of a sharded policy; the norm of before, a plain [].

    Of a sharded one every rank looks at its own shards, and one number is summed over ranks. torch's own function takes
    each gradient through the dispatcher of `DTensor` several times, which costs more than the arithmetic.
    """
    if not is_sharded(policy):
        return torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    gradients: list[Any] = [p.grad for p in policy.parameters() if p.grad is not None]
    shards = [gradient.to_local() for gradient in gradients]
    squares = torch.nn.utils.get_total_norm(shards).square()
    torch.distributed.all_reduce(squares, group=gradients[0].device_mesh.get_group())
    norm = squares.sqrt()
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def as_forward(model: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` as the forward of `model`, inside the hooks that gather and free a sharded root.

    Args:
        model: the policy.
        function: what to call; it must take an argument at least, since FSDP2 moves the inputs of a root to its GPU and
            fails where there are none.
        args: its arguments.

    Returns:
        What `function` returns. Of a sharded model it must be tensors in tuples, lists or dicts, or FSDP2 would find no
        tensor to start the backward pass from.
    """
    assert args, "a root of FSDP2 needs an input"
    if not is_sharded(model):
        return function(*args)
    model.forward = function
    try:
        return model(*args)
    finally:
        del model.forward  # the class's own is found again


class Weights(Iterable[tuple[str, Tensor]]):
    """The weights of a policy under their Hugging Face names, in parts that are there one at a time.

    A plain policy is one part. Of a sharded one each layer is a part, gathered by one collective, and so is each of the
    other parameters. A part is freed when the iterator goes on, so a consumer must have copied it before it asks for
    the next. Iterating is then a collective: every rank has to do it, to the end.

    Of a policy with adapters these are all its weights with the adapters merged, each layer a part; or, where rollout
    and trainer share the base, the adapters alone.

    Attributes:
        names: of all tensors.
        temporary: whether the tensors are made for this purpose, at other addresses each time.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy, self.is_sharded = policy, is_sharded(policy)
        lora = lora_state(policy)
        self._merged = lora is not None and lora.merged
        self._own = dict(policy.named_parameters()) if lora is None else adapter_parameters(policy)
        self.names = merged_names(policy) if self._merged else list(self._own)
        self.temporary = self.is_sharded or self._merged

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Detached tensors by name, part by part."""
        if self._merged:
            yield from merged_parts(self.policy)
            return
        if not self.is_sharded:
            yield {name: parameter.detach() for name, parameter in self._own.items()}
            return
        seen: set[str] = set()
        prefix, layers = find_decoder_layers(self.policy)
        for index, layer in enumerate(layers):
            names = {f"{prefix}.{index}.{name}" for name, _ in layer.named_parameters()}
            seen |= names
            yield from self._gathered(layer, names)
        assert isinstance(self.policy, FSDPModule)
        self.policy.reshard()  # after a forward without a backward the root still holds the weights of that time
        for name in self.names:
            if name not in seen:
                yield {name: whole(self.policy.get_parameter(name).detach())}

    def _gathered(self, layer: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
        assert isinstance(layer, FSDPModule)
        layer.unshard()
        try:
            yield {name: self.policy.get_parameter(name).detach() for name in sorted(names)}
        finally:
            layer.reshard()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts():
            yield from part.items()


def parts_of(weights: Iterable[tuple[str, Tensor]]) -> tuple[set[str], Iterator[dict[str, Tensor]]]:
    """All names, and the parts; pairs that are no `Weights` are one part."""
    if isinstance(weights, Weights):
        return set(weights.names), weights.parts()
    tensors = {name: tensor.detach() for name, tensor in weights}
    return set(tensors), iter([tensors])


def plain_twin(policy: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model of the same structure that is not sharded, with weights of its own (none on the meta device)."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        twin: PreTrainedModel = original_class(policy)(copy.deepcopy(policy.config))  # type: ignore[assignment]
    twin.generation_config = copy.deepcopy(policy.generation_config)
    return twin.to(next(policy.parameters()).dtype)  # type: ignore[arg-type]


@torch.no_grad()
def whole_copy(policy: PreTrainedModel, *, keep: bool) -> PreTrainedModel:
    """A sharded policy as a plain model in host memory, for `save_pretrained`. Collective.

    Args:
        policy: sharded.
        keep: whether this rank wants the weights; the others only take part, and get a model without any.
    """
    state: dict[str, Tensor] = {}
    for part in Weights(policy).parts():
        if keep:
            state |= {name: tensor.cpu().clone() for name, tensor in part.items()}
    twin = plain_twin(policy, torch.device("meta"))
    twin.load_state_dict(state, strict=False, assign=True)
    twin.tie_weights()
    return twin
