"""The Rollout callback: sync the weights, generate, score, fill the batch. The only place where text is drawn.

    on_train_batch_start   should_sync? -> engine.load_weights   engine.generate   rewards   batch filled in place
    on_validation_batch_start (test, predict)                    the same, with evaluation sampling

With `max_version_diff=1` a batch is drawn and scored while the one before it trains (rollout/ahead.py):

    on_train_batch_start   wait for this batch   engine.load_weights   begin the next one

One decision is meant to be overridden: `should_sync`. It is asked with the number of optimizer steps, never with the
batch index, so gradient accumulation cannot make a rollout stale unnoticed. Generating inside a dataset would:
Lightning prefetches one batch.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.callbacks.checks import (
    check_engine,
    check_loader,
    check_refills,
    check_structure,
    is_last_batch,
    warn_if_uncorrected,
)
from trace_lightning.callbacks.conversations import TaskConversations, stop_if_all_failed, task_of
from trace_lightning.callbacks.scorers import Reward, Scorers
from trace_lightning.callbacks.signals import ParentWatch, StopSignals
from trace_lightning.callbacks.standstill import Standstill
from trace_lightning.callbacks.step_values import StepValues
from trace_lightning.data import run_seed
from trace_lightning.metrics.scalars import host_scalars
from trace_lightning.models.sharding import Weights
from trace_lightning.module import PolicyModule
from trace_lightning.ranks import check_same_settings, is_joint, together
from trace_lightning.rollout.ahead import Ahead, hand_over
from trace_lightning.rollout.base import Generation, RolloutEngine
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.microbatch import collate_rollout
from trace_lightning.rollout.refill import DynamicSampling
from trace_lightning.rollout.sm_partition import SMPartition, partition_of
from trace_lightning.types import RolloutBatch, SamplingParams, TurnLimits

log = logging.getLogger(__name__)
_DEFAULT_SAMPLING = SamplingParams()
_DTYPES = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "bf16": torch.bfloat16, "16-true": torch.float16}


class Rollout(Callback):
    """Fills each batch with completions, log-probs and rewards before `training_step` sees it.

    Subclass it to change when weights are synced::

        class EveryOther(Rollout):
            def should_sync(self, optimizer_steps: int) -> bool:
                return optimizer_steps % 2 == 0

    Args:
        engine: draws the completions; default `LocalEngine()`.
        sampling: how, in training; default `SamplingParams()`. The run's seed (`seed_everything`) is mixed in.
        num_generations: completions per prompt (the group of GRPO).
        rewards: reward functions, as classes or as functions `(completion, problem) -> float | None`; default: the
            task's own.
        reward_weights: one per reward function, default 1 each; the reward is the weighted sum.
        eval_sampling: how, in validation, test and predict; default: as in training.
        num_generations_eval: completions per held-out prompt.
        mask_truncated_completions: do not learn from completions that hit the length limit.
        reward_workers: processes for rewards that do not run in this one (`RewardFn.in_process`); None chooses by the
            cores there are; 0 runs all rewards in this process, where a call that hangs cannot be cut off.
        reward_time_limit: seconds per reward call in a worker; a call beyond it is stopped and not scored.
        dynamic_sampling: draw other prompts in place of groups whose rewards are all equal; default: keep them.
        turns: limits of conversations, where the task has environments; default: `TurnLimits()`.
        max_version_diff: 0 draws every training batch from the weights that it trains; 1 draws it while the batch
            before trains, from the weights that one started from. Needs corrections (`model.corrections`).
        ahead_sms: SMs of a GPU that draw such a batch while the others train, a multiple of 8; default: about a
            quarter (32 of an H200's 132); 0 has both share all SMs. Without effect on a CPU or `max_version_diff=0`.

    Raises:
        ValueError: if an argument is out of range, or the trainer could not renormalise what `sampling` draws.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        sampling: SamplingParams = _DEFAULT_SAMPLING,
        num_generations: int = 8,
        rewards: list[Reward] | None = None,
        reward_weights: list[float] | None = None,
        eval_sampling: SamplingParams | None = None,
        num_generations_eval: int = 1,
        mask_truncated_completions: bool = False,
        reward_workers: int | None = None,
        reward_time_limit: float = 10.0,
        dynamic_sampling: DynamicSampling | None = None,
        turns: TurnLimits | None = None,
        max_version_diff: int = 0,
        ahead_sms: int | None = None,
    ) -> None:
        if max_version_diff not in (0, 1):
            raise ValueError(
                f"rollout.max_version_diff={max_version_diff}: 0 draws from the weights that are trained, 1 while the "
                "batch before trains; the engine holds one snapshot, so there is no more"
            )
        if ahead_sms is not None and ahead_sms < 0:
            raise ValueError(
                f"rollout.ahead_sms={ahead_sms}: a number of SMs, 0 to share all of them with training, or null for "
                "about a quarter"
            )
        for name, value in {"num_generations": num_generations, "num_generations_eval": num_generations_eval}.items():
            if value < 1:
                raise ValueError(f"rollout.{name}={value} must be at least 1")
        self.engine = engine or LocalEngine()
        self.sampling = sampling
        # Evaluation has no use for what the trainer wants recorded.
        self.eval_sampling = eval_sampling or dataclasses.replace(sampling, record_logprobs=0)
        self.num_generations, self.num_generations_eval = num_generations, num_generations_eval
        self.mask_truncated_completions = mask_truncated_completions
        self.dynamic_sampling, self.turns = dynamic_sampling, turns
        self.max_version_diff, self.ahead_sms = max_version_diff, ahead_sms
        self._conversations = TaskConversations(turns)
        self._standstill = Standstill()
        self._values = StepValues(ahead=max_version_diff > 0, refills=dynamic_sampling is not None)
        self.scorers = Scorers(rewards, reward_weights, reward_workers, reward_time_limit)
        self.progress: Callable[[int, int], None] | None = None  # a progress bar may hook in here and at the phases
        self.on_phase: Callable[[str], None] | None = None
        self.phase = "idle"
        self._rollouts = 0
        self._ready = False
        self._synced_at = -1
        self._widened = False
        self._ahead = Ahead()
        self._partition: SMPartition | None = None
        self._failures: dict[str, float] = {}  # of rewards, up to the batch that trains
        self._signals = StopSignals()
        self._watch: ParentWatch | None = None

    def should_sync(self, optimizer_steps: int) -> bool:
        """Whether the engine takes over the policy's weights before the next rollout. Default: whenever they moved."""
        return optimizer_steps != self._synced_at

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check what can be checked before any long work."""
        if not isinstance(pl_module, PolicyModule):
            raise ValueError(f"the Rollout callback needs a PolicyModule, got {type(pl_module).__name__}")
        if not self._ready:
            check_structure(self.engine, pl_module)
        if stage == "fit":
            self.sampling.check_trainable()
            pl_module.check_sampling(self.sampling)
            if self.num_generations == 1:
                # Most estimators compare completions of one prompt; let them say so now, not in step 1.
                pl_module.advantages(torch.zeros(1, 1))
            if self.dynamic_sampling is not None:
                check_refills(trainer, self.engine, self.num_generations)
            if self.max_version_diff:
                check_engine(self.engine)
                self._partition = partition_of(trainer.strategy.root_device, self.ahead_sms)
                if trainer.is_global_zero:
                    warn_if_uncorrected(pl_module)
        self.scorers.setup(task_of(trainer))
        self._conversations.setup(trainer, pl_module, self.engine)
        self._watch = self._watch or ParentWatch.start_for(trainer)
        check_same_settings(trainer, self._settings(trainer, pl_module))
        self._values.attach(pl_module, self.scorers.own.names)

    def _settings(self, trainer: pl.Trainer, module: PolicyModule) -> dict[str, Any]:
        """What must be alike on every rank."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        prompts = [prompt.token_ids for prompt in getattr(data, "train_prompts", [])]
        return {
            **{f"model.{name}": value for name, value in module.hparams.items()},
            "rollout.sampling": self.sampling,
            "rollout.num_generations": self.num_generations,
            "rollout.rewards": self.scorers.own.names,
            "rollout.turns": self.turns,
            "rollout.dynamic_sampling": self.dynamic_sampling,
            "rollout.max_version_diff": self.max_version_diff,
            "data.batch_size": getattr(data, "batch_size", None),
            "number of training prompts": len(prompts),
            "checksum of the training prompts": zlib.crc32(repr(prompts).encode()),
            "seed_everything": run_seed(),
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on several ranks stop together."""
        if self.max_version_diff:
            check_loader(trainer)
            self._ahead.enter(self._partition)
        self._signals.install(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ahead.stop()
        self._signals.restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let rank zero write its files before this rank is seen to have failed."""
        self._ahead.stop()
        self._signals.restore()
        if self._watch is not None and is_joint(trainer, exception):
            self._watch.linger_at_exit()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the thread that draws, the reward workers and the environments."""
        self._ahead.stop()
        self.scorers.close()
        self._conversations.close()

    def _ensure_engine(self, trainer: pl.Trainer, module: PolicyModule) -> None:
        if not self._ready:
            assert module.policy is not None
            dtype = _DTYPES.get(str(trainer.precision), torch.float32)
            self.engine.setup(module.policy, module.tokenizer, module.recipe, dtype=dtype)
            self._ready = True
            if self.max_version_diff and module.recipe.guidance.fallback:
                self._widened = True  # the default sites do not survive one optimizer step
            if self._widened and self.engine.widen_guidance():  # or it was, before the run was resumed
                log.info("guidance records every FP4 site")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: RolloutBatch, batch_idx: int) -> None:
        """Fill the batch; `training_step` receives the same object."""
        begin = time.perf_counter()
        self._end_ahead(trainer)
        waited = time.perf_counter() - begin
        self._sync(trainer, pl_module, batch)
        if not (self.max_version_diff and batch.rewards_B is not None):  # else it was drawn ahead
            begin = time.perf_counter()
            with together(trainer, self._signals.error):
                self._now(trainer, partial(self._draw, trainer, pl_module, batch, self._rollouts))
            waited += time.perf_counter() - begin
        self._rollouts += 1
        self._failures = self.scorers.own.metrics() | self._conversations.metrics(batch)
        if self.max_version_diff:
            batch.seconds["rollout_wait"] = waited
            batch.stats["version_diff"] = float(trainer.global_step - batch.policy_version)
            hand_over(batch.guidance)
            self._begin_ahead(trainer, pl_module)
        if self.mask_truncated_completions:
            assert batch.completion_mask_BT is not None
            cut = torch.tensor([completion.finish_reason == "length" for completion in batch.completions])
            batch.completion_mask_BT &= ~cut.unsqueeze(1)
        self._enter("train")

    def _draw(self, trainer: pl.Trainer, module: PolicyModule, batch: RolloutBatch, number: int) -> None:
        """Draw and score a training batch, the rollout `number` of the run."""
        seed = (run_seed() * 1_000_003 + self.sampling.seed) * 1_000_003 + number
        sampling = dataclasses.replace(self.sampling, seed=seed)
        self._fill(module, batch, sampling, self.num_generations, record=True)
        # Before refills: these may be a prompt or two, all of whose environments or rewards can fail in a healthy run.
        self.scorers.own.stop_if_all_failed()
        stop_if_all_failed(batch)
        if self.dynamic_sampling is not None:
            self._refill(trainer, module, batch, sampling)

    def _now(self, trainer: pl.Trainer, draw: Callable[[], None]) -> None:
        """Draw while the trainer waits."""
        if self.max_version_diff:
            self._ahead.run(draw, trainer.strategy.root_device)
        else:
            draw()

    def _begin_ahead(self, trainer: pl.Trainer, module: PolicyModule) -> None:
        """Draw the next batch while this one trains, unless this one is the last."""
        if not is_last_batch(trainer, module):
            batch = trainer.train_dataloader.peek()  # type: ignore[union-attr]
            self._ahead.begin(partial(self._draw, trainer, module, batch, self._rollouts), trainer.strategy.root_device)

    def _end_ahead(self, trainer: pl.Trainer) -> None:
        """Wait for what is drawn ahead. The loader hands out the batch, filled, when its turn comes."""
        if self._ahead.in_flight:
            with together(trainer, self._signals.error):
                self._ahead.end()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        """Log rewards, completions and throughput of the step."""
        values = host_scalars(self._values.of(trainer, pl_module, batch, self._failures))
        pl_module.log_dict(values, batch_size=len(batch.prompts))
        if trainer.is_global_zero and self.num_generations > 1 and pl_module.advantages.within_groups:
            self._standstill.observe(values)
        if pl_module.guidance_failed and pl_module.recipe.guidance.fallback and not self._widened:
            self._widen_guidance()
        self._enter("idle")

    def _widen_guidance(self) -> None:
        """The recorded sites do not hold the trainer to the rollout's codes: have all of them recorded from now on."""
        if self.engine.widen_guidance():
            self._widened = True
            log.warning(
                "guidance falls back to bits of every FP4 site, from the next rollout on (recipe.guidance.fallback)"
            )

    def _enter(self, phase: str) -> None:
        if self._ahead.is_behind:
            return
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def _evaluate(self, trainer: pl.Trainer, pl_module: Any, batch: RolloutBatch) -> None:
        spec, sampling, count = batch.evaluation, self.eval_sampling, self.num_generations_eval
        if spec is not None:
            sampling, count = spec.sampling or sampling, spec.num_generations
        self._end_ahead(trainer)
        self._sync(trainer, pl_module, batch)
        with together(trainer, self._signals.error):
            self._now(trainer, partial(self._fill, pl_module, batch, sampling, count, record=False))

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: RolloutBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fill a held-out batch with the rollout policy's answers."""
        self._evaluate(trainer, pl_module, batch)

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    # Lightning evaluates under inference_mode; what the engine allocates there could not be renewed in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _sync(self, trainer: pl.Trainer, module: PolicyModule, batch: RolloutBatch) -> None:
        """Hand the weights over, if it is time. Of a sharded policy a collective, so no part of what ranks do alone."""
        begin = time.perf_counter()
        self._ensure_engine(trainer, module)
        assert module.policy is not None
        if self.should_sync(trainer.global_step) or self.engine.policy_version < 0:
            self._enter("sync")
            self.engine.load_weights(Weights(module.policy), version=trainer.global_step)
            self._synced_at = trainer.global_step
        batch.seconds["sync"] = time.perf_counter() - begin

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill(
        self,
        module: PolicyModule,
        batch: RolloutBatch,
        sampling: SamplingParams,
        num_generations: int,
        *,
        record: bool,
    ) -> None:
        begin = time.perf_counter()
        self._enter("rollout")
        generation = self._generate(module, batch, sampling, num_generations, record=record)
        drawn = time.perf_counter()
        self._enter("reward")
        problems = [prompt.problem for prompt, _ in batch.sequences()]
        scored = self.scorers.of(batch)(batch.completions, problems, self._check)
        batch.rewards_B, batch.rewards_by_name, batch.reward_reasons = scored
        batch.seconds |= {"rollout": drawn - begin, "reward": time.perf_counter() - drawn}
        batch.policy_version = max((c.policy_version for c in generation.completions), default=-1)
        batch.guidance, batch.stats = generation.guidance, generation.stats

    def _refill(self, trainer: pl.Trainer, module: PolicyModule, batch: RolloutBatch, sampling: SamplingParams) -> None:
        """Dynamic sampling: other prompts of the data module for groups whose rewards are all equal."""
        assert self.dynamic_sampling is not None

        def draw(extra: RolloutBatch) -> None:
            self._fill(module, extra, sampling, self.num_generations, record=True)

        pool = trainer.datamodule.train_prompts  # type: ignore[attr-defined]
        seed = sampling.seed * 1_000_003 + trainer.global_rank
        self.dynamic_sampling.refill(batch, draw, pool, seed=seed, pad_token_id=module.tokenizer.pad_token_id)

    def _generate(
        self, module: PolicyModule, batch: RolloutBatch, sampling: SamplingParams, num_generations: int, *, record: bool
    ) -> Generation:
        generation, talk = Generation(completions=[]), self._conversations.of(batch)
        if batch.prompts:  # a rank may have none in the last batch of an evaluation
            turns: dict[str, Any] = {} if talk is None else {"conversations": talk}
            was_training, shared = module.training, self._ahead.is_behind
            if not shared:  # else the trainer is in the middle of a step
                module.eval()
            generation = self.engine.generate(
                batch.prompts,
                sampling,
                num_samples=num_generations,
                record_guidance=record,
                progress=self._advance,
                **turns,
            )
            if not shared:
                module.train(was_training)
        elif not getattr(self.engine, "keep_snapshot", True):
            self.engine.release()  # type: ignore[attr-defined]  # as `generate` does: ranks must agree on what to sync
        batch.num_generations, batch.sampling = num_generations, sampling
        batch.turn_limits = None if talk is None else talk.limits
        pad = module.tokenizer.pad_token_id
        collate_rollout(batch, generation.completions, pad)
        return generation

    def _advance(self, finished: int, total: int) -> None:
        """Called by the engine between windows of steps."""
        self._check()
        if self.progress is not None and not self._ahead.is_behind:
            self.progress(finished, total)

    def _check(self) -> None:
        """Leave what is drawn or scored, if the run was asked to stop."""
        self._signals.check()
        self._ahead.check()

    def state_dict(self) -> dict[str, Any]:
        """Number of rollouts so far, which seeds the next one, and whether guidance has fallen back to all sites."""
        return {"rollouts": self._rollouts, "widened": self._widened}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rollouts, self._widened = state_dict["rollouts"], state_dict.get("widened", False)
