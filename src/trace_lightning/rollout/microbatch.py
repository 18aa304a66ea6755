"""From a finished rollout to what the policy scores: padded tensors, and micro-batches under a token budget.

Sequences are cut into micro-batches by length, so that little is padding, and the cut never changes the update: every
loss divides by counts of the whole optimizer step. Ranks must enter the same number of collectives, so a rank with
fewer micro-batches than the others adds empty ones (`pad_plan`).

    B sequences   T tokens, right-padded   entry [b, t] belongs to token t
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.quantization.guidance import GuidanceRecord, GuidanceRows
from trace_lightning.types import Completion, RolloutBatch


@dataclass(kw_only=True)
class MicroBatch:
    """A few sequences of a rollout, on the device. Shapes as in `RolloutBatch`."""

    token_ids_BT: Tensor
    mask_BT: Tensor
    rollout_logprobs_BT: Tensor
    advantages_B: Tensor
    support_NK: Tensor | None  # one row per masked token, in row-major order
    topk_ids_NK: Tensor | None  # the rollout's most likely tokens, rows as those of `support_NK`; None if not recorded
    topk_logprobs_NK: Tensor | None
    guidance: GuidanceRows | None
    indices: list[int]

    def unguided(self) -> MicroBatch:
        """The same tokens for a model that does not round, or not by this record."""
        return dataclasses.replace(self, guidance=None)


def collate_rollout(batch: RolloutBatch, completions: list[Completion], pad_token_id: int) -> None:
    """Fill the token tensors of `batch` in place (on the CPU). The mask is that of the policy's own tokens.

    Raises:
        ValueError: if a completion has not one log-prob per token; its ids were probably re-encoded on the way.
    """
    batch.completions = completions
    rows = [(prompt.token_ids, completion) for prompt, completion in batch.sequences()]
    longest = max((len(prompt) + len(completion.token_ids) for prompt, completion in rows), default=0)
    batch.token_ids_BT = torch.full((len(rows), longest), pad_token_id)
    batch.completion_mask_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    batch.rollout_logprobs_BT = torch.zeros(len(rows), longest)
    for b, (prompt, completion) in enumerate(rows):
        if len(completion.token_ids) != len(completion.logprobs):
            raise ValueError(
                f"completion {b} has {len(completion.token_ids)} token ids but {len(completion.logprobs)} log-probs; "
                "token ids are the truth and must not be decoded and encoded again"
            )
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        batch.token_ids_BT[b, :end] = torch.tensor([*prompt, *completion.token_ids])
        for turn in completion.drawn:
            batch.completion_mask_BT[b, start + turn.start : start + turn.stop] = True
        batch.rollout_logprobs_BT[b, start:end] = torch.tensor(completion.logprobs)


def plan_microbatches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `max_tokens` padded tokens (one sequence at least).

    Args:
        lengths: tokens of each sequence.
        max_tokens: budget of rows x longest row.

    Returns:
        Lists of sequence indices, longest first, so that memory peaks in the first micro-batch.
    """
    plan: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def pad_plan(plan: list[list[int]], count: int) -> list[list[int]]:
    """The plan with empty micro-batches up to `count`."""
    return plan + [[] for _ in range(count - len(plan))]


def take(batch: RolloutBatch, indices: list[int], device: torch.device) -> MicroBatch:
    """The micro-batch of `indices`, trimmed to its longest sequence; an empty one is a single masked-out token pair."""
    assert batch.token_ids_BT is not None
    assert batch.completion_mask_BT is not None
    assert batch.rollout_logprobs_BT is not None
    assert batch.advantages_B is not None
    rows = torch.tensor(indices or [0])
    sequences = list(batch.sequences())
    length = max((len(sequences[i][0].token_ids) + len(sequences[i][1].token_ids) for i in indices), default=2)
    mask = batch.completion_mask_BT[rows, :length] if indices else torch.zeros(1, length, dtype=torch.bool)
    picked = [sequences[i][1] for i in indices]
    # A sequence is learned from as a whole or not at all (not scored, or truncated), so its row decides.
    learned = [completion for completion, row in zip(picked, mask, strict=False) if row.any()]
    return MicroBatch(
        token_ids_BT=batch.token_ids_BT[rows, :length].to(device),
        mask_BT=mask.to(device),
        rollout_logprobs_BT=batch.rollout_logprobs_BT[rows, :length].to(device),
        advantages_B=batch.advantages_B[rows].to(device),
        support_NK=_joined(batch.completions, learned, "support_ids", device),
        topk_ids_NK=_joined(batch.completions, learned, "topk_ids", device),
        topk_logprobs_NK=_joined(batch.completions, learned, "topk_logprobs", device),
        guidance=_guidance(batch.guidance, picked, length - 1, device),
        indices=indices,
    )


def _joined(completions: list[Completion], learned: list[Completion], name: str, device: torch.device) -> Tensor | None:
    """One row per token that is learned from; no rows, not None, where a micro-batch has none of what was recorded."""
    recorded: Tensor | None = getattr(completions[0], name)
    if recorded is None:
        return None
    parts = [getattr(completion, name)[turn.start : turn.stop] for completion in learned for turn in completion.drawn]
    return torch.cat([recorded[:0], *parts]).to(device)


def _guidance(
    record: GuidanceRecord | None, completions: list[Completion], length: int, device: torch.device
) -> GuidanceRows | None:
    """Rows of the tokens that are fed: all but each sequence's last."""
    if record is None or not completions:
        return None
    rows_BT = torch.full((len(completions), length), -1)
    for b, completion in enumerate(completions):
        assert completion.guidance_rows is not None, "a record without rows: the engine recorded nothing"
        rows_BT[b, : len(completion.guidance_rows)] = completion.guidance_rows
    return GuidanceRows.from_rows(record, rows_BT, device)
