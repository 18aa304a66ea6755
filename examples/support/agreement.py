"""What the studies here add to `trace_lightning.probe.agreement`: prompts, models by path, columns of a table."""

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_kernels import Quantized, unpack_codes
from trace_kernels.audit_codes import compare_codes
from trace_kernels.formats import e2m1_encode
from trace_kernels.round_values import Guide, guided_codes, round_values
from trace_lightning.metrics import audit_values, position_curve, position_slope
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.probe.agreement import (
    Agreement,
    Arm,
    AuditedNearest,
    compare,
    draw,
    off_grid,
    other_kernels,
    policy_score,
    restrict,
)
from trace_lightning.probe.agreement import full_record as record_all
from trace_lightning.quantization.rounding import GuidedRounding
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.microbatch import MicroBatch
from trace_lightning.types import Problem, Prompt, RolloutBatch, SamplingParams

__all__ = ["Arm", "AuditedNearest", "restrict"]
CHAT = (
    "Explain step by step how a bicycle stays upright, and compute 37*12.",
    "Write a story about a lighthouse keeper who learns to cook.",
)
_DLOGP = "sampling/sampling_logp_difference"
_GAPS = {"mean_abs_dlogp": f"{_DLOGP}/mean", "max_abs_dlogp": f"{_DLOGP}/max", "k3": "rollout_corr/k3_kl"}


class RolloutScales(GuidedRounding):
    """Takes the rollout's scales and rounds to nearest on them."""

    def codes(self, x: Tensor, guide: Guide, fmt: Any) -> Quantized:
        """The codes nearest on the scales of the guide, whose tokens all follow a row."""
        q = guided_codes(x, guide, fmt)
        return replace(q, codes=e2m1_encode(fmt.normalize(x, q.scale, q.outer)).flatten(-2))

    def guided_values(self, x: Tensor, fmt: Any, outer: Tensor | None, guide: Guide | None) -> Tensor:
        """Values of `codes`, in torch."""
        values = round_values(x, fmt, outer)
        if guide is not None:
            tokens = (guide.row >= 0).nonzero().squeeze(-1)
            values[tokens] = fmt.dequantize(self.codes(x[tokens], guide.followed(tokens), fmt), x.dtype)
        return values

    def audit_sums(self, x: Tensor, fmt: Any, guide: Guide, rolled: Tensor, entries: Tensor) -> Tensor:
        """Those of `codes`."""
        tokens = self.rows.audit_tokens
        x, guide = x[tokens], guide.followed(tokens)
        used = self.codes(x, guide, fmt)
        own = fmt.quantize(x, None if guide.per_token else used.outer)
        return compare_codes(x, used, unpack_codes(rolled[entries]), own, fmt).double().sum(0)


def make_trainer(path: str, recipe: QuantRecipe, device: torch.device) -> PreTrainedModel:
    """The policy in FP32 masters of its own, quantised as `recipe` says."""
    policy = load_policy(path, recipe, dtype=torch.float32).to(device).eval().requires_grad_(False)
    return other_kernels(policy)


def load_masters(path: str, device: torch.device, seed: int) -> PreTrainedModel:
    """The policy in FP32, moved off the BF16 grid of its checkpoint."""
    return off_grid(load_policy(path, QuantRecipe(), dtype=torch.float32), seed).to(device)


def prompt_texts(args: argparse.Namespace, tokenizer: Any) -> list[str]:
    """What the policy continues: `args.prompts`, in the template of a chat model."""
    if not tokenizer.chat_template:
        return args.prompts or ["12+34="]
    chats = [[{"role": "user", "content": text}] for text in args.prompts or CHAT]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


def roll_out(args: argparse.Namespace, source: PreTrainedModel, recipe: QuantRecipe) -> tuple[RolloutBatch, float]:
    """Draw `args.sequences` samples in equal shares of `args.prompts`; returns the batch and tokens per second."""
    tokenizer = load_tokenizer(args.model)
    prompts = [
        Prompt(token_ids=tokenizer(text)["input_ids"], problem=Problem(prompt=text), uid=uid)
        for uid, text in enumerate(prompt_texts(args, tokenizer))
    ]
    sampling = SamplingParams(max_new_tokens=max(args.lengths), ignore_eos=True, seed=args.seed)
    samples = max(1, args.sequences // len(prompts))
    batch = draw(LocalEngine(), source, tokenizer, recipe, prompts, sampling, num_samples=samples)
    return batch, batch.stats["generated_tokens"] / batch.stats["seconds"]


def log_probs(policy: PreTrainedModel, micro: MicroBatch, rounding: GuidedRounding | None) -> Tensor:
    """FP32 log-probs [B, T] of the drawn tokens, 0 elsewhere."""
    return policy_score(policy, micro, 1.0, rounding)


def measure(
    policy: PreTrainedModel, batch: RolloutBatch, arm: Arm, lengths: list[int], device: torch.device
) -> dict[int, dict[str, Any]]:
    """Score the rollout as `arm` does and compare; one row of numbers per length."""
    return {length: _row(arm, found) for length, found in compare(policy, batch, arm, lengths).items()}


def _row(arm: Arm, found: Agreement) -> dict[str, Any]:
    row: dict[str, Any] = {name: found.metrics[key] for name, key in _GAPS.items()}
    slope = position_slope(found.positions)
    ends = {} if slope is None else {"slope": slope.per_doubling, "slope_low": slope.low, "slope_high": slope.high}
    row |= {**ends, "positions": position_curve(found.positions), **_audit(arm, found)}
    return row if found.bytes_per_token is None else row | {"bytes_per_token": found.bytes_per_token}


def _audit(arm: Arm, found: Agreement) -> dict[str, float]:
    """Codes that differ and relative D_act over all audited sites; of an arm without guidance, what it used itself."""
    if not found.audit:
        return {}
    values = audit_values([sum(column) for column in zip(*found.audit.values(), strict=True)])
    own = arm.rounding is AuditedNearest
    names = {"codes_before": "code_mismatch_before", "d_act_before": "d_act_rel_before"}
    names |= {} if own else {"codes_after": "code_mismatch_after", "d_act_after": "d_act_rel_after"}
    return {name: values[key] for name, key in names.items() if key in values}


def full_record(formats: dict[str, Any], sequences: int) -> QuantRecipe:
    """The recipe of a rollout that records the full codes of every site it quantises; four sequences are audited."""
    return record_all(QuantRecipe(**formats), sequences)
