"""A GPU's SMs cut in two, so that what is drawn ahead (ahead.py) and the trainer's kernels do not wait for each other.

Where both share all SMs, a step takes as long as rollout and training one after the other, at any priority of the
rollout's stream: large kernels hold the SMs, and decode is thousands of small ones in a row. A green context of CUDA
has some of the SMs, and what its streams are given runs there:

    SMs of an H200    [ 32: rollout ][ 100: trainer            ]    a green context each
                      [ all 132                                ]    ordinary streams, as before

Memory, compiled kernels and cuBLAS's handles are those of the device's primary context, so code that runs on the
current stream needs to know nothing of it. A context keeps no SMs from anybody while nothing runs on it.

The driver is called directly: `torch.cuda.green_contexts` (2.11) makes a part, but not the rest of it. A partition is
made once and stays until the process ends, like the streams of torch's own pool. Graphs are bound to the context that
they were captured in, and torch's allocator records events on the streams that have read a tensor when it is freed:
both may come after the run.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)
_GRANULARITY = 8  # SMs; what the driver rounds a part up to since Hopper, a multiple of that before
_DEFAULT_SHARE = 4  # the rollout has a fourth: measured to gain on an H200, where both sides then take about as long


@dataclass(frozen=True)
class SMPartition:
    """Two streams of one device whose kernels run on disjoint SMs, and the number of SMs that each has."""

    rollout: Any
    trainer: Any
    rollout_sms: int
    trainer_sms: int


def partition_of(device: torch.device, sms: int | None) -> SMPartition | None:
    """The two parts of a device; None where rollouts ahead share its SMs with training.

    Args:
        device: a CPU is never cut.
        sms: of the rollout, rounded up by the driver; None: about a quarter; 0: share all.

    Raises:
        ValueError: if a number was asked for and the device cannot be cut so. A default that cannot be had is said.
    """
    if device.type != "cuda" or sms == 0:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).multi_processor_count
    try:
        parts = _cut(index, default_sms(total) if sms is None else sms)
    except RuntimeError as error:
        if sms is None:
            log.warning("rollouts ahead share all SMs with training (slower): %s", error)
            return None
        raise ValueError(
            f"rollout.ahead_sms={sms}: the {total} SMs of the GPU cannot be cut so: {error}. Take a multiple of "
            f"{_GRANULARITY} that leaves some to training, or 0: rollouts ahead then share all SMs with it (slower)"
        ) from error
    log.info("rollouts ahead are drawn on %d SMs, training has the other %d", parts.rollout_sms, parts.trainer_sms)
    return parts


def default_sms(total: int) -> int:
    """About a quarter, rounded down to what a part can have."""
    return max(_GRANULARITY, total // _DEFAULT_SHARE // _GRANULARITY * _GRANULARITY)


@functools.cache
def _cut(index: int, sms: int) -> SMPartition:
    """Two green contexts of device `index`, with a stream each.

    Raises:
        RuntimeError: if the driver refuses, or cannot be reached.
    """
    try:
        from cuda.bindings import driver  # comes with CUDA builds of torch
    except ImportError as error:
        raise RuntimeError("the package cuda-bindings is missing (pip install cuda-bindings)") from error
    torch.cuda.synchronize(index)  # starts the primary context, which the green ones belong to
    device = _call(driver.cuDeviceGet, index)
    whole = _call(driver.cuDeviceGetDevResource, device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, _, rest = _call(driver.cuDevSmResourceSplitByCount, 1, whole, 0, sms)

    def stream(part: Any) -> Any:
        described = _call(driver.cuDevResourceGenerateDesc, [part], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _call(driver.cuGreenCtxCreate, described, device, flags)
        handle = _call(driver.cuGreenCtxStreamCreate, context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        return torch.cuda.ExternalStream(int(handle), device=index)

    return SMPartition(stream(groups[0]), stream(rest), groups[0].sm.smCount, rest.sm.smCount)


def _call(function: Any, *arguments: Any) -> Any:
    """What a function of the driver found; these return a status first."""
    status, *found = function(*arguments)
    if int(status):
        raise RuntimeError(f"{function.__name__} gives {status!r}")
    return found[0] if len(found) == 1 else found
