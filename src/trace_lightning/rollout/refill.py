"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal teach nothing, so draw others for them.

    draw P groups -> keep those with unequal rewards -> too few? draw groups of other prompts, `max_refills` times

Other prompts come from the whole training set, at random by (seed, refill), not from the loader: its position stays a
matter of steps alone, and a resumed run sees what the unbroken one would have seen. If prompts still miss after the
last refill, groups of equal rewards fill the batch, as they would without dynamic sampling: its size, and with it what
an optimizer step costs on every rank, never depends on luck. Ranks refill by themselves; nothing is agreed on.

A policy that solves (or fails) nearly everything would draw for ever, which is why refills are bounded; their number
and what was thrown away are logged. What was left out: keeping surplus groups for the next rollout, where their policy
would be stale.

    P prompts of the batch    G answers per prompt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from trace_lightning.quantization.guidance import GuidanceRecord
from trace_lightning.quantization.record_join import join_records
from trace_lightning.rl.advantages import zero_variance_groups
from trace_lightning.rollout.microbatch import collate_rollout
from trace_lightning.types import Completion, Prompt, RolloutBatch

Columns = dict[tuple[str, str], list[Any]]  # (field of the batch, name) -> one value per completion


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Refill groups of equal rewards.

    Args:
        max_refills: draws after the first. Each has as many prompts as should fill the batch at the share of groups
            kept so far, at most as many as the batch has.
    """

    max_refills: int = 3

    def __post_init__(self) -> None:
        if self.max_refills < 1:
            raise ValueError(
                f"rollout.dynamic_sampling.max_refills={self.max_refills} must be at least 1; null switches dynamic "
                "sampling off"
            )

    def refill(
        self,
        batch: RolloutBatch,
        draw: Callable[[RolloutBatch], None],
        pool: Sequence[Prompt],
        *,
        seed: int,
        pad_token_id: int,
    ) -> None:
        """Replace groups of equal rewards in a drawn and scored batch, in place.

        Args:
            batch: drawn and scored.
            draw: draws and scores a batch that has prompts only, from the same policy.
            pool: training prompts; those of the batch are not drawn again.
            seed: of the choice of prompts.
            pad_token_id: for padding.
        """
        wanted, collected = len(batch.prompts), _Collected(batch.guidance)
        collected.add(batch, 0)
        refills = 0
        while len(collected.mixed) < wanted and refills < self.max_refills:
            prompts = _others(pool, collected.uids, collected.ask(wanted), seed * 1009 + refills)
            if not prompts:
                break
            refills += 1
            extra = RolloutBatch(prompts=prompts)
            draw(extra)
            collected.records.append(extra.guidance)
            collected.add(extra, refills)
            batch.stats = _sum(batch.stats, extra.stats)
            batch.seconds = _sum(batch.seconds, extra.seconds)
        if refills:
            collected.assemble(batch, wanted, pad_token_id)
        batch.stats |= collected.stats(wanted, refills)


@dataclass
class _Group:
    """One prompt's answers; `part` is the draw they come from."""

    prompt: Prompt
    completions: list[Completion]
    rewards_G: Tensor
    columns: Columns
    part: int


@dataclass
class _Collected:
    """Groups of all draws so far."""

    first_record: GuidanceRecord | None
    mixed: list[_Group] = field(default_factory=list)
    flat: list[_Group] = field(default_factory=list)
    uids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.records: list[GuidanceRecord | None] = [self.first_record]

    def add(self, batch: RolloutBatch, part: int) -> None:
        assert batch.rewards_B is not None
        size = batch.num_generations
        equal_P = zero_variance_groups(batch.rewards_B.view(-1, size)).tolist()
        for p, (prompt, equal) in enumerate(zip(batch.prompts, equal_P, strict=True)):
            span = slice(p * size, (p + 1) * size)
            columns = {key: values[span] for key, values in _columns(batch).items()}
            group = _Group(prompt, batch.completions[span], batch.rewards_B[span], columns, part)
            (self.flat if equal else self.mixed).append(group)
            self.uids.add(prompt.uid)

    def ask(self, wanted: int) -> int:
        """How many prompts should bring what is missing, at the share of groups kept so far."""
        kept, drawn = max(len(self.mixed), 1), len(self.mixed) + len(self.flat)
        return min(wanted, math.ceil((wanted - len(self.mixed)) * drawn / kept))

    def chosen(self, wanted: int) -> list[_Group]:
        return (self.mixed + self.flat)[:wanted]

    def assemble(self, batch: RolloutBatch, wanted: int, pad_token_id: int) -> None:
        groups = sorted(self.chosen(wanted), key=lambda group: group.part)
        batch.prompts = [group.prompt for group in groups]
        batch.rewards_B = torch.cat([group.rewards_G for group in groups])
        for field_name, name in groups[0].columns:
            values = [value for group in groups for value in group.columns[field_name, name]]
            getattr(batch, field_name)[name] = values
        parts = []
        for part, record in enumerate(self.records):
            members = [completion for group in groups if group.part == part for completion in group.completions]
            if record is not None and members:
                parts.append((record, members))
        batch.guidance = join_records(parts) if parts else None
        collate_rollout(batch, [completion for group in groups for completion in group.completions], pad_token_id)

    def stats(self, wanted: int, refills: int) -> dict[str, float]:
        everything, chosen = self.mixed + self.flat, self.chosen(wanted)
        rewards = torch.cat([group.rewards_G for group in everything])
        left = {id(group) for group in chosen}
        dropped = [group for group in everything if id(group) not in left]
        stats = {
            "refills": float(refills),
            "groups_drawn": float(len(everything)),
            "mixed_share": len(self.mixed) / len(everything),
            "flat_groups_left": float(max(0, len(chosen) - len(self.mixed))),
            "dropped_tokens": float(sum(c.num_drawn for group in dropped for c in group.completions)),
        }
        if not rewards.isnan().all():
            stats["reward_drawn"] = rewards.nanmean().item()
        return {f"dynamic_sampling/{name}": value for name, value in stats.items()}


def _columns(batch: RolloutBatch) -> Columns:
    """The batch's lists with one entry per completion, such as the values of each reward function."""
    found: Columns = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, dict):
            found |= {(item.name, name): values for name, values in value.items() if isinstance(values, list)}
    return found


def _others(pool: Sequence[Prompt], taken: set[int], count: int, seed: int) -> list[Prompt]:
    """Up to `count` prompts of the pool that were not drawn yet."""
    generator = torch.Generator().manual_seed(seed % 2**63)  # torch takes 64 bits, products of seeds have more
    order = torch.randperm(len(pool), generator=generator).tolist()
    chosen: list[Prompt] = []
    for index in order:
        if len(chosen) == count:
            break
        if pool[index].uid not in taken:
            chosen.append(pool[index])
    return chosen


def _sum(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in first.keys() | second.keys()}
