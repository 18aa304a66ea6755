"""Trainer against rollout on one model: the real engine draws, the real policy scores, and the two are compared.

The engine draws tokens step by step over its paged cache; the policy scores the finished sequences in one pass. The
two sides run different matmul shapes and attention kernels, which on a GPU round BF16 differently. On a CPU both sides
would round alike, so there the trainer's linears run in FP32 and are rounded to BF16 once (`other_kernels`).

    one rollout, full codes of all sites recorded --restrict--> what another recipe would have recorded
    one scoring of the longest sequences          --mask-->     every length

A restricted record has the bytes that the engine would have written (a test holds them against each other), so no
rollout is repeated to look at another part of its record. Trainers share the parameters of the policy that they were
made from: a probe of ten formats holds its weights once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trace_kernels import BlockFormat
from trace_kernels.round_values import Guide, round_values
from trace_lightning.metrics import DivergenceMetrics
from trace_lightning.metrics.positions import position_sums
from trace_lightning.models.layout import Layout
from trace_lightning.quantization.guidance import GuidanceRecord, Key, MismatchCounts
from trace_lightning.quantization.qat import QATLinear, install_qat
from trace_lightning.quantization.recorder import kept_of
from trace_lightning.quantization.rounding import GuidedRounding, Rounding
from trace_lightning.recipe import FP4, SITES, GuidanceConfig, QuantRecipe
from trace_lightning.rollout.base import Progress, RolloutEngine
from trace_lightning.rollout.microbatch import MicroBatch, collate_rollout, plan_microbatches, take
from trace_lightning.rollout.scoring import score_all
from trace_lightning.types import Prompt, RolloutBatch, SamplingParams

Score = Callable[[PreTrainedModel, MicroBatch, float, Rounding | None], Tensor]


class OtherKernelLinear(torch.nn.Linear):
    """A linear whose product is computed in FP32 and rounded to BF16 once: another kernel, as it were."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`, in BF16."""
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(torch.bfloat16)


class OtherKernelQATLinear(QATLinear):
    """The same for a quantised linear."""

    def forward(self, x: Tensor) -> Tensor:
        """As `QATLinear`, in BF16."""
        x, weight = self.group.round_input(x), self.group.round_weight(self)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.bfloat16().float(), weight.bfloat16().float(), bias).to(torch.bfloat16)


class AuditedNearest(GuidedRounding):
    """Not guided, but its codes are compared with the record's: what the audit calls `before` is what is used."""

    def guided_values(self, x: Tensor, fmt: BlockFormat, outer: Tensor | None, guide: Guide | None) -> Tensor:
        """Nearest rounding on own scales."""
        return round_values(x, fmt, outer)


@dataclass(frozen=True)
class Arm:
    """One way to score a rollout: whether the trainer quantises, how it rounds, and by which part of the record."""

    name: str
    guidance: GuidanceConfig | None = None
    rounding: type[GuidedRounding] = GuidedRounding
    quantised: bool = True


@dataclass
class Agreement:
    """How far one arm is from the rollout, over completions cut to one length.

    `metrics` as `functional.divergence_metrics` names them; `positions` [18][4] as in `metrics.positions`; `audit`
    `AUDIT_SUMS` of each (layer, site), empty without a record; `bytes_per_token` of the record that the arm reads.
    """

    metrics: dict[str, float]
    positions: list[list[float]]
    audit: dict[Key, list[float]]
    bytes_per_token: float | None


def off_grid(policy: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The policy, moved off the BF16 grid of its checkpoint by less than half a step, in place, as training would.

    Weights and block scales of a BF16 checkpoint have few bits, so that some weights lie exactly between two FP4
    values. Any first step, however small, flips half of those at once: a jump that no later step makes.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.mul_(1 + (noise - 0.5) * 2**-8)
    return policy


def other_kernels(policy: PreTrainedModel) -> PreTrainedModel:
    """The policy, on a CPU with linears that round once from FP32; elsewhere as it is."""
    if policy.device.type == "cpu":
        for module in policy.modules():
            if type(module) is QATLinear:
                module.__class__ = OtherKernelQATLinear
            elif type(module) is torch.nn.Linear and module is not policy.get_output_embeddings():
                module.__class__ = OtherKernelLinear
    return policy


def make_trainer(source: PreTrainedModel, recipe: QuantRecipe, *, attention: str = "sdpa") -> PreTrainedModel:
    """A trainer that rounds by `recipe` on the very parameters of `source`, which must not be quantised itself."""
    policy = copy.deepcopy(source, {id(parameter): parameter for parameter in source.parameters()})
    install_qat(policy, recipe.trained, attention=attention)
    return other_kernels(policy.eval())


@torch.no_grad()
def draw(
    engine: RolloutEngine,
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: QuantRecipe,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    num_samples: int = 1,
    version: int = 0,
    progress: Progress | None = None,
) -> RolloutBatch:
    """A rollout of `engine` in the formats of `recipe`, recorded if the recipe is guided; its counts are in `stats`."""
    engine.setup(source, tokenizer, recipe, dtype=torch.bfloat16)
    engine.load_weights(source.named_parameters(), version=version)
    drawn = engine.generate(
        list(prompts),
        sampling,
        num_samples=num_samples,
        record_guidance=bool(recipe.guided_sites),
        progress=progress,
    )
    batch = RolloutBatch(prompts=list(prompts), num_generations=num_samples, guidance=drawn.guidance, sampling=sampling)
    collate_rollout(batch, drawn.completions, tokenizer.pad_token_id or 0)  # type: ignore[arg-type]
    batch.advantages_B, batch.stats = torch.zeros(len(drawn.completions)), drawn.stats
    batch.policy_version = drawn.completions[0].policy_version
    return batch


def full_record(formats: QuantRecipe, sequences: int) -> QuantRecipe:
    """`formats` with the full codes of every FP4 site recorded; four sequences are audited."""
    sites = [site for site in SITES if formats.site_format(site) in FP4]
    if not sites:
        return replace(formats, guidance=GuidanceConfig())
    everything = {"mode": "full", "scales": "whole", "layers": "all", "sites": sites}
    config = replace(formats.guidance, **everything, audit_sequences=min(4, sequences))  # type: ignore[arg-type]
    return replace(formats, guidance=config)


def restrict(record: GuidanceRecord, wanted: GuidanceConfig, layout: Layout) -> GuidanceRecord:
    """What a rollout under `wanted` would have recorded, from a record of full codes and whole scales of all sites.

    Args:
        record: of the model.
        wanted: which part of it.
        layout: of the model under the formats of the record.
    """
    if wanted == record.config:
        return record
    assert record.config.mode == "full"
    assert record.config.scales == "whole"
    activations = "nvfp4" if {site for _, site in record.tables} - {"k", "v"} else "none"
    recipe = QuantRecipe(weights="nvfp4", activations=activations, kv_cache="nvfp4", guidance=wanted)  # type: ignore[arg-type]
    tables = {}
    for key in recipe.guided_keys(record.tables, layout.plain_sites, len(layout.layers)):
        table = record.tables[key]
        scale, codes = kept_of(table.scale, table.codes, wanted)
        tables[key] = replace(table, scale=scale, codes=codes)
    return replace(record, config=wanted, tables=tables)


def policy_score(policy: PreTrainedModel, micro: MicroBatch, temperature: float, rounding: Rounding | None) -> Tensor:
    """FP32 log-probs [B, T] of the drawn tokens, 0 elsewhere: what training calls, with any rounding."""
    return score_all(policy, micro, temperature=temperature, rounding=rounding).logprobs_BT


def micro_batches(batch: RolloutBatch, device: torch.device) -> list[list[int]]:
    """The sequences of a rollout in parts that a forward without gradients holds."""
    lengths = [len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in batch.sequences()]
    return plan_microbatches(lengths, 32_768 if device.type == "cuda" else 4096)


@torch.no_grad()
def compare(
    policy: PreTrainedModel,
    batch: RolloutBatch,
    arm: Arm,
    lengths: Sequence[int],
    *,
    temperature: float = 1.0,
    score: Score = policy_score,
    seen: Callable[[MicroBatch, Tensor], None] | None = None,
) -> dict[int, Agreement]:
    """Score the rollout as `arm` does and compare; one result per length of the completions.

    Args:
        policy: a trainer, in FP32 masters; scored under autocast to BF16.
        batch: a rollout; where the arm is guided, with full codes of all sites.
        arm: how to score.
        lengths: completions are cut to each of these.
        temperature: of the rollout.
        score: the trainer's log-probs.
        seen: told the log-probs [B, T] of every micro-batch.
    """
    device = policy.device
    guided = None
    if arm.guidance is not None and batch.guidance is not None:
        qat: Any = policy.trace_qat
        guided = restrict(batch.guidance, arm.guidance, qat.layout)
    batch, counts = replace(batch, guidance=guided), MismatchCounts()
    divergence = {length: DivergenceMetrics().to(device) for length in lengths}
    positions: dict[int, Any] = dict.fromkeys(lengths, 0.0)
    for part in micro_batches(batch, device):
        micro = take(batch, part, device)
        rounding = None if micro.guidance is None else arm.rounding(micro.guidance)
        with torch.autocast(device.type, torch.bfloat16):
            logprobs = score(policy, micro, temperature, rounding)
        for length in lengths:
            mask = micro.mask_BT & (micro.mask_BT.cumsum(-1) <= length)
            divergence[length].update(logprobs, micro.rollout_logprobs_BT, mask)
            positions[length] += position_sums(logprobs, micro.rollout_logprobs_BT, mask)
        if micro.guidance is not None:
            counts.merge(micro.guidance.mismatch)
        if seen is not None:
            seen(micro, logprobs)
    audit = {key: sums.tolist() for key, sums in counts.sums.items()}
    size = guided.bytes_per_token if guided is not None and arm.rounding is not AuditedNearest else None
    return {
        length: Agreement(
            {name: float(value) for name, value in divergence[length].compute().items()},
            positions[length].tolist(),
            audit,
            size,
        )
        for length in lengths
    }
