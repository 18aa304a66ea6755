"""What a decoder is: one forward pass over a snapshot of the weights. The contract of both kinds.

`FusedDecoder` (fused_decoder.py) is the fast one, for the families whose layers it knows. `HFDecoder` (hf_decoder.py)
serves every other architecture through transformers' own modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_kernels import BlockFormat
from trace_lightning.models.sharding import parts_of
from trace_lightning.quantization.lora import ADAPTER_NAMES
from trace_lightning.rollout.batch import ForwardBatch
from trace_lightning.rollout.kv_pool import PagedKV


class Decoder(ABC):
    """A snapshot of the policy that can run `ForwardBatch`es against a `PagedKV`."""

    model: PreTrainedModel
    kv_formats: list[BlockFormat | None]
    num_kv_heads: int
    head_dim: int

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, quantize: bool = True) -> None:
        """Take over weights under their Hugging Face names, in place; `quantize=False` keeps them as they are.

        Raises:
            ValueError: as `checked_parts`.
        """
        for tensors in self.checked_parts(weights):
            self.load_part(tensors, quantize=quantize)

    def checked_parts(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """What `load_part` takes, part by part; the `Weights` of a sharded policy have no more than one in full.

        Raises:
            ValueError: if a weight that the decoder needs is missing, or one is unknown; before the first part.
        """
        names, parts = parts_of(weights)
        check_names(names, self.needed_names(), self.model)
        return parts

    @abstractmethod
    def needed_names(self) -> set[str]:
        """Names of all weights that the decoder reads."""

    @abstractmethod
    def load_part(self, tensors: dict[str, Tensor], *, quantize: bool) -> None:
        """Copy some of the weights, whole layers of them; the tensors may be gone after this call."""

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
        """Logits [n, V] in the dtype in which the head computes; whoever uses them widens them."""

    @property
    def is_stale(self) -> bool:
        """Whether what is shared with the policy has moved to another device since, so that two copies are held."""
        return False

    def prepare(self, max_len: int) -> bool:
        """Make ready for contexts of `max_len`; whether a decode step can then run without looking at its data.

        Only such steps can be captured as CUDA graphs.
        """
        return False

    def find_crossover(self) -> str:
        """Choose, by timing them, between several copies of the weights; what was chosen, in words, or nothing."""
        return ""


def check_names(given: set[str], needed: set[str], model: PreTrainedModel) -> None:
    """Refuse an incomplete or foreign snapshot before any of it is copied: half a sync would be a policy of its own."""
    missing = needed - given
    if missing:
        raise ValueError(f"weights are missing from the snapshot: {sorted(missing)[:5]} ({len(missing)} in all)")
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    known -= {name for name in known if name.rpartition(".")[2] in ADAPTER_NAMES}  # a forgotten merge would not show
    unknown = given - needed - known
    if unknown:
        raise ValueError(
            f"the snapshot has weights that {type(model).__name__} does not know: {sorted(unknown)[:5]} "
            f"({len(unknown)} in all). Pass them under their Hugging Face names."
        )
