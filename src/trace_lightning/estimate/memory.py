"""Bytes by item, who holds them in which phase, and what fits. Trainer and rollout share one card.

    rollout   sync, prefill, decode: trainer state + snapshot + KV pool + work of the engine
    train     a micro-batch: trainer state + what the engine keeps + weight copies + activations + a chunk of logits
    step      AdamW, one kernel in place: trainer state + what the engine keeps

Gradients live until the next step begins, so through the rollout as well; the KV pool is sized at the first rollout,
when neither they nor AdamW's moments exist yet. With `max_version_diff=1` the engine draws while the trainer works: all
it has exists in every phase, and so do two records, one that is written and one that is trained on.

P parameters (norms left out), H, q, kv, I widths of the residual stream, queries, keys and the MLP. Also left out:
fragmentation, CUDA graphs, the rotary table, supports and top-k.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trace_kernels.cheapest_flips import SCRATCH_BYTES
from trace_lightning.bench.roofline import kv_bytes, sequences_that_fit, snapshot_bytes
from trace_lightning.estimate.adapters import base_bytes, largest_linear, rollout_adapter_bytes
from trace_lightning.estimate.plan import Plan
from trace_lightning.quantization.record_layout import RowLayout, written
from trace_lightning.quantization.recorder import GuidanceRecorder
from trace_lightning.recipe import FP4

PHASES = ("rollout", "train", "step")
CONTEXT_BYTES = 1.5e9  # assumed: CUDA context, libraries' workspaces
LINEARS_PER_LAYER = 7
_CHUNK = 1024  # rows of `token_logprobs` whose logits exist at one time
_ROW_GROWTH = 1.25  # the recorder makes room for 5/4 of the rows of the rollout before


@dataclass(frozen=True)
class Item:
    """Bytes of one thing; `side` is trainer, rollout or host, `phases` are those in which it exists on the card."""

    name: str
    side: str
    bytes: float
    phases: tuple[str, ...] = PHASES


def layer_bytes(plan: Plan) -> int:
    """Bytes per token that autograd keeps of one Qwen3 layer on a GPU: tensor by tensor, and exact for sdpa (tests).

    The residual stream before each norm: two in FP32 with FP32 masters (8 H), in BF16 with BF16 ones (4 H). BF16 inputs
    of linears: one for q, k and v and one for gate and up (4 H), or one each where nothing is quantised and each linear
    casts FP32 by itself (10 H). Then q before its norm, as attention reads it, and attended (6 q); k likewise, and v
    (6 kv); gate, up, product (6 I); attention's statistics; and the rounded attention output (2 q) where activations
    are quantised. Families without QK-norm keep less.
    """
    shape = plan.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    trained, wide = plan.recipe.trained, plan.stream_bytes == 4
    casts = 10 if wide and trained.weights == trained.activations == "none" else 4
    stream = (2 * plan.stream_bytes + casts) * shape.hidden
    rounded = 2 * queries if trained.activations != "none" else 0
    low_rank = 2 * plan.lora_rank * LINEARS_PER_LAYER if plan.shares_base else 0
    return stream + 6 * (queries + keys + shape.intermediate) + 4 * shape.heads + rounded + low_rank


def microbatch_tokens(plan: Plan) -> int:
    """Padded tokens of the largest micro-batch: as many of the longest sequences as the budget holds, at least one."""
    rows = min(plan.sequences, max(1, plan.max_tokens_per_microbatch // plan.longest))
    return rows * plan.longest


def reference_bytes(plan: Plan) -> int:
    """The frozen model of a KL term: BF16, or FP8 linears (scales left out); with adapters it is the base itself."""
    shape = plan.shape
    if plan.lora_rank:
        return 0
    return {"none": 0, "bf16": 2 * shape.params, "fp8": 2 * shape.params - shape.linear_params}[plan.reference]


def trainer_items(plan: Plan) -> Iterator[Item]:
    """Masters, gradients and AdamW's moments, and what a micro-batch adds."""
    params, width = plan.trained_params, plan.master_bytes
    if plan.lora_rank:
        yield Item("frozen base", "both" if plan.shares_base else "trainer", frozen_bytes(plan))
    yield Item("adapters" if plan.lora_rank else "master weights", "trainer", params * width)
    yield Item("gradients", "trainer", params * width)
    if plan.gpus > 1:
        yield Item("DDP buckets", "trainer", params * width)
    yield Item("AdamW moments", "trainer", 2 * params * width)
    if reference_bytes(plan):
        yield Item(f"reference, {plan.reference.upper()}", "trainer", reference_bytes(plan))
    yield Item("weight copies, BF16", "trainer", copied_bytes(plan), ("train",))
    yield from _microbatch_items(plan)


def frozen_bytes(plan: Plan) -> float:
    """What LoRA does not train: linears packed or in BF16, embedding and head in BF16."""
    linears = base_bytes(plan) if plan.shares_base else 2 * plan.shape.linear_params
    return linears + 2 * (plan.shape.params - plan.shape.linear_params)


def copied_bytes(plan: Plan) -> float:
    """BF16 weights that the trainer makes for its matmuls, and how long it keeps them.

    Autocast and the quantiser keep one of every weight for a step. A shared base is unpacked a linear at a time; under
    merged adapters one linear at a time is FP32 twice, the merged weight and its gradient.
    """
    shape, mixed = plan.shape, plan.master_bytes == 4
    if plan.shares_base:
        return 2.0 * largest_linear(shape) if plan.recipe.weights in FP4 else 0.0
    kept = 2 * shape.linear_params if mixed or plan.recipe.trained.weights != "none" else 0
    if plan.lora_rank:
        return kept + 8.0 * largest_linear(shape)
    return kept + (2 * shape.head_params if mixed else 0)


def found_bits_bytes(plan: Plan) -> int:
    """Bytes per token that a checkpointed forward keeps of the bits it found, until its layers are recomputed."""
    return sum(math.prod(site.codes("parity")) for site in plan.guided_sites.values())


def _microbatch_items(plan: Plan) -> Iterator[Item]:
    shape, width = plan.shape, plan.stream_bytes
    tokens, one = microbatch_tokens(plan), layer_bytes(plan)
    layers = one + shape.layers * width * shape.hidden if plan.gradient_checkpointing else one * shape.layers
    yield Item("activations kept", "trainer", tokens * (layers + 4 * width * shape.hidden), ("train",))
    # Assumed: four FP32 rows of the widest tensor, for rounding in the forward and gradients in the backward pass.
    widest = max(shape.intermediate, shape.heads * shape.head_dim)
    yield Item("activations in work", "trainer", tokens * 16 * widest, ("train",))
    if plan.guidance.mode == "syndrome":  # decisions of the search; its FP32 costs are among the activations in work
        yield Item("search for bits", "trainer", float(SCRATCH_BYTES), ("train",))
        if plan.gradient_checkpointing:
            yield Item("bits found, kept", "trainer", tokens * found_bits_bytes(plan), ("train",))
    # Backward of a chunk: BF16 logits, FP32 log-probs and three FP32 gradients of them, and the head's own gradient.
    gradient = 0 if plan.lora_rank else plan.master_bytes * shape.head_params
    yield Item("logits of a chunk", "trainer", 18 * _CHUNK * shape.vocab + gradient, ("train",))


def kept_snapshot(plan: Plan) -> float:
    """`snapshot_bytes`, and what FP32 masters add: an FP32 embedding, which a tied head cannot share.

    Over a shared base there are the adapters alone.
    """
    if plan.shares_base:
        return rollout_adapter_bytes(plan)
    extra = plan.shape.head_params * (4 if plan.shape.tied else 2) if plan.stream_bytes == 4 else 0
    return snapshot_bytes(plan.shape, plan.recipe) + extra


def pool_bytes(plan: Plan) -> float:
    """The KV pool as `LocalEngine` reserves it: what the call needs, at most `memory_fraction` of what is free."""
    per_token, rows = kv_bytes(plan.shape, plan.recipe), min(plan.sequences, plan.max_num_seqs)
    if plan.kv_cache_tokens:
        return per_token * plan.kv_cache_tokens
    wanted = (rows + min(plan.own_prompts, rows)) * (plan.longest + plan.page_size)
    held: float = plan.trained_params * plan.master_bytes * (1 if plan.keep_snapshot else 4) + reference_bytes(plan)
    held += frozen_bytes(plan) if plan.lora_rank else 0
    free = plan.card.memory - CONTEXT_BYTES - held - kept_snapshot(plan)
    return min(wanted * per_token, max(0.0, free) * plan.memory_fraction)


def fit(plan: Plan, new_tokens: int) -> int:
    """Sequences whose own tokens and share of a prompt fit the KV pool side by side, when all are at their end."""
    context = new_tokens + -(-plan.prompt_length // plan.samples) + plan.page_size
    return sequences_that_fit(pool_bytes(plan), kv_bytes(plan.shape, plan.recipe), context)


def record_row_bytes(plan: Plan) -> int:
    """Bytes of guidance per fed token, by the recorder's own layout; 0 without guidance."""
    sites = plan.guided_sites
    return GuidanceRecorder(plan.guidance, sites, torch.device("cpu")).row_bytes if sites else 0


def record_tokens(plan: Plan, new_tokens: int) -> int:
    """Tokens per GPU that get a row: each prompt once, and all completions."""
    return plan.own_prompts * plan.prompt_length + plan.sequences * new_tokens


def rollout_items(plan: Plan) -> Iterator[Item]:
    """Snapshot, KV pool, the engine's state, and the record; the last on the card or on the host."""
    shape = plan.shape
    kept = PHASES if plan.keep_snapshot else ("rollout",)
    yield from _snapshot_items(plan, kept)
    yield Item("KV pool", "rollout", pool_bytes(plan), kept)
    rows = min(plan.sequences, plan.max_num_seqs)
    pages = -(-plan.longest // plan.page_size)
    yield Item("decode state", "rollout", rows * (8 * plan.new_tokens + 4 * pages + 56), kept)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    fed = min(plan.prefill_tokens, plan.own_prompts * plan.prompt_length)
    # Assumed. Prefill: residual, normalised, q k v, attention, gate and up, product; decoding: logits, BF16 and FP32.
    work = max(fed * (6 * shape.hidden + 4 * queries + 4 * keys + 6 * shape.intermediate), 6 * rows * shape.vocab)
    yield Item("prefill or logits in work", "rollout", work, ("rollout",))
    yield from _record_items(plan, rows, kept)


def _snapshot_items(plan: Plan, kept: tuple[str, ...]) -> Iterator[Item]:
    shape, recipe = plan.shape, plan.recipe
    if plan.shares_base:
        yield Item("snapshot, adapters", "rollout", kept_snapshot(plan), kept)
        if recipe.weights in FP4:
            yield Item("snapshot, a linear unpacked", "rollout", 2 * largest_linear(shape), ("rollout",))
        return
    small = kept_snapshot(plan) - snapshot_bytes(shape, recipe) + 2 * (shape.params - shape.linear_params)
    yield Item("snapshot, BF16 linears", "rollout", 2 * shape.linear_params, kept)
    yield Item("snapshot, packed linears", "rollout", snapshot_bytes(shape, recipe) - 2 * shape.params, kept)
    yield Item("snapshot, embedding and head", "rollout", small, kept)


def _record_items(plan: Plan, rows: int, kept: tuple[str, ...]) -> Iterator[Item]:
    config, sites = plan.guidance, plan.guided_sites
    if not sites:
        return
    audited = config.audit_sequences * plan.longest * RowLayout.of_codes(sites).row_bytes
    total = _ROW_GROWTH * record_row_bytes(plan) * record_tokens(plan, plan.mean_new) + audited
    side = "host" if config.store == "host" else "rollout"
    yield Item("guidance record", side, total * (1 + plan.max_version_diff), () if side == "host" else PHASES)
    fed = {key: site for key, site in sites.items() if site.heads is None}
    if fed:  # the ring of a window of decode steps and the step itself, see `StepRecorder`
        row = RowLayout.of_record(fed, mode=written(config.mode), scales="whole").row_bytes
        row += RowLayout.of_codes(fed).row_bytes if config.audit_sequences and config.mode != "full" else 0
        yield Item("guidance, window of steps", "rollout", rows * row * (plan.decode_window + 1), kept)


def items(plan: Plan) -> list[Item]:
    """Everything, in the order of the table."""
    drawn = rollout_items(plan)
    if plan.max_version_diff:
        drawn = (dataclasses.replace(each, phases=PHASES if each.phases else ()) for each in drawn)
    return [*trainer_items(plan), *drawn]


def peaks(plan: Plan) -> dict[str, float]:
    """Bytes on the card in each phase."""
    return {phase: CONTEXT_BYTES + sum(item.bytes for item in items(plan) if phase in item.phases) for phase in PHASES}
