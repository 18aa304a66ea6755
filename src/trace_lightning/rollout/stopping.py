"""Where completions end besides their limit of tokens: at ids that stop them, and at the end of the model's context.

Both are known before a call begins, and what cannot be is refused then, before anything is drawn. A stop string becomes
the ids of the tokens whose text contains it, so a decode step compares ids on the device and never reads text. Left out
for that: strings that span tokens.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.models.policy import eos_token_ids
from trace_lightning.types import Prompt, SamplingParams


class Stopping:
    """What ends completions of one model; `vocab_size` is the number of ids that it can draw."""

    def __init__(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        embedding: Any = policy.get_input_embeddings()
        self.vocab_size, self.eos = int(embedding.weight.shape[0]), eos_token_ids(policy, tokenizer)
        self._policy, self._tokenizer = policy, tokenizer
        self._ids_of: dict[str, set[int]] = {}  # stop strings

    def ids(self, params: SamplingParams) -> set[int]:
        """The ids after which a completion ends.

        Raises:
            ValueError: an id that the model does not have, or a string that no token contains.
        """
        foreign = [i for i in params.stop_token_ids if not 0 <= i < self.vocab_size]
        if foreign:
            raise ValueError(
                f"sampling.stop_token_ids has {foreign}, but this model's ids are 0 to {self.vocab_size - 1}"
            )
        ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos)
        for text in params.stop:
            if text not in self._ids_of:
                # Decoded one by one: a token's raw form hides spaces and newlines in many tokenizers.
                pieces = self._tokenizer.batch_decode([[i] for i in range(len(self._tokenizer))])
                self._ids_of[text] = {i for i, piece in enumerate(pieces) if text in piece}
            if not self._ids_of[text]:
                raise ValueError(f"sampling.stop has {text!r}, which no token of this tokenizer contains")
            ids |= self._ids_of[text]
        return {i for i in ids if i < self.vocab_size}  # tokenizers may know more tokens than the model

    def context_limit(self, prompts: list[Prompt], params: SamplingParams) -> int | None:
        """The number of positions the model has, if completions may be cut there; else None.

        Learned positions would fail beyond it, and rotary ones would be angles that were never trained.

        Raises:
            ValueError: if a completion could pass the limit and `params` do not say to cut it, or a prompt fills it.
        """
        limit: int | None = getattr(self._policy.config, "max_position_embeddings", None)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if limit is None or longest + params.max_new_tokens <= limit:
            return None
        if params.beyond_context == "error" or longest >= limit:
            raise ValueError(
                f"a prompt of {longest} and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{type(self._policy).__name__}, {limit} tokens. Lower sampling.max_new_tokens (in conversations "
                "rollout.turns.max_total_tokens), limit the prompts, or let completions end there "
                "(sampling.beyond_context=cut)."
            )
        return limit
