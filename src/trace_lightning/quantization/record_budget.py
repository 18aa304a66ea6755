"""Whether the record of a rollout fits into memory, asked before a token is drawn.

Its size is known beforehand, but for the lengths of the completions, so each counts as the longest it may get. Running
out in the middle would cost the rollout, and dropping sites in silence would turn a guided run into one that diverges.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trace_lightning.recipe import GuidanceConfig


def check_budget(config: GuidanceConfig, row_bytes: int, most_tokens: int, store: torch.device) -> None:
    """Refuse a rollout whose record could outgrow its budget, before a token is drawn.

    The budget is `config.budget_gb`, or else the memory that can be had where the record is kept.

    Raises:
        ValueError: with both numbers and the ways out.
    """
    if config.budget_gb is not None:
        budget, source = config.budget_gb * 1e9, f"guidance.budget_gb={config.budget_gb:g}"
    elif store.type == "cuda":
        budget, source = float(free_gpu_memory(store)), "what is free on the GPU"
    else:
        budget, source = _free_host_memory(), "what is free on the host"
    needed = row_bytes * most_tokens
    if needed > budget:
        raise ValueError(
            f"guidance takes {row_bytes:,} bytes per token, {needed / 1e9:.1f} GB if all {most_tokens:,} tokens of "
            f"this rollout are drawn; {source} is {budget / 1e9:.1f} GB. Set guidance.store=host, "
            "guidance.scales=parity, or guidance.mode=parity or syndrome, name fewer guidance.sites, or draw fewer or "
            "shorter completions."
        )


def free_gpu_memory(device: torch.device) -> int:
    """Bytes that torch could allocate: what is free on the GPU, and what its allocator holds without using it.

    After a training step most of a GPU belongs to the second kind, the record of the rollout before among it.
    """
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def _free_host_memory() -> float:
    """Bytes that can be taken without swapping, as Linux estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
