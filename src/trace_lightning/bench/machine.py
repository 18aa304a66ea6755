"""What this machine can do, measured: copy bandwidth, BF16 matmul rate, free memory; and clocks that wait for it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from trace_lightning.bench.roofline import Limits

_COPY_BYTES, _MATMUL_SIZE, _REPEATS = 2**31, 8192, 20


def synchronize(device: torch.device) -> None:
    """Wait for everything that was started on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds from the call until the device is done."""
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin


def device_seconds(function: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls: on a GPU between two events on its stream, on a CPU by the clock."""
    if device.type != "cuda":
        return [wall_seconds(function, device) for _ in range(repeats)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    synchronize(device)
    return [begin.elapsed_time(end) * 1e-3 for begin, end in events]


def measure_limits(device: torch.device) -> Limits | None:
    """Bandwidth of a device-to-device copy, read and written, and rate of a BF16 matmul; None on a CPU."""
    if device.type != "cuda":
        return None
    limits = Limits(_copy_bandwidth(device), _matmul_rate(device))
    torch.cuda.empty_cache()
    return limits


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / statistics.median(device_seconds(lambda: target.copy_(source), device, _REPEATS))


def _matmul_rate(device: torch.device) -> float:
    left, right = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device=device)
    return 2 * _MATMUL_SIZE**3 / statistics.median(device_seconds(lambda: left @ right, device, _REPEATS))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def device_name(device: torch.device) -> str:
    """The GPU's name, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
