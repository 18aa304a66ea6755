"""Conversations with environments: how many turns they take, how many are cut, and what waiting costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from trace_lightning.types import Completion


class TurnMetrics(Metric):
    """Turns of the policy per conversation; completions without turns are not counted."""

    full_state_update = False
    num_conversations: Tensor
    num_turns: Tensor
    num_truncated: Tensor
    observed: Tensor
    most_turns: Tensor
    env_steps: Tensor
    env_seconds: Tensor
    wait_seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        for state in ("num_conversations", "num_turns", "num_truncated", "observed"):
            self.add_state(state, torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("most_turns", torch.tensor(0), dist_reduce_fx="max")
        self.add_state("env_steps", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("env_seconds", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("wait_seconds", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, completions: Sequence[Completion], stats: Mapping[str, float]) -> None:
        """Add one rollout, and what its engine counted (`env_steps`, `env_seconds`, `env_wait_seconds`)."""
        held = [completion for completion in completions if completion.turns]
        turns = [sum(turn.source == "policy" for turn in completion.turns) for completion in held]
        self.num_conversations += len(held)
        self.num_turns += sum(turns)
        self.num_truncated += sum(completion.finish_reason == "length" for completion in held)
        self.observed += sum(len(completion.token_ids) - completion.num_drawn for completion in held)
        self.most_turns = self.most_turns.clamp(min=max(turns, default=0))
        self.env_steps += stats.get("env_steps", 0.0)
        self.env_seconds += stats.get("env_seconds", 0.0)
        self.wait_seconds += stats.get("env_wait_seconds", 0.0)

    def compute(self) -> dict[str, Tensor]:
        """Nothing if there was no conversation.

        * `turns/mean`, `turns/max`: turns of the policy
        * `turns/truncated`: share of conversations that a limit ended: of a turn, of tokens, or of turns
        * `turns/observation_tokens`: tokens per conversation that the environment said
        * `turns/env_seconds`: mean time that an environment takes to answer
        * `turns/wait_seconds`: time per rollout in which every sequence waited for an environment
        """
        if not self.num_conversations:
            return {}
        result = {
            "turns/mean": self.num_turns / self.num_conversations,
            "turns/max": self.most_turns.float(),
            "turns/truncated": self.num_truncated / self.num_conversations,
            "turns/observation_tokens": self.observed / self.num_conversations,
            "turns/wait_seconds": self.wait_seconds,
        }
        if self.env_steps:
            result["turns/env_seconds"] = self.env_seconds / self.env_steps
        return result
