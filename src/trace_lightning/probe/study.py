"""The measurements of a probe, part by part; each returns plain numbers, and none knows of the others.

    divergence     a rollout of the engine in one format; the trainer's arms on it; what the answers look like; speed
    same_tokens    the bf16 trajectories, forced through the trainer in one format: its error, without any rollout
    switches       the same with weights, activations, K or V alone
    layers         local errors (local.py), and the solo error of each layer
    quality        rewards of held-out problems
    sync           weights moved, engine synced: does it draw from the new ones?

Arms: `floor` bf16 on both sides; `naive` the trainer does not round; `qat` it rounds alike, on its own; `guided` as the
recipe would train; `full` all codes of all sites, which shows where the two sides part although inputs agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.metrics import DivergenceMetrics, layer_rows, position_curve, position_slope
from trace_lightning.metrics.positions import position_sums
from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.probe import outputs
from trace_lightning.probe.agreement import (
    Agreement,
    Arm,
    AuditedNearest,
    Score,
    compare,
    draw,
    full_record,
    make_trainer,
    micro_batches,
    policy_score,
)
from trace_lightning.probe.local import Only, grouped, local_errors, weight_outlier
from trace_lightning.probe.plan import ProbePlan
from trace_lightning.quantization.qat import QATState
from trace_lightning.quantization.rounding import Rounding
from trace_lightning.recipe import SITES, QuantRecipe
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rollout.base import Progress, RolloutEngine
from trace_lightning.rollout.microbatch import MicroBatch, collate_rollout, take
from trace_lightning.rollout.rewarding import Scorer
from trace_lightning.types import Completion, RolloutBatch, SamplingParams

SWITCHES: dict[str, tuple[bool, set[str]]] = {
    "weights": (True, set()),
    "activations": (False, set(SITES) - {"k", "v"}),
    "K": (False, {"k"}),
    "V": (False, {"v"}),
}
_SYNC_STEP = 2.0**-6  # relative: sixteen times less than a step of FP4, and far above what kernels differ by


@dataclass(kw_only=True)
class Study:
    """One model on its device, with the engine and the trainer's scoring that are under test."""

    plan: ProbePlan
    source: PreTrainedModel  # FP32 masters, unquantised
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    scorer: Scorer | None = None
    score: Score = policy_score
    attention: str = "sdpa"
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._trainers: dict[str, PreTrainedModel] = {}
        self._plain_logprobs: list[Tensor] | None = None

    def trainer(self, recipe: QuantRecipe) -> PreTrainedModel:
        """The trainer of `recipe`, made once."""
        name = str(replace(recipe, guidance=QuantRecipe().guidance))
        if name not in self._trainers:
            self._trainers[name] = make_trainer(self.source, recipe, attention=self.attention)
        return self._trainers[name]

    def arms(self, name: str) -> list[Arm]:
        """The arms of a format."""
        if name == "bf16":
            return [Arm("floor", quantised=False)]
        guidance, every = self.plan.guidance_of(name), full_record(self.plan.formats[name], 1).guidance
        if guidance is None:
            return [Arm("naive", quantised=False), Arm("qat")]
        return [
            Arm("naive", quantised=False),
            Arm("qat", every, AuditedNearest),
            Arm("guided", guidance),
            Arm("full", every),
        ]

    def rollout(self, name: str, sampling: SamplingParams) -> RolloutBatch:
        """Trajectories in one format, recorded in full."""
        recipe = full_record(self.plan.formats[name], len(self.plan.prompts) * self.plan.num_samples)
        where, samples = (self.engine, self.source, self.tokenizer, recipe, self.plan.prompts), self.plan.num_samples
        if self.source.device.type == "cuda":  # compile and capture before the clock runs
            draw(*where, replace(sampling, max_new_tokens=64), num_samples=samples)
        return draw(*where, sampling, num_samples=samples, progress=self.progress)

    def divergence(self, name: str) -> dict[str, Any]:
        """Trajectories in one format, and how far each arm is from them."""
        batch = self.rollout(name, self.plan.sampling)
        length, temperature = self.plan.sampling.max_new_tokens, self.plan.sampling.temperature
        arms: dict[str, Any] = {}
        windows: list[float] = []

        def keep_windows(micro: MicroBatch, logprobs: Tensor) -> None:
            for row, drawn in zip(logprobs, micro.mask_BT, strict=True):
                windows.extend(outputs.window_means(row[drawn].tolist()))

        for arm in self.arms(name):
            policy = self.trainer(self.plan.formats[name] if arm.quantised else QuantRecipe())
            seen = None if arm.quantised else keep_windows
            with _cached(policy):
                found = compare(policy, batch, arm, [length], temperature=temperature, score=self.score, seen=seen)
            arms[arm.name] = agreement_row(found[length])
        stats = batch.stats
        return {
            "arms": arms,
            "windows": windows,
            "outputs": outputs.describe(batch.completions),
            "texts": [completion.text[:2000] for completion in batch.completions[:4]],
            "speed": {
                "sequences": len(batch.completions),
                "tokens": stats["generated_tokens"],
                "decode_tokens_per_s": stats["generated_tokens"] / max(1e-9, stats["decode_seconds"]),
                "seconds": stats["seconds"],
                "preempted": stats["preempted"],
            },
            "version": [0, batch.policy_version],
            "sides": self._temperatures(batch) if name == "bf16" else None,
            "tokens": _plain(batch) if name == "bf16" else None,
        }

    def _temperatures(self, batch: RolloutBatch) -> dict[str, Any] | None:
        """Which temperature each side used: mean |difference| to our own log-probs at the sampling's and at 1."""
        sampling = self.plan.sampling
        if sampling.temperature == 1.0:
            return None
        policy, device = self.trainer(QuantRecipe()), self.source.device
        micro = take(batch, micro_batches(batch, device)[0][:2], device)
        predicted, gaps = micro.mask_BT[:, 1:], {}
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            trainer = self.score(policy, micro, sampling.temperature, None)[micro.mask_BT]
            hidden = final_hidden(policy, micro.token_ids_BT[:, :-1])[predicted]
            for label, temperature in (("own", sampling.temperature), ("one", 1.0)):
                targets, support = micro.token_ids_BT[:, 1:][predicted], micro.support_NK
                reference, _ = token_logprobs(
                    hidden, logits_head(policy), targets, temperature=temperature, support_NK=support
                )
                for side, values in (("trainer", trainer), ("rollout", micro.rollout_logprobs_BT[micro.mask_BT])):
                    gaps[f"{side}_{label}"] = float((values - reference).abs().mean())
        return gaps | {"temperature": sampling.temperature}

    def trajectories(self, tokens: dict[str, Any]) -> RolloutBatch:
        """The bf16 trajectories again, from what `divergence` stored."""
        completions = [
            Completion(token_ids=ids, logprobs=logprobs, finish_reason="length", policy_version=0)
            for ids, logprobs in zip(tokens["token_ids"], tokens["logprobs"], strict=True)
        ]
        batch = RolloutBatch(prompts=self.plan.prompts, num_generations=self.plan.num_samples)
        collate_rollout(batch, completions, self.tokenizer.pad_token_id or 0)  # type: ignore[arg-type]
        batch.advantages_B = torch.zeros(len(completions))
        return batch

    def same_tokens(self, recipe: QuantRecipe, batch: RolloutBatch, rounding: Rounding | None = None) -> dict[str, Any]:
        """The error of `recipe` on given tokens: the quantised trainer's log-probs against the unquantised one's."""
        device, policy = self.source.device, self.trainer(recipe)
        divergence, positions = DivergenceMetrics().to(device), torch.zeros(())
        if self._plain_logprobs is None:
            with _cached(self.trainer(QuantRecipe())):
                self._plain_logprobs = [scored for _, scored in self._scored(self.trainer(QuantRecipe()), batch, None)]
        with _cached(policy):
            pairs = zip(self._scored(policy, batch, rounding), self._plain_logprobs, strict=True)
            for (mask, scored), plain in pairs:
                divergence.update(scored, plain, mask)
                positions = positions.to(device) + position_sums(scored, plain, mask)
        metrics = {name: float(value) for name, value in divergence.compute().items()}
        return agreement_row(Agreement(metrics, positions.tolist(), {}, None))

    @torch.no_grad()
    def _scored(
        self, policy: PreTrainedModel, batch: RolloutBatch, rounding: Rounding | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        device, temperature = self.source.device, self.plan.sampling.temperature
        for part in micro_batches(batch, device):
            micro = take(batch, part, device)
            with torch.autocast(device.type, torch.bfloat16):
                yield micro.mask_BT, policy_score(policy, micro, temperature, rounding)

    def switches(self, recipe: QuantRecipe, batch: RolloutBatch) -> dict[str, Any]:
        """`same_tokens` with one part of `recipe` on at a time; parts that it does not quantise are left out."""
        found, qat = {}, qat_state(self.trainer(recipe))
        keep_all, keep_none = (lambda group: True), (lambda group: False)
        formats = {"weights": recipe.weights, "activations": recipe.activations, "K": recipe.kv_cache}
        for name, (weights, sites) in SWITCHES.items():
            if formats.get(name, recipe.kv_cache) == "none":
                continue
            with _without_weights(qat, keep_all if weights else keep_none):
                found[name] = self.same_tokens(recipe, batch, Only(sites))
        return found

    def layers(self, recipe: QuantRecipe, batch: RolloutBatch) -> list[dict[str, Any]]:
        """Per layer: local errors, K's channels, the largest weights, and its solo error on a part of the tokens."""
        policy, short = self.trainer(recipe), self._short(batch)
        qat = qat_state(policy)
        sequences = [torch.tensor(p.token_ids + c.token_ids[:-1]) for p, c in short.sequences()]
        measured = local_errors(policy, sequences)
        local, solo = grouped(measured.relative()), self._solo(recipe, short)
        rows = []
        for layer in range(len(qat.layout.layers)):
            weights = {
                group.site: weight_outlier(group) for group in qat.groups if group.layer == layer and group.weights
            }
            row = {"layer": layer, "errors": local.get(layer, {}), "weight_outliers": weights, **solo[layer]}
            if layer in measured.k_squares:
                row["k_channel"] = measured.k_outliers(layer)
            rows.append(row)
        return rows

    def _short(self, batch: RolloutBatch) -> RolloutBatch:
        """As many of the trajectories, cut, as have `layer_tokens` tokens together."""
        per = max(16, self.plan.settings.layer_tokens // len(batch.completions))
        kept = [replace(c, token_ids=c.token_ids[:per], logprobs=c.logprobs[:per]) for c in batch.completions]
        short = RolloutBatch(prompts=batch.prompts, num_generations=batch.num_generations)
        collate_rollout(short, kept, self.tokenizer.pad_token_id or 0)  # type: ignore[arg-type]
        short.advantages_B = torch.zeros(len(kept))
        return short

    def _solo(self, recipe: QuantRecipe, batch: RolloutBatch) -> list[dict[str, float]]:
        """Error of `recipe` with a single layer quantised, for each layer."""
        qat, saved = qat_state(self.trainer(recipe)), self._plain_logprobs
        self._plain_logprobs, found = None, []
        for layer in range(len(qat.layout.layers)):
            with _single_layer(qat, layer):
                row = self.same_tokens(recipe, batch)["metrics"]
            found.append({"solo_mean_abs_dlogp": row[MEAN], "solo_k3": row[K3]})
        self._plain_logprobs = saved
        return found

    def quality(self, name: str) -> dict[str, Any]:
        """Rewards of held-out problems, per question, and what the answers look like."""
        assert self.scorer is not None
        samples = self.plan.settings.heldout_samples
        batch = draw(
            self.engine,
            self.source,
            self.tokenizer,
            self.plan.formats[name],
            self.plan.heldout,
            self.plan.eval_sampling,
            num_samples=samples,
            progress=self.progress,
        )
        problems = [prompt.problem for prompt, _ in batch.sequences()]
        rewards, _, _ = self.scorer(batch.completions, problems)
        self.scorer.stop_if_all_failed()
        described = outputs.describe(batch.completions)
        return {"questions": outputs.per_question(rewards.tolist(), samples), "outputs": described}

    def sync(self) -> dict[str, Any]:
        """Move the weights as a training step would, sync, draw, and score with the weights before and after.

        The weights are put back. A gap to the new weights that exceeds the one to the old ones is an engine that did
        not take them over.
        """
        before = {name: p.detach().clone() for name, p in self.source.named_parameters()}
        plain, length = self.trainer(QuantRecipe()), min(32, self.plan.sampling.max_new_tokens)
        sampling = replace(self.plan.sampling, max_new_tokens=length)
        prompts, plan = self.plan.prompts[:2], (self.engine, self.source, self.tokenizer, QuantRecipe())
        generator, gaps = torch.Generator(self.source.device).manual_seed(self.plan.settings.seed + 1), {}
        try:
            draw(*plan, prompts, replace(sampling, max_new_tokens=1), version=1)
            with torch.no_grad():
                for parameter in self.source.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                    parameter.mul_(1 + _SYNC_STEP * noise)
            self.engine.load_weights(self.source.named_parameters(), version=2)
            drawn = self.engine.generate(prompts, sampling, num_samples=2)
            batch = RolloutBatch(prompts=prompts, num_generations=2, sampling=sampling)
            collate_rollout(batch, drawn.completions, self.tokenizer.pad_token_id or 0)  # type: ignore[arg-type]
            batch.advantages_B = torch.zeros(len(drawn.completions))
            for weights, label in ((None, "new"), (before, "old")):
                if weights is not None:
                    _restore(self.source, weights)
                found = compare(plain, batch, Arm("floor"), [length], temperature=sampling.temperature)[length]
                gaps[label] = found.metrics[MEAN]
        finally:
            _restore(self.source, before)
        return {**gaps, "version": drawn.completions[0].policy_version, "expected_version": 2}


MEAN, MAX = "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"
K3 = "rollout_corr/k3_kl"


def _restore(policy: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(weights[name])


def agreement_row(found: Agreement) -> dict[str, Any]:
    """An `Agreement` as plain numbers: metrics, curve over positions with its slope, audited sites."""
    slope = position_slope(found.positions)
    return {
        "metrics": found.metrics,
        "positions": position_curve(found.positions),
        "slope": None if slope is None else {"mean": slope.per_doubling, "low": slope.low, "high": slope.high},
        "sites": layer_rows(found.audit),
        "bytes_per_token": found.bytes_per_token,
    }


def _plain(batch: RolloutBatch) -> dict[str, Any]:
    return {
        "token_ids": [c.token_ids for c in batch.completions],
        "logprobs": [c.logprobs for c in batch.completions],
    }


def qat_state(policy: PreTrainedModel) -> QATState:
    """What `install_qat` put into a trainer."""
    state: QATState = policy.trace_qat  # type: ignore[assignment]
    return state


@contextmanager
def _cached(policy: PreTrainedModel) -> Iterator[None]:
    with qat_state(policy).cache_weights():
        yield


@contextmanager
def _without_weights(qat: QATState, keep: Callable[[Any], bool]) -> Iterator[None]:
    """Weights of groups that `keep` refuses are not quantised inside the block."""
    saved = [group.weights for group in qat.groups]
    for group in qat.groups:
        group.weights = group.weights if keep(group) else None
    try:
        yield
    finally:
        for group, weights in zip(qat.groups, saved, strict=True):
            group.weights = weights


@contextmanager
def _single_layer(qat: QATState, layer: int) -> Iterator[None]:
    """Only this layer rounds inside the block."""
    activations, formats = [group.activations for group in qat.groups], [kv.fmt for kv in qat.kvs]
    with ExitStack() as stack:
        stack.enter_context(_without_weights(qat, lambda group: group.layer == layer))
        for group in qat.groups:
            group.activations = group.activations if group.layer == layer else None
        for index, kv in enumerate(qat.kvs):
            kv.fmt = kv.fmt if index == layer else None
        try:
            yield
        finally:
            for group, fmt in zip(qat.groups, activations, strict=True):
                group.activations = fmt
            for kv, fmt in zip(qat.kvs, formats, strict=True):
                kv.fmt = fmt
