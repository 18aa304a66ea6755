"""A sync through stages is a sync: the same bytes, also when a graph only knows where the first one lay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import pytest
import torch
from torch import Tensor

import tiny
from lora import make_adapted
from ranks.worker import W4A4KV4, decoder_tensors
from trace_lightning.models.sharding import Weights
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.fused_decoder import FusedDecoder
from trace_lightning.rollout.staged_sync import StagedSync


class Replays:
    """Stands in for graphs: whatever the first step under a key read and wrote is read and written again."""

    def __init__(self) -> None:
        self.first: dict[Hashable, Callable[[], None]] = {}

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        self.first.setdefault(key, step)()

    def clear(self) -> None:
        self.first.clear()


class Elsewhere(Weights):
    """Layer by layer, in new memory each time, as of a sharded policy."""

    def parts(self) -> Iterator[dict[str, Tensor]]:
        (whole,) = super().parts()
        layers = [{n: t for n, t in whole.items() if f"layers.{i}." in n} for i in range(2)]
        rest = [{n: t} for n, t in whole.items() if "layers." not in n]
        for part in layers + rest:
            copies = {name: tensor.clone() for name, tensor in part.items()}
            yield copies
            for copy in copies.values():
                copy.fill_(float("nan"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_bytes_of_a_plain_sync(family: str) -> None:
    policy = tiny.make_policy(family, QuantRecipe(**W4A4KV4))
    plain, staged = (FusedDecoder(policy, QuantRecipe(**W4A4KV4), torch.float32) for _ in range(2))
    sync = StagedSync()
    sync.graphs = Replays()
    for _ in range(3):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        plain.load_weights(Weights(policy))
        sync.load_weights(staged, Elsewhere(policy))
        expected, found = decoder_tensors(plain), decoder_tensors(staged)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    assert len(sync._stages) == 1, "both layers pass through one stage"
    sync.clear()
    assert not sync._stages


def test_a_foreign_snapshot_is_refused_before_anything_is_copied() -> None:
    policy = tiny.make_policy("llama", QuantRecipe(**W4A4KV4))
    sync = StagedSync()
    with pytest.raises(ValueError, match="missing from the snapshot"):
        sync.load_weights(FusedDecoder(policy, QuantRecipe(**W4A4KV4), torch.float32), [("a", torch.ones(1))])
    assert not sync._stages


def test_of_merged_adapters_the_layers_alone_are_staged() -> None:
    """No second embedding and head in memory."""
    recipe = QuantRecipe(**W4A4KV4)
    policy = make_adapted(recipe, "merged")
    plain, staged = (FusedDecoder(policy, recipe, torch.float32) for _ in range(2))
    sync = StagedSync()
    sync.graphs = Replays()
    plain.load_weights(Weights(policy))
    sync.load_weights(staged, Weights(policy))
    for name, value in decoder_tensors(plain).items():
        assert torch.equal(decoder_tensors(staged)[name], value), name
    ((stage,), layer) = sync._stages.values(), policy.model.layers[0]
    names = [name for name, _ in layer.named_parameters() if not name.endswith(("lora_A", "lora_B"))]
    assert len(stage) == len(names)
