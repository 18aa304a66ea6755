"""What is refused or said at the start of a run about how its rollouts are drawn: of this model, refilled, or ahead.

And with which batch a run ends, so that nothing is drawn that nobody trains on.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from trace_lightning.loading import SuccessCurriculum
from trace_lightning.models.policy import policy_structure
from trace_lightning.module import PolicyModule
from trace_lightning.rollout.base import RolloutEngine

log = logging.getLogger(__name__)


def check_engine(engine: RolloutEngine) -> None:
    """Refuse an engine that gives its memory to the trainer.

    Raises:
        ValueError: naming the setting, and the way out.
    """
    if not getattr(engine, "keep_snapshot", True):
        raise ValueError(
            "rollout.max_version_diff=1 draws while the trainer works, and engine.keep_snapshot=false gives the "
            "engine's memory to the trainer: set it to true, or max_version_diff to 0"
        )


def check_structure(engine: RolloutEngine, module: PolicyModule) -> None:
    """Let the engine refuse model and recipe before a weight is loaded.

    Raises:
        ValueError: what `RolloutEngine.check` refuses.
    """
    structure = policy_structure(module.path, module.recipe, attention=module.attention, lora=module.lora)
    engine.check(structure, module.tokenizer, module.recipe)


def warn_if_uncorrected(module: PolicyModule) -> None:
    """Say that nothing makes up for the age of the completions; whoever measures what a correction is worth goes on."""
    weighed = any(correction.reweights for correction in module.corrections)
    if not (weighed or module.bypass_mode or module.loss.corrects_rollout):
        log.warning(
            "rollout.max_version_diff=1: completions are one rollout old when they are trained on, and nothing weighs "
            "them by the ratio of the two policies. Set model.corrections (e.g. TIS) or model.bypass_mode."
        )


def check_loader(trainer: pl.Trainer) -> None:
    """Refuse a training loader that cannot tell what comes next.

    Raises:
        ValueError: for any but a `PromptLoader` or one with its `peek`.
    """
    if not hasattr(trainer.train_dataloader, "peek"):
        raise ValueError(
            "rollout.max_version_diff=1 needs the next batch's prompts, and the training loader has no `peek`: pass a "
            "PromptDataModule, or set max_version_diff to 0"
        )


def is_last_batch(trainer: pl.Trainer, module: PolicyModule) -> bool:
    """Whether the run ends with this batch, as far as that is known: early stopping and time limits are not."""
    steps = module.num_iterations * module.num_minibatches
    if 0 <= trainer.max_steps <= trainer.global_step + steps:
        return True
    epochs = trainer.max_epochs
    return trainer.is_last_batch and epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs


def check_refills(trainer: pl.Trainer, engine: RolloutEngine, num_generations: int) -> None:
    """Refuse dynamic sampling where it has nothing to choose from, or nothing to draw with.

    Raises:
        ValueError: naming the setting, and the way out.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if num_generations == 1:
        raise ValueError(
            "rollout.dynamic_sampling keeps groups whose rewards differ, and groups of one never do: set "
            "rollout.num_generations to 2 or more, or dynamic_sampling to null"
        )
    if not getattr(data, "train_prompts", None):
        raise ValueError(
            "rollout.dynamic_sampling draws from the data module's `train_prompts`, and there are none: pass a "
            "PromptDataModule, or a data module with that attribute"
        )
    if isinstance(getattr(data, "order", None), SuccessCurriculum):
        raise ValueError(
            "rollout.dynamic_sampling keeps groups that are solved now and then, and data.order=SuccessCurriculum "
            "would take that for the success of their sources: use one of the two"
        )
    if not getattr(engine, "keep_snapshot", True):
        raise ValueError(
            "rollout.dynamic_sampling draws several times from the same weights, and engine.keep_snapshot=false "
            "frees them after the first: set it to true, or dynamic_sampling to null"
        )
