"""The learning rate over a run: linear warm-up, then constant, or down to nothing at `trainer.max_steps`.

A constant rate keeps the policy moving to the end, so two runs that have learned the same still differ by where their
last steps fell. What is compared at the end, or shipped, gains from a decay.

What was left out: the schedules of transformers, whose warm-up begins with a step at rate 0. Here that would be a whole
rollout for nothing.
"""

import math
from typing import Literal

LRDecay = Literal["none", "linear", "cosine"]


def lr_factor(step: int, *, warmup_steps: int, decay: LRDecay, max_steps: int) -> float:
    """Factor on the learning rate of optimizer step `step`, counted from 0.

    Args:
        step: of the run, also when it was resumed.
        warmup_steps: the factor rises by 1 / warmup_steps a step, and is 1 from the last of them on.
        decay: `linear` and `cosine` fall from 1 after the warm-up and would reach 0 at `max_steps`.
        max_steps: optimizer steps of the run; not used without decay.
    """
    warmup = max(1, warmup_steps)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup + 1) / max(1, max_steps - warmup + 1))
    return {"none": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[decay]
