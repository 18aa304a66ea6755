"""Which part of a decode step a GPU kernel belongs to, and how many kernels a layer takes.

A step is one sequence of kernels, so most of it is known by position: what comes before the first norm prepares the
batch, linears after the last norm are the vocabulary projection, and what follows them draws the tokens. Between the
first and the last norm lie the layers, where a kernel is known by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

PARTS = ("attention", "linears", "norms", "lm_head", "sampling", "other")
_NORM = re.compile(r"rms_norm")
_LINEAR = re.compile(r"fp4_linear|permute_activations|gemm|gemv|nvjet|cutlass|cublas|splitk|xmma", re.IGNORECASE)
_BETWEEN = {  # our fused kernels beside the norms count as norms: rounding, rotation and activations
    "attention": re.compile(r"attention|attend|dense_kernel|fp4_kernel|fp8_kernel|merge_kernel|flash|fmha"),
    "norms": re.compile(r"rms_norm|kv_append|gated_activation|round_rows"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step, in order."""

    name: str
    seconds: float


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by part, its kernels in all, and those between its first and its last norm per layer."""

    seconds: dict[str, float]
    kernels: int
    kernels_per_layer: float


def profile_steps(step: Callable[[], None], repeats: int) -> list[Kernel]:
    """The kernels of one `step`, each with its mean time over `repeats` steps; a GPU is needed.

    Raises:
        RuntimeError: if the steps did not run the same kernels.
    """
    _kernel_events(step, repeats)  # the first use of the profiler misses some
    events = _kernel_events(step, repeats)
    count = len(events) // repeats
    if count == 0 or count * repeats != len(events):
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {repeats} equal steps: run the bench again")
    steps = [events[i * count : (i + 1) * count] for i in range(repeats)]
    seconds = [
        sum(event.time_range.elapsed_us() for event in same) * 1e-6 / repeats for same in zip(*steps, strict=True)
    ]
    return [Kernel(event.name, mean) for event, mean in zip(steps[0], seconds, strict=True)]


def _kernel_events(step: Callable[[], None], repeats: int) -> list[Any]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return sorted(events, key=lambda event: event.time_range.start)


def split_step(kernels: Sequence[Kernel], layers: int) -> StepParts:
    """Assign the kernels of one step to its parts."""
    norms = [index for index, kernel in enumerate(kernels) if _NORM.search(kernel.name)]
    first, last = (norms[0], norms[-1]) if norms else (len(kernels), len(kernels))
    seconds = dict.fromkeys(PARTS, 0.0)
    head_seen = False
    for index, kernel in enumerate(kernels):
        linear = bool(_LINEAR.search(kernel.name))
        head_seen |= index > last and linear
        if index > last:
            part = "lm_head" if linear else "sampling" if head_seen else "other"
        else:
            part = "linears" if linear else _by_name(kernel.name)
        seconds[part] += kernel.seconds
    return StepParts(seconds, len(kernels), (last - first) / layers)


def _by_name(name: str) -> str:
    return next((part for part, pattern in _BETWEEN.items() if pattern.search(name)), "other")
