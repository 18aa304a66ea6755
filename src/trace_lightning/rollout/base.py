"""What a rollout engine is: it holds a snapshot of the policy and draws completions from it.

The contract, in prose. `setup` is called once, with the live policy, to learn its structure. `load_weights` copies a
snapshot under Hugging Face names and quantises it; the version travels on every completion drawn from it. `generate`
draws `num_samples` completions per prompt and never touches the policy's own tensors, so an optimizer step between two
calls changes nothing until the next `load_weights`. With `rollout.max_version_diff=1` it runs in a thread of its own,
on a GPU on a stream of its own, while the trainer works; it has to call `progress` often, for there it is stopped. The
engine belongs to the callback, never to the LightningModule: `state_dict` and the optimizer do not see it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.quantization.guidance import GuidanceRecord
from trace_lightning.recipe import QuantRecipe
from trace_lightning.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from trace_lightning.rollout.conversation import Conversations

Progress = Callable[[int, int], None]  # (finished sequences, all sequences)


@dataclass(kw_only=True)
class Generation:
    """What `generate` returns: completions prompt by prompt, the guidance record, and counts for the metrics."""

    completions: list[Completion]
    guidance: GuidanceRecord | None = None
    stats: dict[str, float] = field(default_factory=dict)


class RolloutEngine(ABC):
    """Draws completions from a snapshot of the policy. See the contract at the top of this file.

    Attributes:
        takes_turns: whether `generate` knows `conversations`; others are never given it, and refused for tasks that
            have environments.
    """

    takes_turns: bool = False

    def check(  # noqa: B027  need not be overridden
        self, structure: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: QuantRecipe
    ) -> None:
        """Refuse what `setup` would refuse, before a weight is loaded, and leave this engine as it is.

        Args:
            structure: the policy on the meta device.
            tokenizer: as for `setup`.
            recipe: as for `setup`.

        Raises:
            ValueError: model and recipe do not fit this engine. One that has no such check refuses in `setup`.
        """

    @abstractmethod
    def setup(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        recipe: QuantRecipe,
        *,
        dtype: torch.dtype,
    ) -> None:
        """Learn the structure of `policy` and prepare for `recipe`; weights come with `load_weights`.

        Args:
            policy: the live model, on the device on which to generate.
            tokenizer: for stop strings and special ids.
            recipe: number formats and guidance.
            dtype: of the engine's arithmetic (the trainer's autocast dtype).
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy and quantise a complete set of weights under Hugging Face names, in place.

        Raises:
            ValueError: if a weight is missing or unknown; the version then stays what it was.
        """

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        num_samples: int = 1,
        record_guidance: bool = False,
        progress: Progress | None = None,
        conversations: Conversations | None = None,
    ) -> Generation:
        """Draw `num_samples` completions for each prompt; sample j of prompt i is completion `i * num_samples + j`.

        Args:
            prompts: what to complete.
            params: how; `max_new_tokens` bounds each turn.
            num_samples: per prompt.
            record_guidance: whether the rounding is recorded.
            progress: called between steps.
            conversations: of a task with environments: completions are then conversations with them.
        """

    def widen_guidance(self) -> bool:
        """Record every site that can be guided from the next `generate` on; whether that is more than before."""
        return False

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version given to the last successful `load_weights`, -1 before it."""
