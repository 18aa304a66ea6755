"""Trainer against rollout on one model: the real engine draws, the real policy scores, and the two are compared.

The engine draws tokens step by step over its paged cache; the policy scores the finished sequences in one pass. The
two sides run different matmul shapes and attention kernels, which on a GPU round BF16 differently. On a CPU both sides
would round alike, so there the trainer's linears run in FP32 and are rounded to BF16 once.

    one rollout, full codes of all sites recorded --restrict--> what another recipe would have recorded
    one scoring of the longest sequences          --mask-->     every length

A restricted record has the bytes that the engine would have written (a test holds them against each other), so no
rollout is repeated to look at another part of its record.
"""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from trace_kernels import BlockFormat, Quantized, pack_bits, parity_bits
from trace_kernels.formats import e2m1_encode
from trace_lightning.metrics import DivergenceMetrics, audit_values, position_curve, position_slope
from trace_lightning.metrics.positions import position_sums
from trace_lightning.models.policy import final_hidden, load_policy, load_tokenizer, logits_head
from trace_lightning.quantization.guidance import GuidanceRecord, MismatchCounts, SiteTable
from trace_lightning.quantization.qat import QATLinear
from trace_lightning.quantization.rounding import NEAREST, GuidedRounding
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.microbatch import MicroBatch, collate_rollout, plan_microbatches, take
from trace_lightning.types import SITES, GuidanceConfig, Problem, Prompt, QuantRecipe, RolloutBatch, SamplingParams

CHAT = (
    "Explain step by step how a bicycle stays upright, and compute 37*12.",
    "Write a story about a lighthouse keeper who learns to cook.",
)
_DLOGP = "sampling/sampling_logp_difference"
_GAPS = {"mean_abs_dlogp": f"{_DLOGP}/mean", "max_abs_dlogp": f"{_DLOGP}/max", "k3": "rollout_corr/k3_kl"}


class OtherKernelLinear(torch.nn.Linear):
    """A linear whose product is computed in FP32 and rounded to BF16 once: another kernel, as it were."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float()).to(torch.bfloat16)


class OtherKernelQATLinear(QATLinear):
    """The same for a quantised linear."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.group.round_input(x), self.group.round_weight(self)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.bfloat16().float(), weight.bfloat16().float()).to(torch.bfloat16)


class AuditedNearest(GuidedRounding):
    """Not guided, but its codes are compared with the record's: what the audit calls `before` is what is used."""

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        super().values(layer, site, x, fmt, outer)
        return NEAREST.values(layer, site, x, fmt, outer)


class RolloutScales(GuidedRounding):
    """Takes the rollout's scales and rounds to nearest on them."""

    def _round(self, layer: int, site: str, x: Tensor, fmt: Any, table: SiteTable) -> Quantized:
        return self._nearest(x, super()._round(layer, site, x, fmt, table), fmt)

    def _audit(self, layer: int, site: str, x: Tensor, q: Quantized, fmt: Any, table: SiteTable) -> None:
        super()._audit(layer, site, x, self._nearest(x, q, fmt), fmt, table)

    def _nearest(self, x: Tensor, q: Quantized, fmt: Any) -> Quantized:
        return replace(q, codes=e2m1_encode(fmt.normalize(x, q.scale, q.outer)).flatten(-2))


@dataclass(frozen=True)
class Arm:
    """One way to score a rollout: whether the trainer quantises, how it rounds, and by which part of the record."""

    name: str
    guidance: GuidanceConfig | None = None
    rounding: type[GuidedRounding] = GuidedRounding
    quantised: bool = True


def make_trainer(path: str, recipe: QuantRecipe, device: torch.device) -> PreTrainedModel:
    """The policy in FP32 masters, quantised as `recipe` says."""
    policy = load_policy(path, recipe, dtype=torch.float32).to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        for module in policy.modules():
            if type(module) is QATLinear:
                module.__class__ = OtherKernelQATLinear
            elif type(module) is torch.nn.Linear and module is not policy.get_output_embeddings():
                module.__class__ = OtherKernelLinear
    return policy


def load_masters(path: str, device: torch.device, seed: int) -> PreTrainedModel:
    """The policy in FP32, moved off the BF16 grid of its checkpoint by less than half a step, as training would.

    Weights and block scales of a BF16 checkpoint have few bits, so that some weights lie exactly between two FP4
    values. Any first step, however small, flips half of those at once: a jump that no later step makes.
    """
    policy = load_policy(path, QuantRecipe(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter *= 1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * 2**-8
    return policy.to(device)


def prompt_texts(args: argparse.Namespace, tokenizer: Any) -> list[str]:
    """What the policy continues: `args.prompts`, in the template of a chat model."""
    if not tokenizer.chat_template:
        return args.prompts or ["12+34="]
    chats = [[{"role": "user", "content": text}] for text in args.prompts or CHAT]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


@torch.no_grad()
def roll_out(args: argparse.Namespace, source: PreTrainedModel, recipe: QuantRecipe) -> tuple[RolloutBatch, float]:
    """Draw `args.sequences` samples in equal shares of `args.prompts`; returns the batch and tokens per second."""
    tokenizer, engine = load_tokenizer(args.model), LocalEngine()
    engine.setup(source, tokenizer, recipe, dtype=torch.bfloat16)
    engine.load_weights(source.named_parameters(), version=0)
    prompts = [
        Prompt(token_ids=tokenizer(text)["input_ids"], problem=Problem(prompt=text), uid=uid)
        for uid, text in enumerate(prompt_texts(args, tokenizer))
    ]
    samples = max(1, args.sequences // len(prompts))
    sampling = SamplingParams(max_new_tokens=max(args.lengths), ignore_eos=True, seed=args.seed)
    drawn = engine.generate(prompts, sampling, num_samples=samples, record_guidance=True)
    batch = RolloutBatch(prompts=prompts, num_generations=samples, guidance=drawn.guidance)
    collate_rollout(batch, drawn.completions, tokenizer.pad_token_id)
    batch.advantages_B = torch.zeros(len(drawn.completions))
    return batch, drawn.stats["generated_tokens"] / drawn.stats["seconds"]


def restrict(record: GuidanceRecord, wanted: GuidanceConfig) -> GuidanceRecord:
    """What a rollout under `wanted` would have recorded, from a record of full codes and whole scales of all sites."""
    if wanted == record.config:
        return record
    assert record.config.mode == "full"
    assert record.config.scales == "whole"
    recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=wanted)
    layers = recipe.guided_layers(1 + max(layer for layer, _ in record.tables))
    tables = {}
    for (layer, site), table in record.tables.items():
        if layer in layers and site in recipe.guided_sites:
            scale = pack_bits(table.scale & 1) if wanted.scales == "parity" else table.scale
            codes = parity_bits(table.codes) if wanted.mode == "parity" else table.codes
            tables[layer, site] = replace(table, scale=scale, codes=codes)
    return replace(record, config=wanted, tables=tables)


def log_probs(policy: PreTrainedModel, micro: MicroBatch, rounding: GuidedRounding | None) -> Tensor:
    """FP32 log-probs [B, T] of the drawn tokens, 0 elsewhere; like `rollout.scoring`, with any rounding."""
    predicted, device = micro.mask_BT[:, 1:], micro.mask_BT.device
    hidden = final_hidden(policy, micro.token_ids_BT[:, :-1], rounding)[predicted]
    targets = micro.token_ids_BT[:, 1:][predicted]
    values, _ = token_logprobs(hidden, logits_head(policy), targets, temperature=1.0, with_entropy=False)
    return torch.zeros(micro.mask_BT.shape, device=device).masked_scatter(micro.mask_BT, values)


@torch.no_grad()
def measure(
    policy: PreTrainedModel, batch: RolloutBatch, arm: Arm, lengths: list[int], device: torch.device
) -> dict[int, dict[str, Any]]:
    """Score the rollout as `arm` does and compare; one row of numbers per length."""
    guided = None if arm.guidance is None else restrict(batch.guidance, arm.guidance)
    batch, counts = replace(batch, guidance=guided), MismatchCounts()
    divergence = {length: DivergenceMetrics().to(device) for length in lengths}
    positions = dict.fromkeys(lengths, 0.0)
    longest = [len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in batch.sequences()]
    for part in plan_microbatches(longest, 32_768 if device.type == "cuda" else 4096):
        micro = take(batch, part, device)
        rounding = None if micro.guidance is None else arm.rounding(micro.guidance)
        with torch.autocast(device.type, torch.bfloat16):
            logprobs = log_probs(policy, micro, rounding)
        for length in lengths:
            mask = micro.mask_BT & (micro.mask_BT.cumsum(-1) <= length)
            divergence[length].update(logprobs, micro.rollout_logprobs_BT, mask)
            positions[length] += position_sums(logprobs, micro.rollout_logprobs_BT, mask)
        if micro.guidance is not None:
            counts.merge(micro.guidance.mismatch)
    audit = _audit(arm, counts)
    if guided is not None and arm.rounding is not AuditedNearest:
        audit["bytes_per_token"] = guided.bytes_per_token
    return {n: {**_gaps(divergence[n]), **_slope(positions[n].tolist()), **audit} for n in lengths}  # type: ignore


def _gaps(divergence: DivergenceMetrics) -> dict[str, float]:
    values = divergence.compute()
    return {name: float(values[key]) for name, key in _GAPS.items()}


def _slope(sums: list[list[float]]) -> dict[str, Any]:
    slope = position_slope(sums)
    ends = {} if slope is None else {"slope": slope.per_doubling, "slope_low": slope.low, "slope_high": slope.high}
    return {**ends, "positions": position_curve(sums)}


def _audit(arm: Arm, counts: MismatchCounts) -> dict[str, float]:
    """Codes that differ and relative D_act over all audited sites; of an arm without guidance, what it used itself."""
    if not counts.sums:
        return {}
    values = audit_values(torch.stack(list(counts.sums.values())).sum(0).tolist())
    own = arm.rounding is AuditedNearest
    names = {"codes_before": "code_mismatch_before", "d_act_before": "d_act_rel_before"}
    names |= {} if own else {"codes_after": "code_mismatch_after", "d_act_after": "d_act_rel_after"}
    return {name: values[key] for name, key in names.items() if key in values}


def full_record(formats: dict[str, Any], sequences: int) -> QuantRecipe:
    """The recipe of a rollout that records the full codes of every site it quantises; four sequences are audited."""
    sites = [site for site in SITES if formats and QuantRecipe(**formats).site_format(site) != "none"]
    mode = "full" if sites else "none"
    return QuantRecipe(
        **formats, guidance=GuidanceConfig(mode=mode, sites=sites or None, audit_sequences=min(4, sequences))
    )
