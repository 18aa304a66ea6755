"""`PolicyModule`: owns the policy and the RL loss, and turns one finished rollout into optimizer steps.

    RolloutBatch (filled by the Rollout callback)
      -> old log-probs, divergence of trainer and rollout          measured before the first update
      -> num_iterations x num_minibatches optimizer steps          each: micro-batches by token budget -> clip -> step

Optimisation is manual: one dataloader batch is several steps, and every micro-batch divides by the counts of its whole
step, so `max_tokens_per_microbatch` only trades memory for speed. Generation is not here (callbacks/rollout.py), and
neither are rewards: `state_dict` holds the policy and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoConfig, PreTrainedModel

from trace_lightning.hparams import from_plain, to_plain
from trace_lightning.metrics import StepMetrics, argmax_agreement, evaluation_values
from trace_lightning.metrics.scalars import host_scalars
from trace_lightning.metrics.tally import RankMeans
from trace_lightning.models.lora import LoraConfig, check_base, describe_base, import_peft
from trace_lightning.models.policy import check_same_model, load_policy, load_tokenizer, policy_structure
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.models.sharding import clip_gradients, free_after_backward, is_sharded, shard_policy
from trace_lightning.quantization.lora import adapter_parameters
from trace_lightning.ranks import together
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rl.advantages import AdvantageEstimator, GroupAdvantage
from trace_lightning.rl.clipped_losses import GRPO
from trace_lightning.rl.corrections import Correction, check_corrections
from trace_lightning.rl.lengths import LengthPenalty
from trace_lightning.rl.losses import GlobalCounts, PolicyLoss
from trace_lightning.rl.schedule import LRDecay, lr_factor
from trace_lightning.rollout.credit import assign_advantages
from trace_lightning.rollout.microbatch import MicroBatch, pad_plan, plan_microbatches, take
from trace_lightning.rollout.objective import Objective
from trace_lightning.rollout.reference import ReferenceConfig, ReferencePolicy
from trace_lightning.rollout.scoring import score, score_all
from trace_lightning.strategy import FSDP2Strategy
from trace_lightning.trainer_checks import check_trainer, keep_numbers_wide
from trace_lightning.types import RolloutBatch, SamplingParams

log = logging.getLogger(__name__)
_HEALTHY_MISMATCH = 0.01
_MAX_BAD_STEPS = 3  # optimizer steps in a row with a non-finite gradient before the run stops


class PolicyModule(pl.LightningModule):
    """A Hugging Face causal LM under reinforcement learning.

    Args:
        path: the model: a directory in Hugging Face format, `builtin:tiny-qwen3`, or `prepared:smollm2`.
        recipe: number formats of the rollout; with `recipe.trainer=qat` this module's forward rounds alike.
        loss: the policy loss; default `GRPO()`.
        advantages: from rewards to advantages; default `GroupAdvantage()`.
        corrections: importance weights or masks for the gap between rollout and trainer.
        length_penalty: added to the rewards before advantages; default none.
        reference: the frozen model of the loss's KL term; loaded only if the loss has one (`loss.beta` above 0).
        bypass_mode: take the rollout's log-probs for those of PPO's old policy: the clipped ratio itself then holds the
            gap between rollout and trainer, and no forward pass is spent on old log-probs.
        learning_rate: of AdamW, after warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        lr_decay: after the warm-up: `none`, `linear` or `cosine`, which reach 0 at `trainer.max_steps`.
        weight_decay: of AdamW; 0 for quantised weights, or small ones are pulled through the grid.
        betas: of AdamW.
        max_grad_norm: gradients are clipped to this global norm.
        num_iterations: passes over each rollout.
        num_minibatches: optimizer steps per pass.
        max_tokens_per_microbatch: padded tokens per forward pass; lower it when memory is short.
        attention: attention implementation of transformers for training.
        gradient_checkpointing: recompute activations in the backward pass.
        lora: train low-rank adapters over a frozen base instead of all weights; default none.

    Raises:
        ValueError: if the model cannot be found, or an argument is out of range.
    """

    def __init__(
        self,
        path: str,
        recipe: QuantRecipe | None = None,
        loss: PolicyLoss | None = None,
        advantages: AdvantageEstimator | None = None,
        corrections: list[Correction] | None = None,
        length_penalty: LengthPenalty | None = None,
        reference: ReferenceConfig | None = None,
        bypass_mode: bool = False,
        learning_rate: float = 1e-6,
        warmup_steps: int = 0,
        lr_decay: LRDecay = "none",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float = 1.0,
        num_iterations: int = 1,
        num_minibatches: int = 1,
        max_tokens_per_microbatch: int = 16384,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        super().__init__()
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.save_hyperparameters({name: to_plain(value) for name, value in arguments.items()})
        for name in (
            "num_iterations",
            "num_minibatches",
            "max_tokens_per_microbatch",
            "max_grad_norm",
            "learning_rate",
        ):
            if arguments[name] <= 0:
                raise ValueError(f"model.{name}={arguments[name]} must be above 0")
        if lr_decay not in get_args(LRDecay):
            raise ValueError(f"model.lr_decay={lr_decay!r}: choose one of {', '.join(get_args(LRDecay))}")
        self.automatic_optimization = False
        self.path, self.recipe = path, from_plain(recipe) or QuantRecipe()
        self.loss: PolicyLoss = from_plain(loss) or GRPO()
        self.advantages: AdvantageEstimator = from_plain(advantages) or GroupAdvantage()
        if not isinstance(self.advantages, AdvantageEstimator):
            raise ValueError(
                f"model.advantages={advantages!r} is no AdvantageEstimator: derive its class from that one"
            )
        self.corrections: list[Correction] = from_plain(corrections or [])
        self.length_penalty: LengthPenalty | None = from_plain(length_penalty)
        self.bypass_mode = bypass_mode
        check_corrections(self.corrections, self.loss, bypass_mode=bypass_mode)
        # No nn.Module, so neither state_dict nor the optimizer sees it.
        self.reference = ReferencePolicy(from_plain(reference) or ReferenceConfig(), path, attention)
        self.learning_rate, self.warmup_steps, self.lr_decay = learning_rate, warmup_steps, lr_decay
        self.weight_decay = weight_decay
        self.betas, self.max_grad_norm = (betas[0], betas[1]), max_grad_norm
        self.num_iterations, self.num_minibatches = num_iterations, num_minibatches
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.attention, self.gradient_checkpointing = attention, gradient_checkpointing
        self.lora: LoraConfig | None = from_plain(lora)
        if self.lora is not None:
            self.lora.check(self.recipe)
            import_peft()
        policy_structure(path, self.recipe, attention=attention, lora=self.lora)  # refuses what does not fit
        self.tokenizer = load_tokenizer(path)
        config = AutoConfig.from_pretrained(resolve_model_path(path))
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.policy: PreTrainedModel | None = None
        self.measured = StepMetrics()
        self._bad_steps = 0
        self._warned = False
        self.guidance_failed = False

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse sampling that records less than the loss needs.

        Raises:
            ValueError: a loss that needs the most likely tokens, without `record_logprobs`.
        """
        if self.loss.needs_topk and not sampling.record_logprobs:
            raise ValueError(
                f"model.loss={type(self.loss).__name__} needs the rollout's most likely tokens: set "
                "rollout.sampling.record_logprobs (e.g. 128), without top_k, top_p and min_p"
            )

    def configure_model(self) -> None:
        """Load the policy once, in FP32 masters; a frozen one in the precision it computes in."""
        if self.policy is None:
            frozen = self.lora is not None and self._trainer is not None
            narrow = frozen and str(self.trainer.precision).startswith("bf16")
            self.policy = load_policy(
                self.path,
                self.recipe,
                dtype=torch.bfloat16 if narrow else torch.float32,
                attention=self.attention,
                gradient_checkpointing=self.gradient_checkpointing,
                lora=self.lora,
                device=self.trainer.strategy.root_device if frozen else None,
            )
            self.shard()

    def shard(self) -> None:
        """Cut the policy over the ranks, where the strategy is FSDP2."""
        if self.device_mesh is not None and self.policy is not None:
            shard_policy(self.policy, self.device_mesh["data_parallel"], keep_gathered=self._keeps_gathered)

    @property
    def _keeps_gathered(self) -> bool:
        return isinstance(self.trainer.strategy, FSDP2Strategy) and self.trainer.strategy.keep_gathered

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Of a policy with adapters keep these alone, and a note of what they were trained over."""
        if self.lora is not None and self.policy is not None:
            kept = {f"policy.{name}" for name in adapter_parameters(self.policy)}
            checkpoint["state_dict"] = {key: t for key, t in checkpoint["state_dict"].items() if key in kept}
            checkpoint["lora_base"] = describe_base(self.policy, self.path)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model, or of adapters over another base, on every rank."""
        if "state_dict" not in checkpoint:
            return
        if self._trainer is not None:
            self.check_weights(checkpoint["state_dict"])
        if self.lora is not None and self.policy is not None:
            with nullcontext() if self._trainer is None else together(self.trainer):
                check_base(self.policy, self.path, checkpoint["lora_base"])
            frozen = self.state_dict()  # which Lightning looks for in what it loads
            checkpoint["state_dict"] = frozen | checkpoint["state_dict"]

    def check_weights(self, stored: Mapping[str, Tensor]) -> None:
        """Raise on every rank if these weights, of a checkpoint, are another model's."""
        assert self.policy is not None
        with together(self.trainer):
            check_same_model(stored, self.policy, self.path)

    def on_fit_start(self) -> None:
        """Load the reference, if the loss needs one, before the engine measures what memory is left."""
        if self.loss.needs_reference:
            assert self.policy is not None
            self.reference.load(self.policy, self.device)

    def on_train_start(self) -> None:
        """Say so where a resumed run goes on with another learning rate than the one it was given."""
        restored = self.optimizers().param_groups[0].get("initial_lr")  # type: ignore[union-attr]
        if restored is not None and restored != self.learning_rate:
            log.warning(
                "the optimizer of the checkpoint goes on with its learning rate, %g: model.learning_rate=%g has no "
                "effect. For another one start a new run from the exported weights: --model.path RUN/policy",
                *(restored, self.learning_rate),
            )

    def on_train_batch_start(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Number the loggers' rows by rollouts: after a resume Lightning's count depends on the hook that saved."""
        loop = self.trainer.fit_loop.epoch_loop
        loop._batches_that_stepped = loop.batch_progress.total.processed  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up and maybe a decay, stepped once per optimizer step."""
        assert self.policy is not None
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,  # type: ignore[arg-type]
            # On GPUs one kernel, without a temporary of the size of the weights; shards (DTensors) would be updated
            # one by one otherwise. A CPU keeps torch's default.
            fused=all(p.device.type == "cuda" for p in parameters) or None,
        )
        optimizer.register_load_state_dict_pre_hook(_fused_as_here)
        settings: Any = {"decay": self.lr_decay, "max_steps": self.trainer.max_steps}
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_factor(step, warmup_steps=self.warmup_steps, **settings)
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer this module is attached to."""
        trainer: pl.Trainer = super().trainer
        return trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        # On attaching, because Lightning's own complaint, which comes next, cannot name our arguments.
        if trainer is not None:
            check_trainer(trainer, adapters=self.lora is not None, decays=self.lr_decay != "none")
            keep_numbers_wide(trainer)
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """All optimizer steps of one rollout, and its metrics."""
        if batch.rewards_B is None or batch.sampling is None:
            raise ValueError("the batch holds no rollout: add the Rollout callback to the trainer")
        self.check_sampling(batch.sampling)
        begin = time.perf_counter()
        shaping = assign_advantages(
            batch, self.advantages, self.length_penalty, gather=self._gather, rank=self.global_rank
        )
        assert batch.completion_mask_BT is not None
        batch.completion_mask_BT &= ~batch.rewards_B.isnan().unsqueeze(1)  # not scored: not learned from
        multi_step = self.num_iterations * self.num_minibatches > 1
        old = self._logprobs(batch, self._score_policy) if multi_step and not self.bypass_mode else None
        ref = self._logprobs(batch, self.reference.score) if self.loss.needs_reference else None
        self.measured.begin()
        self.measured.add(shaping)
        for iteration in range(self.num_iterations):
            self._first_pass = iteration == 0
            for indices in self._minibatches(len(batch.completions), iteration):
                self._optimizer_step(batch, indices, old, ref)
        batch.seconds["train"] = time.perf_counter() - begin
        self._log_step(batch)

    def _gather(self, rewards_PG: Tensor) -> Tensor:
        gathered = self.all_gather(rewards_PG.to(self.device))
        assert isinstance(gathered, Tensor)
        return gathered

    def _minibatches(self, num_sequences: int, iteration: int) -> list[list[int]]:
        if self.num_minibatches > num_sequences:
            raise ValueError(
                f"model.num_minibatches={self.num_minibatches}, but a rollout has {num_sequences} sequences"
            )
        generator = torch.Generator().manual_seed(self.trainer.global_step * 1009 + iteration)
        order = torch.randperm(num_sequences, generator=generator)
        return [part.tolist() for part in order.tensor_split(self.num_minibatches)]

    def _plan(self, batch: RolloutBatch, indices: list[int]) -> list[list[int]]:
        sequences = list(batch.sequences())
        lengths = [len(sequences[i][0].token_ids) + len(sequences[i][1].token_ids) for i in indices]
        plan = [[indices[i] for i in part] for part in plan_microbatches(lengths, self.max_tokens_per_microbatch)]
        most = self.trainer.strategy.reduce(torch.tensor(len(plan), device=self.device), reduce_op="max")
        return pad_plan(plan, int(most))

    def _score_policy(self, micro: MicroBatch, *, temperature: float) -> Tensor:
        assert self.policy is not None
        return score(self.policy, micro, temperature=temperature)[0]

    @torch.no_grad()
    def _logprobs(self, batch: RolloutBatch, scorer: Callable[..., Tensor]) -> Tensor:
        """Log-probs of a whole rollout, of the policy before the first update or of the reference, [B, T].

        Empty micro-batches are scored too: every rank has to gather the layers of a sharded policy.
        """
        assert batch.token_ids_BT is not None
        assert batch.sampling is not None
        old = torch.zeros(batch.token_ids_BT.shape, device=self.device)
        for indices in self._plan(batch, list(range(len(batch.completions)))):
            micro = take(batch, indices, self.device)
            logprobs = scorer(micro, temperature=batch.sampling.temperature)
            if indices:
                old[torch.tensor(indices, device=self.device), : logprobs.shape[1]] = logprobs
        return old

    def _optimizer_step(self, batch: RolloutBatch, indices: list[int], old: Tensor | None, ref: Tensor | None) -> None:
        assert self.policy is not None
        assert batch.completion_mask_BT is not None
        assert batch.sampling is not None
        optimizer: Optimizer = self.optimizers()  # type: ignore[assignment]
        optimizer.zero_grad()
        self.measured.begin_update()
        counts = self._global_counts(batch.completion_mask_BT[indices], batch.max_drawn)
        qat: Any = self.policy.trace_qat
        with qat.cache_weights(keep=not is_sharded(self.policy)):
            plan = self._plan(batch, indices)
            for i, part in enumerate(plan):
                micro = take(batch, part, self.device)
                micro_old, micro_ref = (self._of(side, part, micro) for side in (old, ref))
                with self._gradients(last=i == len(plan) - 1):
                    loss = self._micro_loss(micro, micro_old, micro_ref, batch.sampling.temperature, counts)
                    # Ranks average their gradients; the loss is already divided by global counts.
                    self.manual_backward(loss * self.trainer.world_size)
        norm = clip_gradients(self.policy, self.max_grad_norm)
        self._guard(norm)
        if torch.isfinite(norm):
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr]
        one = torch.ones((), device=norm.device)
        skipped = (~torch.isfinite(norm)).float()
        self.measured.add({"grad_norm": (norm, one), "skipped_steps": (skipped, one), "loss": (one * 0, one)})

    def _gradients(self, *, last: bool) -> AbstractContextManager[Any]:
        """Block of one micro-batch. DDP sums gradients over ranks in the last; FSDP2 always does."""
        strategy = self.trainer.strategy
        if self._keeps_gathered:
            assert self.policy is not None
            free_after_backward(self.policy, last)
        return strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) and not last else nullcontext()

    def _guard(self, norm: Tensor) -> None:
        self._bad_steps = 0 if torch.isfinite(norm) else self._bad_steps + 1
        if self._bad_steps >= _MAX_BAD_STEPS:
            raise ValueError(
                f"the gradient was not finite in {_MAX_BAD_STEPS} optimizer steps in a row; the weights were not "
                "touched. Lower model.learning_rate, or look at the divergence metrics of the last steps."
            )

    @staticmethod
    def _of(logprobs_BT: Tensor | None, part: list[int], micro: MicroBatch) -> Tensor | None:
        """The rows of a micro-batch; zeros for an empty one, whose mask is empty too."""
        if logprobs_BT is None:
            return None
        return logprobs_BT[part, : micro.mask_BT.shape[1]] if part else torch.zeros_like(micro.rollout_logprobs_BT)

    def _micro_loss(
        self, micro: MicroBatch, old: Tensor | None, ref: Tensor | None, temperature: float, counts: GlobalCounts
    ) -> Tensor:
        assert self.policy is not None
        scores = score_all(self.policy, micro, temperature=temperature, entropy_gradient=self.loss.needs_entropy)
        old = scores.logprobs_BT.detach() if old is None else old
        outputs = Objective(self.loss, self.corrections, self.bypass_mode)(scores, micro, old, ref, counts)
        # The shares of a step's micro-batches add up to its loss; the step itself counts it once.
        loss = (outputs.loss.detach(), torch.zeros((), device=self.device))
        self.measured.add({**outputs.metrics, "loss": loss})
        if micro.guidance is not None:
            self.measured.add_audit(micro.guidance.mismatch)
        if self._first_pass:
            self.measured.compare(old, micro.rollout_logprobs_BT, micro.mask_BT)
            if scores.topk_logprobs_BTK is not None and self.num_minibatches == 1:  # else the weights may have moved
                agreement = argmax_agreement(scores.topk_logprobs_BTK.detach(), micro.mask_BT)
                self.measured.add({"sampling/argmax_agreement": agreement})
        return outputs.loss

    def _global_counts(self, mask_BT: Tensor, max_completion_length: int) -> GlobalCounts:
        own = GlobalCounts.from_mask(mask_BT, max_completion_length)
        pair = torch.tensor([own.num_tokens, own.num_sequences], device=self.device)
        tokens, sequences = self.trainer.strategy.reduce(pair, reduce_op="sum").tolist()
        return GlobalCounts(tokens, sequences, max_completion_length)

    def _log_step(self, batch: RolloutBatch) -> None:
        """Log what was measured in this step."""
        values = self.measured.compute(batch, partial(self.trainer.strategy.reduce, reduce_op="sum"), self.device)
        self._watch_guidance(float(values.get("guidance/code_mismatch_after", 0.0)))
        values["learning_rate"] = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log_dict(host_scalars(values), batch_size=len(batch.prompts))

    def _watch_guidance(self, mismatch: float) -> None:
        """Say once that guidance has stopped to work: nothing else in a run would show it at once.

        The Rollout callback sees `guidance_failed` and has more recorded, if `recipe.guidance.fallback` allows it.
        """
        self.guidance_failed = mismatch > _HEALTHY_MISMATCH
        if self.guidance_failed and not self._warned:
            self._warned = True
            steps = self.num_iterations * self.num_minibatches
            why = f" After the first of {steps} optimizer steps the weights are no longer the rollout's." * (steps > 1)
            bits = "recipe.guidance.mode=parity, " * (self.recipe.guidance.mode == "syndrome")
            log.warning(
                "guidance does not hold: %.1f %% of the audited FP4 codes differ from the rollout's (healthy: below "
                "%.0f %%).%s Guide every site (%srecipe.guidance.sites=[attn_in,o_in,mlp_in,down_in,k,v]), or take one "
                "optimizer step per rollout (model.num_iterations=1, model.num_minibatches=1).",
                100 * mismatch,
                100 * _HEALTHY_MISMATCH,
                why,
                bits,
            )

    def on_validation_epoch_start(self) -> None:
        self._means = RankMeans()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Held-out reward under the rollout policy (sampled as in training, or as the held-out set says)."""
        self._evaluate(batch, "heldout")

    def test_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        """As `validation_step`, under `test/`."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: RolloutBatch, prefix: str) -> None:
        if batch.rewards_B is None:
            raise ValueError("the batch holds no rollout: add the Rollout callback to the trainer")
        if batch.evaluation is not None:
            prefix = f"{prefix}/{batch.evaluation.name}"
        for name, (value, count) in evaluation_values(batch).items():
            self._means.add(f"{prefix}/{name}", float(value), count)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self._means.compute())

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: RolloutBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Prompt, completion and reward of each sequence."""
        rewards = [None] * len(batch.completions) if batch.rewards_B is None else batch.rewards_B.tolist()
        return [
            {"prompt": prompt.problem.prompt, "completion": completion.text, "reward": reward}
            for (prompt, completion), reward in zip(batch.sequences(), rewards, strict=True)
        ]


def _fused_as_here(optimizer: Optimizer, stored: dict[str, Any]) -> dict[str, Any]:
    """Optimizer states of a checkpoint, to go on with the kernel of this device: it need not be the checkpoint's."""
    groups = [{**group, "fused": optimizer.defaults["fused"]} for group in stored["param_groups"]]
    return {**stored, "param_groups": groups}
