"""Seconds of a step by phase: the roofline over the shares of it that were reached, each as (fast, slow).

The shares were measured on one H200 with the shapes 1.7B and 8B (docs/results/h200.md); other cards are assumed to
reach the same. They are kept per part of a decode step, because one share for a whole step (BF16 .93 to .95, W4A16KV4
.53 to .57 at 64 x 8k) promises too much where linears outweigh attention: above 16 rows FP4 linears hardly gain.

Training reached .47 to .49 of the matmul rate with 1.7B and layers recomputed (docs/results/steps.md); it is taken as
.35 to .5. Assumed and not measured: AdamW and clipping touch each of a parameter's
four numbers 2.5 to 5 times; FP8 attention lies between BF16's and FP4's share; MXFP4 is as fast as NVFP4. Left out:
rewards, padding, the trainer's own rounding, communication between GPUs, preemption.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trace_lightning.bench.roofline import decode_cost, prefill_operations
from trace_lightning.estimate.adapters import decode_seconds, unpacking_seconds
from trace_lightning.estimate.memory import fit, kept_snapshot, microbatch_tokens
from trace_lightning.estimate.plan import Plan
from trace_lightning.recipe import FP4, QuantRecipe
from trace_lightning.rollout.prefixes import MIN_SHARED_TOKENS

ATTENTION = {"none": (0.99, 0.97), "fp8": (0.97, 0.60), "nvfp4": (0.69, 0.60), "mxfp4": (0.69, 0.60)}
LINEARS, HEAD = (0.80, 0.58), (0.94, 0.91)  # that read BF16 weights
PACKED_LINEARS, PACKED_ROWS, PACKED_GAIN = (0.45, 0.29), 16, 1.1  # FP4 linears up to so many rows; best gain above
REST = {False: (13e-6, 14e-6), True: (21e-6, 25e-6)}  # norms, sampling, gaps: seconds per layer, without and with FP4
PREFILL, SYNC, TRAIN = (0.76, 0.43), (0.46, 0.23), (0.5, 0.35)
RECORDING = {("kv", "device"): 0.063, ("kv", "host"): 0.076, ("all", "device"): 0.100, ("all", "host"): 0.137}
OPTIMIZER_PASSES = (2.5, 5.0)


@dataclass(frozen=True)
class Span:
    """Seconds at best and at worst, as far as the shares go."""

    fast: float
    slow: float

    def __add__(self, other: Span) -> Span:
        return Span(self.fast + other.fast, self.slow + other.slow)

    def __mul__(self, factor: float) -> Span:
        return Span(self.fast * factor, self.slow * factor)

    def beside(self, other: Span) -> Span:
        """Both at once, neither slowed down by the other."""
        return Span(max(self.fast, other.fast), max(self.slow, other.slow))

    def over(self, other: Span) -> tuple[float, float]:
        """How many times longer this takes than `other`: at least, at most."""
        return self.fast / other.slow, self.slow / other.fast


def _at(seconds: float, shares: tuple[float, float]) -> Span:
    return Span(seconds / shares[0], seconds / shares[1])


def decode_parts(plan: Plan, recipe: QuantRecipe, rows: int, context: float, samples: int = 1) -> dict[str, Span]:
    """One decode step of `rows` sequences of `context` tokens, prompts shared by `samples` where the engine does."""
    shape, limits = plan.shape, plan.card.limits
    shared = plan.prompt_length if samples > 1 and plan.prompt_length >= MIN_SHARED_TOKENS else 0
    sizes = {"batch": rows, "context": context, "shared": shared, "samples": samples}
    cost, plain = (decode_cost(shape, each, **sizes) for each in (recipe, QuantRecipe()))  # type: ignore[arg-type]
    linears = _at(plain.linears.seconds(limits), LINEARS)
    if recipe.weights in FP4:
        packed = _at(cost.linears.seconds(limits), PACKED_LINEARS) if rows <= PACKED_ROWS else linears
        gain = 1.0 if rows <= PACKED_ROWS else PACKED_GAIN
        linears = Span(min(packed.fast / gain, linears.fast), min(packed.slow, linears.slow))  # it takes the faster one
    if plan.shares_base:
        fast, slow = decode_seconds(plan)
        unpacking = unpacking_seconds(plan) if rows > PACKED_ROWS and recipe.weights in FP4 else 0.0
        linears += Span(fast, slow + unpacking)  # at best codes are read where a copy would have been
    attention = _at(cost.attention.seconds(limits), ATTENTION[recipe.kv_cache])
    rest = Span(*REST[bool({recipe.weights, recipe.activations, recipe.kv_cache} & set(FP4))]) * shape.layers
    return {"attention": attention, "linears": linears, "head": _at(cost.head.seconds(limits), HEAD), "rest": rest}


def mean_step(plan: Plan, recipe: QuantRecipe) -> dict[str, Span]:
    """`decode_parts` of this plan's batch half-way through a completion, in the number formats of `recipe`."""
    rows, context = rows_side_by_side(plan), plan.prompt_length + plan.mean_new / 2
    return decode_parts(plan, recipe, rows, context, min(plan.samples, rows))


def rows_side_by_side(plan: Plan) -> int:
    """Sequences that decode together, on average."""
    return max(1, min(plan.sequences, plan.max_num_seqs, fit(plan, plan.mean_new)))


def rollout(plan: Plan, *, tail: bool) -> dict[str, Span]:
    """Prefill, decode with seats refilled at once, recording; with `tail` one sequence goes on alone to the limit."""
    shape, recipe, rows = plan.shape, plan.recipe, rows_side_by_side(plan)
    decode = total(mean_step(plan, recipe)) * (plan.sequences * plan.mean_new / rows)
    if tail:
        alone = decode_parts(plan, recipe, 1, plan.prompt_length + (plan.mean_new + plan.new_tokens) / 2)
        decode += total(alone) * (plan.new_tokens - plan.mean_new)
    operations = prefill_operations(shape, plan.own_prompts, plan.prompt_length)
    prefill = _at(operations / plan.card.limits.matmul_rate, PREFILL)
    parts = {"prefill": prefill, "decode": decode}
    if plan.guided_sites:
        kind = "kv" if set(recipe.guided_sites) <= {"k", "v"} else "all"
        parts["recording"] = (prefill + decode) * RECORDING[kind, recipe.guidance.store]
    return parts


def sync(plan: Plan) -> Span:
    """Masters read, those of NVFP4 linears twice, and the snapshot written; over a shared base adapters alone."""
    shape = plan.shape
    if plan.shares_base:
        return _at((plan.trained_params * plan.master_bytes + kept_snapshot(plan)) / plan.card.limits.bandwidth, SYNC)
    twice = shape.linear_params if plan.recipe.weights == "nvfp4" else 0
    moved = plan.master_bytes * (shape.params + twice) + kept_snapshot(plan)
    return _at(moved / plan.card.limits.bandwidth, SYNC)


def train(plan: Plan) -> dict[str, Span]:
    """Forward and backward, and the optimizer's steps.

    Forward once more with checkpointing, and once each for old log-probs and for a reference.

    Operations: 2 per weight and token forward, 4 backward; the head, always recomputed, 8 per completion token; causal
    attention 2 H D T^2 forward per sequence and layer, twice that backward. A frozen weight has no gradient, which
    saves one product of three; merged adapters have the gradient of the merged weight all the same.
    """
    shape, limits, tokens = plan.shape, plan.card.limits, plan.prompt_length + plan.mean_new
    attention = 2 * shape.heads * shape.head_dim * shape.layers * tokens**2
    forward, head = 2.0 * shape.linear_params * tokens + attention, 2.0 * shape.head_params * plan.mean_new
    once = forward * (4 if plan.gradient_checkpointing else 3) + 4 * head
    if plan.lora_rank:
        once -= head + (2.0 * shape.linear_params * tokens if plan.shares_base else 0)
        once += 6.0 * plan.trained_params * tokens
    scored = (plan.num_iterations * plan.num_minibatches > 1) + (plan.reference != "none")
    operations = plan.sequences * (once * plan.num_iterations + scored * (forward + head))
    updates = plan.num_iterations * plan.num_minibatches
    touched = 4 * plan.master_bytes * plan.trained_params * updates / limits.bandwidth
    fast, slow = OPTIMIZER_PASSES
    passes = -(-plan.sequences * plan.longest // microbatch_tokens(plan)) * (3 if plan.gradient_checkpointing else 2)
    unpacking = unpacking_seconds(plan) * passes * plan.num_iterations
    training = _at(operations / limits.matmul_rate, TRAIN) + Span(unpacking, 2 * unpacking)
    return {"train": training, "optimizer": Span(touched * fast, touched * slow)}


def phases(plan: Plan) -> dict[str, Span]:
    """Seconds of each phase of a step: at best without a tail of long completions, at worst with one."""
    best, worst = (rollout(plan, tail=tail) for tail in (False, True))
    drawn = {name: Span(best[name].fast, worst[name].slow) for name in best}
    return {"sync": sync(plan)} | drawn | train(plan)


def total(parts: dict[str, Span]) -> Span:
    """Their sum."""
    return sum(parts.values(), Span(0.0, 0.0))


def step(plan: Plan) -> Span:
    """A whole step: its phases in turn; with `max_version_diff` at best the longer of rollout and training, synced."""
    parts = phases(plan)
    whole = total(parts)
    if not plan.max_version_diff:
        return whole
    training = {name: parts.pop(name) for name in ("train", "optimizer")}
    synced = parts.pop("sync")
    return Span((synced + total(parts).beside(total(training))).fast, whole.slow)


def speedups(plain: Plan, plan: Plan) -> dict[str, tuple[float, float]]:
    """Least and most of BF16's time over this recipe's, of the rollout and of the whole step.

    Both are given the same tail, the same speed of training, and training after the rollout or (`max_version_diff`)
    beside it: these are facts of the run, not of the recipe.
    """
    orders = (Span.__add__, Span.beside) if plan.max_version_diff else (Span.__add__,)
    ratios: dict[str, list[float]] = {"rollout": [], "step": []}
    training, syncs = total(train(plan)), (sync(plain), sync(plan))
    for tail in (False, True):
        before, after = (total(rollout(each, tail=tail)) for each in (plain, plan))
        ratios["rollout"] += before.over(after)
        for seconds, order in itertools.product((training.fast, training.slow), orders):
            trained = Span(seconds, seconds)
            ratios["step"] += (syncs[0] + order(before, trained)).over(syncs[1] + order(after, trained))
    return {name: (min(values), max(values)) for name, values in ratios.items()}
