"""Packed weights or their BF16 copy: up to how many tokens the FP4 linear of a layer is the faster way.

Packed weights are little more than a quarter of the bytes, but unpacking them costs instructions, and a matmul of many
tokens is bound by arithmetic. Where the two ways meet depends on shape and device, and a model of it would be wrong on
the next GPU; so both are timed, once per shape.

What was left out: keeping the answers from one process to the next. A new driver or cuBLAS may change them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from trace_kernels.block_dequantize import dequantize_packed
from trace_kernels.linear import fp4_linear_triton, launch_plan, permute_activations_triton

_CROSSOVERS: dict[tuple[int, int, str, str, bool], int] = {}


def crossover_batch(
    qdata: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    dense_weight: Tensor,
    *,
    fmt: str,
    in_features: int,
    made: bool = False,
) -> int:
    """Up to how many tokens `fp4_linear` beats `F.linear` over `dense_weight`, the BF16 copy [N, C].

    Timed on the device, from CUDA graphs, with weights that do not fit its cache; once per shape, format and device in
    a process. The consumer's reading of several FP32 parts instead of one BF16 result counts against FP4. `made` says
    that there is no copy, so that each `F.linear` has to wait for one. Call it outside of graph capture.

    Returns:
        One of 0, 8, 16, 32, 64, 128, and 256 where the copy is made each time; FP4 was faster at all smaller ones too.
        0 on a CPU.
    """
    if qdata.device.type != "cuda":
        return 0
    key = (qdata.shape[0], in_features, fmt, str(qdata.device), made)
    if key not in _CROSSOVERS:
        with torch.cuda.device(qdata.device):
            _CROSSOVERS[key] = _measure_crossover(qdata, scale, outer, dense_weight, fmt, in_features, made)
    return _CROSSOVERS[key]


def _measure_crossover(
    qdata: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    dense_weight: Tensor,
    fmt: str,
    in_features: int,
    made: bool,
) -> int:
    packed, dense = _copies(qdata, scale), _copies(dense_weight)
    unpack = functools.partial(dequantize_packed, outer=outer, width=in_features, fmt=fmt, dtype=dense_weight.dtype)
    making_seconds = _seconds([functools.partial(unpack, *weight) for weight in packed]) if made else 0.0
    best = 0
    for tokens in (8, 16, 32, 64, 128, *((256,) if made else ())):
        x = torch.randn(tokens, in_features, dtype=dense_weight.dtype, device=qdata.device)
        xp = permute_activations_triton(x)
        linear = functools.partial(fp4_linear_triton, xp, outer=outer, bias=None, in_features=in_features, fmt=fmt)
        dense_seconds = _seconds([functools.partial(torch.nn.functional.linear, x, w) for (w,) in dense])
        seconds = _seconds([functools.partial(linear, *weight) for weight in packed])
        splits = launch_plan(tokens, qdata.shape[0], in_features, qdata.device)[1]
        extra_bytes = (4 * splits - 2) * tokens * qdata.shape[0]
        seconds += extra_bytes * dense_seconds / dense_weight.nbytes  # at the rate at which BF16 streams its weights
        if seconds > making_seconds + dense_seconds:
            break
        best = tokens
    return best


def _copies(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Enough copies of one weight's tensors that reading them in turn misses the L2 cache."""
    cache = torch.cuda.get_device_properties(tensors[0].device).L2_cache_size
    count = 2 * cache // sum(tensor.nbytes for tensor in tensors)
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(count))]


def _seconds(calls: list[Callable[[], Tensor]]) -> float:
    """Seconds per call: the fastest of five replays of a CUDA graph that makes all of them."""
    calls[0]()  # compiles, and lets cuBLAS allocate
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e-3 / len(calls)
