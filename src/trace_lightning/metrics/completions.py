"""Length of the answers, and how many ran into the limit. Names are TRL's.

Clipped answers end where the budget ends, so their length says nothing about the policy: the mean over those that
terminated by themselves is kept apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class CompletionMetrics(Metric):
    """Completion lengths in tokens, the end-of-sequence token included."""

    full_state_update = False
    num_completions: Tensor
    num_terminated: Tensor
    length_sum: Tensor
    terminated_length_sum: Tensor
    shortest: Tensor
    longest: Tensor

    def __init__(self) -> None:
        super().__init__()
        for state in ("num_completions", "num_terminated", "length_sum", "terminated_length_sum"):
            self.add_state(state, torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("shortest", torch.tensor(torch.iinfo(torch.int64).max), dist_reduce_fx="min")
        self.add_state("longest", torch.tensor(0), dist_reduce_fx="max")

    def update(self, lengths: Tensor, terminated: Tensor) -> None:
        """Add completions: `lengths` int64 [B], `terminated` bool [B] (ended by EOS or a stop, not by the limit).

        Raises:
            ValueError: shapes that differ.
        """
        if lengths.shape != terminated.shape:
            raise ValueError(f"{tuple(lengths.shape)} lengths but {tuple(terminated.shape)} terminated flags")
        if not lengths.numel():
            return
        self.num_completions += lengths.numel()
        self.num_terminated += terminated.sum()
        self.length_sum += lengths.sum()
        self.terminated_length_sum += (lengths * terminated).sum()
        self.shortest = torch.minimum(self.shortest, lengths.amin())
        self.longest = torch.maximum(self.longest, lengths.amax())

    def compute(self) -> dict[str, Tensor]:
        """`completions/{mean_length,min_length,max_length,clipped_ratio}`, and `mean_terminated_length` if any did."""
        result: dict[str, Tensor] = {}
        if self.num_completions:
            result["completions/mean_length"] = self.length_sum / self.num_completions
            result["completions/min_length"] = self.shortest.float()
            result["completions/max_length"] = self.longest.float()
            result["completions/clipped_ratio"] = 1 - self.num_terminated / self.num_completions
        if self.num_terminated:
            result["completions/mean_terminated_length"] = self.terminated_length_sum / self.num_terminated
        return result
