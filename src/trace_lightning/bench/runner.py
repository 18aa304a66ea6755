"""The options of the benchmark, what is refused before anything long begins, and the order of what is measured.

limits of the machine -> model, once -> for each format: engine, sync, decode at every batch and context, prefill,
generate -> transformers on the same prompts
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from trace_lightning.bench.baselines import BASELINES, measure_baseline
from trace_lightning.bench.machine import free_memory, measure_limits
from trace_lightning.bench.measure import (
    DecodeResult,
    Rate,
    measure_decode,
    measure_generate,
    measure_prefill,
    measure_sync,
    random_prompts,
)
from trace_lightning.bench.roofline import Limits, find_format, kv_bytes, sequences_that_fit, snapshot_bytes
from trace_lightning.bench.shapes import ModelShape, NoTokenizer, lookup, make_model, read_shape
from trace_lightning.bench.workload import cached_tokens, check_groups
from trace_lightning.rollout.engine import LocalEngine

_PAGE, _CPU_PAGE, _WINDOW = 64, 16, 8
_WORKSPACE = 2 * 2**30  # activations, logits, partial sums on a GPU


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Args:
        shape: one of `SHAPES`; the name in the report when `path` is given.
        path: a checkpoint, as `models.resolve` reads it; None for random weights.
        formats: of `FORMATS`; ratios are to the first one.
        batch: numbers of sequences.
        context: tokens in context at the end of the timed steps.
        new_tokens: decode steps that are timed.
        samples: sequences per prompt.
        shared: tokens of the prompt that the samples share.
        fill: give every format the bytes of cache that the first one needs, and as many sequences as fit them.
        prompts: of the prefill and of `generate`; a number of them.
        prompt_length: their length.
        baselines: of `BASELINES`.
        baseline_new_tokens: tokens that `generate`, ours and theirs, draws per prompt.
        device: where to run.
    """

    shape: str
    path: str | None = None
    formats: tuple[str, ...] = ("bf16", "w4a16kv4", "w4a4kv4")
    batch: tuple[int, ...] = (64,)
    context: tuple[int, ...] = (4096,)
    new_tokens: int = 64
    samples: int = 1
    shared: int = 0
    fill: bool = False
    prompts: int = 64
    prompt_length: int = 256
    baselines: tuple[str, ...] = ("generate",)
    baseline_new_tokens: int = 32
    device: torch.device

    @property
    def steps(self) -> int:
        """Timed steps: whole windows of the engine."""
        return -(-self.new_tokens // _WINDOW) * _WINDOW

    @property
    def page_size(self) -> int:
        return _PAGE if self.on_gpu else _CPU_PAGE

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def batch_of(self, name: str, batch: int, shape: ModelShape) -> int:
        """Sequences of a format: `batch`, or with `fill` as many as fit the bytes that the first format needs."""
        if not self.fill:
            return batch
        first, own = (kv_bytes(shape, find_format(fmt)) for fmt in (self.formats[0], name))
        return int(batch * first / own) // self.samples * self.samples


@dataclass(kw_only=True)
class FormatResult:
    """What was measured of one format."""

    name: str
    label: str
    sync: Rate
    prefill: Rate
    generate: Rate
    decode: list[DecodeResult]
    fits: dict[int, int]  # context -> sequences in the memory that weights leave free
    peak_bytes: int | None


@dataclass(kw_only=True)
class BenchResult:
    """The whole measurement."""

    options: BenchOptions
    shape: ModelShape
    limits: Limits | None
    formats: list[FormatResult] = field(default_factory=list)
    baselines: dict[str, Rate] = field(default_factory=dict)


def check_options(options: BenchOptions, free_bytes: int) -> ModelShape:
    """The shape to measure, once everything that can be refused has been looked at.

    Raises:
        ValueError: an unknown name, a size that makes no sense, or a batch that does not fit `free_bytes`.
    """
    shape = read_shape(options.shape, options.path)
    for name in options.baselines:
        lookup("baseline", name, BASELINES)
    for name in options.formats:
        find_format(name)
    _check_sizes(options, shape)
    for context, batch, name in itertools.product(options.context, options.batch, options.formats):
        cached = cached_tokens(context, options.steps, _WINDOW if options.on_gpu else 1)
        check_groups(batch, options.samples, options.shared, cached)
        _check_memory(options, shape, name, context, batch, free_bytes)
    return shape


def _check_sizes(options: BenchOptions, shape: ModelShape) -> None:
    for name in ("batch", "context", "new_tokens", "samples", "prompts", "prompt_length", "baseline_new_tokens"):
        value = getattr(options, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number < 1:
                raise ValueError(f"--{name} {number}: give at least 1")
    if options.shared < 0:
        raise ValueError(f"--shared {options.shared}: give at least 0")
    longest = max(*options.context, options.prompt_length + options.baseline_new_tokens)
    if longest > shape.max_positions:
        raise ValueError(f"{longest} tokens exceed the context of {options.shape}, {shape.max_positions} tokens")


def _check_memory(
    options: BenchOptions, shape: ModelShape, name: str, context: int, batch: int, free_bytes: int
) -> None:
    recipe, wanted = find_format(name), options.batch_of(name, batch, shape)
    weights = 2 * shape.params + snapshot_bytes(shape, recipe)
    workspace = _WORKSPACE if options.on_gpu else 0
    padded = -(-context // options.page_size) * options.page_size
    fits = sequences_that_fit(max(0.0, free_bytes - weights - workspace), kv_bytes(shape, recipe), padded)
    if wanted > fits:
        needed = weights + workspace + wanted * padded * kv_bytes(shape, recipe)
        raise ValueError(
            f"{wanted} sequences of {context} tokens in {name} need {needed / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB "
            f"are free: {fits} such sequences fit. Lower --batch or --context, or choose a smaller shape."
        )


def run_bench(options: BenchOptions, progress: Callable[[str], None] = lambda text: None) -> BenchResult:
    """Measure everything; `progress` is told what comes next.

    Raises:
        ValueError: see `check_options`.
    """
    shape = check_options(options, free_memory(options.device))
    progress("what the machine can do")
    result = BenchResult(options=options, shape=shape, limits=measure_limits(options.device))
    progress(f"{options.shape}: weights")
    policy = make_model(shape, options.path, options.device)
    for name in options.formats:
        result.formats.append(_measure_format(name, policy, result, progress))
        free_memory(options.device)  # returns what the engine has freed
    prompts = random_prompts(options.prompts, options.prompt_length, shape.vocab)
    for name in options.baselines:
        progress(f"transformers' {name}")
        result.baselines[name] = measure_baseline(name, policy, prompts, options.baseline_new_tokens)
    return result


def _measure_format(
    name: str, policy: PreTrainedModel, result: BenchResult, progress: Callable[[str], None]
) -> FormatResult:
    options, shape, limits, recipe = result.options, result.shape, result.limits, find_format(name)
    if options.on_gpu:
        torch.cuda.reset_peak_memory_stats(options.device)
    engine = LocalEngine(max_num_seqs=options.prompts, page_size=options.page_size, decode_window=_WINDOW)
    progress(f"{name}: weight sync")
    engine.setup(policy, NoTokenizer(), recipe, dtype=torch.bfloat16)  # type: ignore[arg-type]
    engine.load_weights(policy.named_parameters(), version=0)
    sync, free = measure_sync(engine, policy, shape, limits), free_memory(options.device)
    decode = []
    for context in options.context:
        for batch in options.batch:
            wanted = options.batch_of(name, batch, shape)
            progress(f"{name}: decode, {wanted} sequences of {context} tokens")
            sharing = {"shared": options.shared, "samples": options.samples}
            sizes = {"batch": wanted, "context": context, "steps": options.steps}
            decode.append(measure_decode(engine, shape, limits, **sizes, **sharing))
            free_memory(options.device)
    progress(f"{name}: prefill and generate")
    prompts = random_prompts(options.prompts, options.prompt_length, shape.vocab)
    return FormatResult(
        name=name,
        label=recipe.label,
        sync=sync,
        prefill=measure_prefill(engine, shape, limits, prompts),
        generate=measure_generate(engine, prompts, options.baseline_new_tokens),
        decode=decode,
        fits={context: sequences_that_fit(free, kv_bytes(shape, recipe), context) for context in options.context},
        peak_bytes=torch.cuda.max_memory_allocated(options.device) if options.on_gpu else None,
    )


def as_record(result: BenchResult) -> dict[str, object]:
    """Everything in plain numbers, for JSON."""
    record = dataclasses.asdict(result)
    record["options"]["device"] = str(result.options.device)
    for entry, measured in zip(record["formats"], result.formats, strict=True):
        for line, decode in zip(entry["decode"], measured.decode, strict=True):
            line |= {"tokens_per_s": decode.tokens_per_s, "host": decode.host, "gaps": decode.gaps}
    return record
