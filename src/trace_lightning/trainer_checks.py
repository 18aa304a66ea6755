"""What a `PolicyModule` asks of the Lightning trainer that it is attached to.

Lightning has flags and strategies that this library would ignore, or could not resume from. They are refused when the
two meet, before anything is loaded, and in words that name our own arguments, which Lightning's complaints cannot.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from trace_lightning.strategy import FSDP2Strategy


def check_trainer(trainer: pl.Trainer, *, adapters: bool, decays: bool) -> None:
    """Refuse strategies that are not supported, flags that would not be honoured, and a decay without an end.

    Raises:
        ValueError: naming the flag and what to set instead.
    """
    if str(trainer.precision) == "16-mixed":
        raise ValueError("trainer.precision=16-mixed scales gradients before clipping; use bf16-mixed or 32-true")
    if trainer.gradient_clip_val:
        raise ValueError("trainer.gradient_clip_val is not used here: set model.max_grad_norm instead")
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            "trainer.accumulate_grad_batches is not used here: a rollout is cut by model.max_tokens_per_microbatch, "
            "and its size is data.batch_size x rollout.num_generations"
        )
    if decays and trainer.max_steps <= 0 and trainer.state.fn == TrainerFn.FITTING:
        raise ValueError("model.lr_decay ends at trainer.max_steps, which is not set: set it, or model.lr_decay=none")
    _check_strategy(trainer, adapters=adapters)


def _check_strategy(trainer: pl.Trainer, *, adapters: bool) -> None:
    """Refuse what this library cannot run or resume.

    Raises:
        ValueError: tensor parallelism, checkpoints as folders of shards, or a frozen base cut over ranks.
    """
    strategy = trainer.strategy
    if adapters and isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            "model.lora holds its base packed and frozen, which trainer.strategy=fsdp2 cannot cut over ranks: use "
            "trainer.strategy=ddp, where each rank holds a copy and only adapters have gradients and optimizer states"
        )
    if not isinstance(strategy, ModelParallelStrategy) or isinstance(strategy, FSDP2Strategy):
        return
    if strategy._tensor_parallel_size != 1 or strategy._save_distributed_checkpoint:
        raise ValueError(
            "trainer.strategy=ModelParallelStrategy splits single layers over GPUs and writes shards by default, and "
            "neither is supported: use trainer.strategy=fsdp2, or set tensor_parallel_size=1 and "
            "save_distributed_checkpoint=false"
        )


def keep_numbers_wide(trainer: pl.Trainer) -> None:
    """`bf16-true` is about weights here. Lightning would also narrow rewards, log-probs and what is made in a step."""
    if isinstance(trainer.precision_plugin, HalfPrecision):
        plugin: Any = trainer.precision_plugin
        plugin.convert_input, plugin.forward_context = (lambda batch: batch), nullcontext
