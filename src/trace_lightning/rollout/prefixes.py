"""Which running sequences share a prompt, as the decode kernel wants to know it, at fixed addresses.

The samples of a group hold the same full pages of their prompt. Read once for all of them, those pages cost a decode
step a fraction of what they cost read by each: bytes fall from n (p + r) to p + n r for n samples, prompt p and
response r.

    group_rows [R, n]   rows of the samples of one group, -1 where there is none; one line per prefilled prompt in use
    prefix_lens [R]     tokens in the shared full pages of a row's prompt

Short prompts are not shared: the extra kernel would cost more than the pages it saves.
"""

from __future__ import annotations

import torch

from trace_kernels.decode_attention import SharedPrefix
from trace_lightning.rollout.graphs import length_bucket
from trace_lightning.rollout.scheduler import Sequence

MIN_SHARED_TOKENS = 512


class PrefixTable:
    """Tensors for up to `rows` sequences in groups of `num_samples`."""

    def __init__(self, rows: int, num_samples: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.group_rows = torch.full((rows, num_samples), -1, dtype=torch.int32, device=device)
        self.prefix_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.max_prefix_len = 0
        self.dirty = True

    def update(self, running: list[Sequence]) -> None:
        """Rebuild the tables if sequences have started, ended or moved since the last time."""
        if not self.dirty:
            return
        members: dict[int, list[int]] = {}
        lengths = []
        for row, sequence in enumerate(running):
            # A sequence that was preempted has pages of its own. So have the samples that started after their group
            # gave its pages back and was prefilled again: lines are told apart by the first page.
            shared = 0 if sequence.was_preempted else sequence.prompt_length // self.page_size * self.page_size
            lengths.append(shared)
            if shared:
                members.setdefault(sequence.pages[0], []).append(row)
        lines = [rows + [-1] * (self.group_rows.shape[1] - len(rows)) for rows in members.values()]
        self.group_rows.fill_(-1)
        self.prefix_lens.zero_()
        if lines:
            self.group_rows[: len(lines)] = torch.tensor(lines, dtype=torch.int32, device=self.group_rows.device)
        self.prefix_lens[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32, device=self.prefix_lens.device)
        self.max_prefix_len = length_bucket(max(lengths, default=0)) if lines else 0
        self.dirty = False

    def head(self, rows: int) -> SharedPrefix | None:
        """The tables of the first `rows` rows; None when nothing is shared."""
        if not self.max_prefix_len:
            return None
        return SharedPrefix(self.group_rows[:rows], self.prefix_lens[:rows], self.max_prefix_len)
