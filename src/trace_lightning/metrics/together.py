"""Several metrics computed over all ranks by one collective.

torchmetrics gathers each state of each metric by itself, behind a barrier: fifty of both per training step. The states
of these metrics have the same shape on every rank, so they travel as one row of bytes, and each metric's own reductions
do the rest: the values are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def compute_together(metrics: Sequence[Metric]) -> list[Any]:
    """`metric.compute()` of each. Collective where ranks talk; states must be tensors of one shape on all ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [metric.compute() for metric in metrics]
    states: list[Any] = [state for metric in metrics for state in metric.metric_state.values()]
    gathered = {id(state): of_ranks for state, of_ranks in zip(states, _gather(states), strict=True)}
    values = []
    for metric in metrics:
        metric.dist_sync_fn = lambda state, group=None: gathered[id(state)]
        try:
            values.append(metric.compute())
        finally:
            metric.dist_sync_fn = None
    return values


def _gather(states: list[Tensor]) -> list[list[Tensor]]:
    """Of each tensor, those of all ranks."""
    flat = [state.detach().reshape(-1).view(torch.uint8) for state in states]
    mine = torch.cat(flat)
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, mine)
    of_ranks = [row.split([len(part) for part in flat]) for row in everyone]
    return [
        [row[i].clone().view(state.dtype).reshape(state.shape) for row in of_ranks] for i, state in enumerate(states)
    ]
