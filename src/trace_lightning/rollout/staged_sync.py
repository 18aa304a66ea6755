"""A weight sync by graphs although the weights lie elsewhere each time: every layer is copied to one place first.

To quantise a layer takes some forty launches, which for all layers is a hundred milliseconds of Python. A graph spares
them, but reads where it was captured; and the layers of a sharded policy, or merged ones, are made for one sync.

    gathered layer i  -- one copy -->  stage  -- graph i -->  snapshot of layer i

Layers of one shape share a stage, so what is held in addition is one layer in the masters' dtype. Parts of a single
tensor (embedding, head, final norm) are taken over without one: few launches, and much memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.graphs import GraphCache


class StagedSync:
    """Stages and graphs of one decoder's sync; `clear` it when the decoder is made anew."""

    def __init__(self) -> None:
        self.graphs = GraphCache()
        self.clear()

    def clear(self) -> None:
        """Forget all graphs, and the memory of the stages."""
        self.graphs.clear()
        self._stages: dict[Hashable, list[Tensor]] = {}

    def load_weights(self, decoder: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
        """`Decoder.load_weights`."""
        for tensors in decoder.checked_parts(weights):
            if len(tensors) == 1:
                decoder.load_part(tensors, quantize=True)
            else:
                self._load_layer(decoder, tensors)

    def _load_layer(self, decoder: Decoder, tensors: dict[str, Tensor]) -> None:
        names = sorted(tensors)
        sources = [tensors[name] for name in names]
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in sources)
        if shapes not in self._stages:
            self._stages[shapes] = [torch.empty_like(tensor) for tensor in sources]
        stage = self._stages[shapes]
        torch._foreach_copy_(stage, sources)
        staged = dict(zip(names, stage, strict=True))
        self.graphs.run((tuple(names), shapes), lambda: decoder.load_part(staged, quantize=True))
