"""`HFExport`: leaves the trained policy as a Hugging Face directory, `policy/`, beside the logs.

The trainer's rounding is a matter of the run, not of the weights: what is saved is the plain model, in the FP32 of the
masters (BF16 would move some weights onto other FP4 codes), with its tokenizer and generation config. It loads with
`AutoModelForCausalLM`, as `--model.path`, and in any program that reads such directories. Under LoRA it is the adapter
in peft's format. Quantised checkpoints are left to an export of their own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.callbacks.folder import run_folder, stopped_by_user
from trace_lightning.models.lora import save_adapter
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.models.sharding import is_sharded, whole_copy
from trace_lightning.quantization.lora import lora_state
from trace_lightning.ranks import is_joint


class HFExport(Callback):
    """Saves policy and tokenizer when `fit` ends, or is interrupted after at least one optimizer step.

    Args:
        dirname: the directory, below the run's folder.

    Raises:
        ValueError: when `fit` starts, if transformers would refuse to save the model's generation config.
    """

    def __init__(self, dirname: str = "policy") -> None:
        self.dirname = dirname
        self._folder: Path | None = None
        self._first_step: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Find out now, and not after the training, whether the model can be saved."""
        self._first_step = trainer.global_step
        try:
            pl_module.policy.generation_config.validate(strict=True)
        except ValueError as error:
            raise ValueError(
                f"the generation_config.json of {pl_module.path} cannot be saved again: {error}. Correct the file, or "
                "train without the HFExport callback."
            ) from error

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._export(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """An interrupted run leaves its policy as well; after an error the checkpoint has to do."""
        learned = self._first_step is not None and trainer.global_step > self._first_step
        joint = is_joint(trainer, exception) or not is_sharded(pl_module.policy)  # gathering is a collective
        if trainer.state.fn == "fit" and learned and stopped_by_user(exception) and joint:
            self._export(trainer, pl_module)

    def _export(self, trainer: pl.Trainer, module: Any) -> None:
        if self._folder is None:
            return
        policy = whole_copy(module.policy, keep=trainer.is_global_zero) if is_sharded(module.policy) else module.policy
        if trainer.is_global_zero:
            export_policy(policy, module.tokenizer, self._folder / self.dirname, base=module.path)


def export_policy(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, *, base: str | None = None
) -> None:
    """Write model, generation config and tokenizer into `directory`, which is replaced as a whole.

    Of a policy with adapters these take the model's place, in peft's format, with `base` as the path they belong to.
    The files are complete before the directory gets its name, so a run killed here leaves the old one or the new one.
    """
    part = directory.with_name(f"{directory.name}.part")
    old = directory.with_name(f"{directory.name}.old")
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    if lora_state(policy) is None:
        policy.save_pretrained(part)
    else:
        save_adapter(policy, part, str(policy.config.name_or_path if base is None else resolve_model_path(base)))
    tokenizer.save_pretrained(part)
    if directory.exists():
        directory.rename(old)
    part.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
