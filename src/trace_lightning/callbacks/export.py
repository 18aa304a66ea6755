"""`HFExport`: leaves the trained policy as a directory that other tools load, `policy/`, beside the logs.

The trainer's rounding is a matter of the run, not of the weights: by default the plain model is saved, in the FP32 of
the masters (BF16 would move some weights onto other FP4 codes), with its tokenizer and generation config. It loads with
`AutoModelForCausalLM`, as `--model.path`, and in any program that reads such directories. With `format: nvfp4` the
rollout's own FP4 weights are saved instead, and `every_n_checkpoints` saves on the way. Of a policy with adapters
these are saved, in peft's format; with an FP4 format they are merged first.

What was left out: scales of FP4 inputs (W4A4), which have to be measured on texts; `trace-fit export` does that.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedModel

from trace_lightning.callbacks.folder import run_folder, stopped_by_user
from trace_lightning.export.adapters import adapters_in
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.fp4 import plan_fp4
from trace_lightning.export.record import ExportRecord, evaluation_of
from trace_lightning.export.source import Source, adapter_source, source_of
from trace_lightning.models.sharding import is_sharded, whole_copy
from trace_lightning.quantization.dialects import DIALECTS
from trace_lightning.quantization.lora import lora_state
from trace_lightning.ranks import is_joint, together


class HFExport(Callback):
    """Saves policy and tokenizer when `fit` ends, or is interrupted after at least one optimizer step.

    Args:
        dirname: the directory, below the run's folder.
        format: `hf`, plain weights in FP32; `nvfp4` or `mxfp4`, linears in FP4 and the rest in BF16.
        dialect: of FP4: `compressed-tensors` or `modelopt`.
        every_n_checkpoints: save with every n-th checkpoint as well, as `<dirname>-step<optimizer steps>`; None: never.

    Raises:
        ValueError: an argument out of range; when `fit` starts, if the model cannot be saved in that format, or if
            transformers would refuse to save its generation config.
    """

    def __init__(
        self,
        dirname: str = "policy",
        format: Literal["hf", "nvfp4", "mxfp4"] = "hf",
        dialect: str = "compressed-tensors",
        every_n_checkpoints: int | None = None,
    ) -> None:
        if every_n_checkpoints is not None and every_n_checkpoints < 1:
            raise ValueError(f"every_n_checkpoints={every_n_checkpoints} must be at least 1, or null")
        self.dirname, self.every_n_checkpoints = dirname, every_n_checkpoints
        self.how = ExportFormat(format=format, dialect=dialect, activations="none")
        self._folder: Path | None = None
        self._first_step: int | None = None
        self._checkpoints = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)
        # Last, behind RunSummary, whose rewards the model card quotes. A new list, for Lightning walks the old one now.
        trainer.callbacks = [*(c for c in trainer.callbacks if c is not self), self]  # type: ignore[attr-defined]

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
        if self.how.format in ("nvfp4", "mxfp4"):
            plan_fp4(self._source(trainer, pl_module), DIALECTS[self.how.dialect], self.how.format, "none", None)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save beside every n-th checkpoint of this process."""
        self._checkpoints += 1
        if self.every_n_checkpoints is not None and self._checkpoints % self.every_n_checkpoints == 0:
            name = f"{self.dirname}-step{trainer.global_step:06d}"
            policy = _gathered(trainer, pl_module.policy)
            with together(trainer):
                self._export(trainer, pl_module, policy, name)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._export(trainer, pl_module, _gathered(trainer, pl_module.policy), self.dirname)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """An interrupted run leaves its policy as well; after an error the checkpoint has to do."""
        learned = self._first_step is not None and trainer.global_step > self._first_step
        joint = is_joint(trainer, exception) or not is_sharded(pl_module.policy)  # gathering is a collective
        if trainer.state.fn == "fit" and learned and stopped_by_user(exception) and joint:
            self._export(trainer, pl_module, _gathered(trainer, pl_module.policy), self.dirname)

    def _export(self, trainer: pl.Trainer, module: Any, policy: PreTrainedModel, name: str) -> None:
        if self._folder is not None and trainer.is_global_zero:
            source = self._source(trainer, module, policy)
            how = self.how
            if source.adapters is not None and how.format == "hf":
                how = dataclasses.replace(how, format="adapter")
            export_source(source, self._folder / name, how, overwrite=True)

    def _source(self, trainer: pl.Trainer, module: Any, policy: PreTrainedModel | None = None) -> Source:
        step = trainer.global_step
        _, evaluation = (step, {}) if self._folder is None else evaluation_of(self._folder, step)
        record = ExportRecord(recipe=module.recipe, base_model=module.path, steps=step, evaluation=evaluation)
        policy = policy or module.policy
        adapters = adapters_in(policy, module.path)
        if adapters is not None:
            state = lora_state(policy)
            assert state is not None
            record.base_identity = state.base_identity
            return adapter_source(adapters, None, record, self._folder, "the policy")
        return source_of(policy, module.tokenizer, record, self._folder)


def _gathered(trainer: pl.Trainer, policy: PreTrainedModel) -> PreTrainedModel:
    """A plain policy; of a sharded one a whole copy, on rank zero. Collective for the latter."""
    return whole_copy(policy, keep=trainer.is_global_zero) if is_sharded(policy) else policy
