"""The generators of every rank, as plain values in a checkpoint.

Nothing of this library draws from them: sampling counts by (seed, sequence, position), and the order of the prompts
comes from (seed, epoch). A reward function or a callback of the user's may, and a resumed run must then go on as the
unbroken one would have.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

log = logging.getLogger(__name__)


def random_state(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, as tensors, lists and numbers."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def gather_random(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """The states of all ranks, in their order; collective."""
    own = random_state(trainer.strategy.root_device)
    if trainer.world_size == 1:
        return [own]
    states: list[dict[str, Any]] = [{}] * trainer.world_size
    torch.distributed.all_gather_object(states, own)
    return states


def restore_random(states: list[dict[str, Any]], trainer: pl.Trainer) -> None:
    """Give each rank its own state back; with another number of ranks there is none to give."""
    if len(states) != trainer.world_size:
        log.info(
            "the random states of %d ranks are not given to %d: what draws from Python's, NumPy's or torch's "
            "generators goes on from the seed",
            len(states),
            trainer.world_size,
        )
        return
    state, device = states[trainer.global_rank], trainer.strategy.root_device
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
