"""What is measured of one engine: decode steps, a weight sync, a prefill, a whole `generate`. Each can be called alone.

A number that a machine cannot give is None and left out of the tables: on a CPU there are no shares of a bandwidth, no
kernels and no graphs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trace_lightning.bench.machine import wall_seconds
from trace_lightning.bench.parts import StepParts, profile_steps, split_step
from trace_lightning.bench.roofline import Limits, decode_cost, prefill_operations, snapshot_bytes
from trace_lightning.bench.shapes import ModelShape
from trace_lightning.bench.workload import DecodeWorkload
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.types import Problem, Prompt, SamplingParams

_PROFILED_STEPS, _SYNCS = 4, 3  # profiled twice, and a rewound workload has 8 steps at least


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """Decode steps of one batch; times in seconds per step."""

    batch: int
    context: int
    wall: float  # the engine's loop, host included
    device: float  # the step alone: the graph, or the torch references on a CPU
    cache_bytes: int
    ideal_bytes: float  # what the step has to read at least
    roofline: float | None  # the least time by the measured limits
    bandwidth_share: float | None  # ideal bytes per second of device time, of the copy bandwidth
    attention_share: float | None  # the same of K and V and the attention kernels
    parts: StepParts | None

    @property
    def tokens_per_s(self) -> float:
        """Drawn tokens per second of the engine's loop."""
        return self.batch / self.wall

    @property
    def host(self) -> float:
        """Time in which the device waits for the host."""
        return max(0.0, self.wall - self.device)

    @property
    def gaps(self) -> float | None:
        """Device time between kernels."""
        return None if self.parts is None else max(0.0, self.device - sum(self.parts.seconds.values()))


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A duration, what was done in it (bytes, tokens), and the share of what the machine can do."""

    seconds: float
    amount: float
    share: float | None = None

    @property
    def per_s(self) -> float:
        return self.amount / self.seconds


def measure_decode(
    engine: LocalEngine,
    shape: ModelShape,
    limits: Limits | None,
    *,
    batch: int,
    context: int,
    steps: int,
    shared: int = 0,
    samples: int = 1,
) -> DecodeResult:
    """Time decode steps at one batch and context; see `DecodeWorkload` for the arguments."""
    sizes = {"batch": batch, "shared": shared, "samples": samples}
    work = DecodeWorkload(engine, shape.vocab, context=context, steps=steps, **sizes)
    wall = work.wall_seconds()
    device = statistics.median(work.step_seconds())
    cost = decode_cost(shape, engine.recipe, context=work.mean_context, **sizes)
    parts, attention_share = None, None
    if limits is not None:
        work.rewind()
        with torch.no_grad():
            parts = split_step(profile_steps(work.step, _PROFILED_STEPS), shape.layers)
        if parts.seconds["attention"]:
            attention_share = cost.attention.bytes / parts.seconds["attention"] / limits.bandwidth
    return DecodeResult(
        batch=batch,
        context=context,
        wall=wall,
        device=device,
        cache_bytes=work.kv.nbytes,
        ideal_bytes=cost.bytes,
        roofline=None if limits is None else cost.seconds(limits),
        bandwidth_share=None if limits is None else cost.bytes / device / limits.bandwidth,
        attention_share=attention_share,
        parts=parts,
    )


def measure_sync(engine: LocalEngine, policy: PreTrainedModel, shape: ModelShape, limits: Limits | None) -> Rate:
    """Time `load_weights` once the engine is set up.

    Bytes moved: the snapshot written once, and the masters read once, those of NVFP4 twice: their maximum comes
    first.
    """
    reads = 2 if engine.recipe.weights == "nvfp4" else 1
    unquantised = shape.params - shape.linear_params
    moved = 2 * (reads * shape.linear_params + unquantised) + snapshot_bytes(shape, engine.recipe)
    version = engine.policy_version

    def sync() -> None:
        engine.load_weights(policy.named_parameters(), version=version)

    seconds = statistics.median(wall_seconds(sync, engine.device) for _ in range(_SYNCS))
    share = None if limits is None else moved / seconds / limits.bandwidth
    return Rate(seconds=seconds, amount=moved, share=share)


def measure_prefill(engine: LocalEngine, shape: ModelShape, limits: Limits | None, prompts: list[Prompt]) -> Rate:
    """Time the prefill of prompts of one length; the share is of the measured matmul rate."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    engine.generate(prompts, params)
    seconds = engine.generate(prompts, params).stats["prefill_seconds"]
    length = len(prompts[0].token_ids)
    operations = prefill_operations(shape, len(prompts), length)
    share = None if limits is None else operations / seconds / limits.matmul_rate
    return Rate(seconds=seconds, amount=float(len(prompts) * length), share=share)


def measure_generate(engine: LocalEngine, prompts: list[Prompt], new_tokens: int) -> Rate:
    """Time `generate` from the prompts to the last completion, after a first call that compiles and captures."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    engine.generate(prompts, params)
    stats = engine.generate(prompts, params).stats
    return Rate(seconds=stats["seconds"], amount=stats["generated_tokens"])


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[Prompt]:
    """Prompts of random tokens."""
    rows = torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [Prompt(token_ids=row, problem=Problem(prompt=""), uid=uid) for uid, row in enumerate(rows)]
