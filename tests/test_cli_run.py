"""Short runs through the command line: what they leave behind, also when resumed, interrupted or broken."""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from transformers import AutoModelForCausalLM

import scripts
from trace_lightning.callbacks import (
    CompletionsLogger,
    HFExport,
    RolloutProgressBar,
    RunCheckpoint,
    RunReport,
    RunSummary,
)
from trace_lightning.cli import RunCSVLogger, RunTensorBoardLogger, TraceCLI, default_callbacks, main, run_loggers

ROOT = Path(__file__).parents[1]
SMALL = ["--config", str(ROOT / "configs" / "grpo_fp4.yaml"), "--run_name", "r"]
SMALL += ["--data.batch_size", "2", "--data.heldout_size", "4", "--rollout.num_generations", "2"]
EVERY = ["--trainer.callbacks+=CompletionsLogger", "--trainer.callbacks.every_n_steps=1"]
LEFT = {"config.yaml", "metrics.csv", "summary.json", "curves.png", "guidance_layers.csv"}
LEFT |= {"completions.jsonl", "report.html", "run.json", "checkpoints", "policy"}


def fit(runs: Path, *arguments: str, steps: int = 2) -> Path:
    """Run and return the folder of the run."""
    before = set(runs.glob("r/*"))
    TraceCLI(args=["fit", *SMALL, "--trainer.max_steps", str(steps), "--runs_dir", str(runs), *arguments])
    return next(iter(set(runs.glob("r/*")) - before), runs)


def completions(folder: Path, split: str = "train") -> dict[int, list[Any]]:
    """(prompt, completion) pairs by step."""
    found: dict[int, list[Any]] = {}
    for line in (folder / "completions.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["split"] == split:
            found.setdefault(entry["step"], []).append((entry["prompt"], entry["completion"]))
    return found


def logged_steps(folder: Path) -> list[int]:
    """The `step` of every training row of metrics.csv."""
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get("reward")]


def page_data(folder: Path) -> dict[str, Any]:
    """What the scripts of report.html draw."""
    text = (folder / "report.html").read_text()
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Four steps in one go."""
    return fit(tmp_path_factory.mktemp("whole"), *EVERY, steps=4)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[Path, Path]:
    """Two steps, and two more from the checkpoint."""
    runs = tmp_path_factory.mktemp("parts")
    first = fit(runs, *EVERY, steps=2)
    return first, fit(runs, *EVERY, "--ckpt_path", str(first / "checkpoints" / "last.ckpt"), steps=4)


class TestFinished:
    def test_everything_is_there(self, whole) -> None:
        assert {path.name for path in whole.iterdir()} == LEFT | {"tensorboard"}
        assert not list(whole.rglob("hparams.yaml"))
        assert [path.name for path in (whole / "checkpoints").iterdir()] == ["last.ckpt"]

    def test_summary(self, whole) -> None:
        summary = json.loads((whole / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["steps"] == summary["rollouts"] == 4
        assert summary["heldout"]["first_step"] == 0
        assert summary["heldout"]["last_step"] == 4  # the interval of 40 does not end with the run, yet it was measured
        recipe = {"weights": "nvfp4", "activations": "nvfp4", "kv_cache": "nvfp4", "guidance": "parity"}
        assert recipe.items() <= summary["recipe"].items()
        assert summary["task"] == "TwoDigitAddition"
        assert summary["seed"] == 0
        assert summary["seconds"] > 0
        assert summary["throughput"]["rollout_tokens_per_s"] > 0
        assert summary["versions"]["torch"] == torch.__version__

    def test_summary_agrees_with_the_csv(self, whole) -> None:
        rows = list(csv.DictReader((whole / "metrics.csv").read_text().splitlines()))
        summary = json.loads((whole / "summary.json").read_text())
        rewards = [float(row["reward"]) for row in rows if row["reward"]]
        assert summary["reward"]["last"] == pytest.approx(sum(rewards) / 4)
        heldout = {int(row["step"]): float(row["heldout/reward"]) for row in rows if row["heldout/reward"]}
        assert heldout == pytest.approx({0: summary["heldout"]["first"], 4: summary["heldout"]["last"]})

    def test_report(self, whole) -> None:
        data = page_data(whole)
        curves = {curve["label"]: curve for curve in data["charts"][0]["curves"]}
        assert curves["training"]["x"] == [0, 1, 2, 3]
        assert curves["held out"]["x"] == [0, 4]
        assert {chart["title"] for chart in data["charts"]} >= {"Trainer against rollout", "Time per step", "Speed"}
        assert data["reload"] == 0
        lines = [json.loads(line) for line in (whole / "completions.jsonl").read_text().splitlines()]
        assert [sample["id"] for sample in data["samples"]] == list(range(1, len(lines) + 1))
        facts = json.loads((whole / "run.json").read_text())
        assert (facts["status"], facts["policy_version"], facts["resumed_from"]) == ("finished", 4, None)
        assert facts["memory_gb"]["of the process"] > 0.1

    def test_tokens_are_the_completion(self, whole) -> None:
        for line in map(json.loads, (whole / "completions.jsonl").read_text().splitlines()):
            assert "".join(text for text, _ in line["tokens"]) == line["completion"]
            assert len(line["tokens"]) == line["num_tokens"]
            mean = sum(logprob for _, logprob in line["tokens"]) / line["num_tokens"]
            assert mean == pytest.approx(line["mean_logprob"], abs=1e-4)

    def test_policy_is_the_checkpoint(self, whole) -> None:
        model = AutoModelForCausalLM.from_pretrained(whole / "policy")
        stored = weights(whole)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, stored[f"policy.{name}"])


class TestResumed:
    def test_is_the_unbroken_run(self, whole, parts) -> None:
        first, second = parts
        assert list(completions(first)) == [0, 1]
        assert completions(first) | completions(second) == completions(whole)
        for name, value in weights(whole).items():
            assert torch.equal(value, weights(second)[name]), name

    def test_rows_are_numbered_on(self, whole, parts) -> None:
        first, second = (logged_steps(folder) for folder in parts)
        assert first + second == logged_steps(whole)

    def test_summary_has_the_whole_history(self, whole, parts) -> None:
        one, two = (json.loads((folder / "summary.json").read_text()) for folder in (whole, parts[1]))
        for name in ("reward", "heldout", "divergence", "guidance_sites", "per_position", "steps", "rollouts"):
            assert two[name] == one[name]

    def test_report_says_where_it_begins(self, parts) -> None:
        page = (parts[1] / "report.html").read_text()
        assert f"resumed from {parts[0] / 'checkpoints' / 'last.ckpt'}: curves begin at step" in page

    def test_command_line_wins_over_the_checkpoint(self, parts, tmp_path, caplog) -> None:
        """But not over its optimizer, which is said."""
        arguments = ["--ckpt_path", str(parts[0] / "checkpoints" / "last.ckpt"), "--model.max_grad_norm", "0.5"]
        arguments += ["--model.learning_rate", "1e-5"]
        cli = TraceCLI(args=["fit", *SMALL, "--trainer.max_steps", "3", "--runs_dir", str(tmp_path), *arguments])
        assert cli.model.max_grad_norm == 0.5
        assert "goes on with its learning rate, 0.0003: model.learning_rate=1e-05 has no effect" in caplog.text


class StopInTheMiddle(Callback):
    """Raises after the rollout of a step, before its update."""

    def __init__(self, exception: BaseException, at: int = 2) -> None:
        self.exception, self.at = exception, at

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == self.at:
            raise self.exception


class TestStopped:
    @staticmethod
    def stopped(runs: Path, exception: BaseException, expected: type[BaseException]) -> Path:
        arguments = ["fit", *SMALL, *EVERY, "--trainer.max_steps", "4", "--runs_dir", str(runs)]
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(expected):
                TraceCLI(args=arguments, trainer_defaults={"callbacks": [StopInTheMiddle(exception)]})
        finally:
            signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C from here on
        return runs / "r" / "version_0"

    def test_interrupted_step_is_repeated_on_resume(self, whole, tmp_path) -> None:
        folder = self.stopped(tmp_path, KeyboardInterrupt(), SystemExit)
        assert {path.name for path in folder.iterdir()} >= LEFT
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["steps"], summary["error"]) == ("interrupted", 2, None)
        assert "r/version_0: interrupted</title>" in (folder / "report.html").read_text()
        resumed = fit(tmp_path, *EVERY, "--ckpt_path", str(folder / "checkpoints" / "last.ckpt"), steps=4)
        assert completions(folder) | completions(resumed) == completions(whole)
        assert logged_steps(folder) + logged_steps(resumed) == logged_steps(whole)
        for name, value in weights(whole).items():
            assert torch.equal(value, weights(resumed)[name]), name

    def test_failed(self, tmp_path) -> None:
        folder = self.stopped(tmp_path, RuntimeError("out of memory"), RuntimeError)
        assert {path.name for path in folder.iterdir()} >= LEFT - {"policy"}
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "failed"
        assert summary["error"] == "RuntimeError: out of memory"
        page = (folder / "report.html").read_text()
        assert "<p class=stop>RuntimeError: out of memory</p>" in page
        assert page_data(folder)["reload"] == 0
        assert weights(folder)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal(self, tmp_path, number: signal.Signals) -> None:
        log = tmp_path / "log"
        arguments = ["fit", *SMALL, "--runs_dir", str(tmp_path), "--trainer.max_steps", "100000"]
        process = scripts.start(main, *arguments, folder=tmp_path, out=log, err=log)
        try:
            metrics = tmp_path / "r" / "version_0" / "metrics.csv"
            deadline = time.monotonic() + 120
            while process.is_alive() and time.monotonic() < deadline:
                if metrics.exists() and len(metrics.read_text().splitlines()) > 3:
                    break
                time.sleep(0.1)
            os.kill(process.pid, number)
            process.join(60)
            assert process.exitcode == (1 if number == signal.SIGINT else 128 + number), log.read_text()
        finally:
            process.kill()
        folder = tmp_path / "r" / "version_0"
        assert {path.name for path in folder.iterdir()} >= LEFT, (tmp_path / "log").read_text()
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert weights(folder)


class Peek(Callback):
    """Keeps the page as it is at the end of every step, and warns once."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.pages.append((Path(trainer.log_dir) / "report.html").read_text())
        logging.getLogger("trace_lightning.module").warning("<made up> warning")


def test_report_follows_a_run_and_a_page_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("trace_lightning.callbacks.report._MAX_SHARE", 1.0)  # of steps as short as these
    peek = Peek()
    arguments = ["fit", *SMALL, "--trainer.max_steps", "3", "--runs_dir", str(tmp_path), *EVERY]
    TraceCLI(args=arguments, trainer_defaults={"callbacks": [peek, RunReport(every_seconds=1e-6)]})
    folder = tmp_path / "r" / "version_0"
    for step, page in enumerate(peek.pages):
        assert "r/version_0: running</title>" in page
        data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
        assert data["reload"] == 10
        curves = {curve["label"]: curve["x"] for curve in data["charts"][0]["curves"]}
        assert curves.get("training", []) == list(range(step))
    assert "step 1: &lt;made up&gt; warning" in (folder / "report.html").read_text()
    assert not logging.getLogger("trace_lightning").handlers

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("trace_lightning.callbacks.report.write_text", full)
    folder = fit(tmp_path)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert "No space left on device" in caplog.text


class TestTrainerFlags:
    def test_fast_dev_run_leaves_nothing(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        fit(tmp_path, "--trainer.fast_dev_run", "true")
        assert not list(tmp_path.iterdir())

    def test_without_a_logger_there_is_csv_still(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        fit(tmp_path / "runs", "--trainer.logger", "false")
        assert [path.name for path in tmp_path.iterdir()] == ["runs"]
        folder = tmp_path / "runs" / "r" / "version_0"
        assert {path.name for path in folder.iterdir()} == LEFT

    def test_csv_comes_first_and_once(self, tmp_path) -> None:
        csv_logger = RunCSVLogger(str(tmp_path), "r")
        own, other = TensorBoardLogger(tmp_path), CSVLogger(tmp_path)
        assert [type(logger) for logger in run_loggers(csv_logger, None)] == [RunCSVLogger, RunTensorBoardLogger]
        assert run_loggers(csv_logger, False) == [csv_logger]
        assert run_loggers(csv_logger, own) == [csv_logger, own]
        assert run_loggers(csv_logger, [own, other]) == [own, other]

    @pytest.mark.parametrize(("name", "package"), [("WandbLogger", "wandb"), ("MLFlowLogger", "mlflow")])
    def test_a_logger_that_is_not_installed_names_its_extra(self, tmp_path, monkeypatch, capsys, name, package) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module == package else find(module))
        arguments = ["fit", *SMALL, "--runs_dir", str(tmp_path), "--trainer.logger", name]
        monkeypatch.setattr(sys, "argv", ["trace-fit", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert f"{name} needs {package}: pip install 'trace-lightning[loggers]'" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_wandb_offline(self, tmp_path, monkeypatch) -> None:
        wandb = pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        logger = ["--trainer.logger", "WandbLogger", "--trainer.logger.save_dir", str(tmp_path)]
        folder = fit(tmp_path / "runs", *logger)
        assert (folder / "metrics.csv").is_file()
        wandb.finish()  # a process of its own does that at its end
        (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert b"heldout/reward" in stored.read_bytes()

    def test_mlflow_file_store(self, tmp_path, monkeypatch) -> None:
        pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        store = tmp_path / "mlruns"
        folder = fit(tmp_path, "--trainer.logger", "MLFlowLogger", "--trainer.logger.tracking_uri", store.as_uri())
        assert (folder / "metrics.csv").is_file()
        (heldout,) = store.glob("*/*/metrics/heldout/reward")
        assert heldout.read_text().splitlines()[0].endswith(" 0")

    def test_without_validation_heldout_is_null(self, tmp_path) -> None:
        folder = fit(tmp_path, "--trainer.limit_val_batches", "0", "--trainer.limit_train_batches", "1")
        summary = json.loads((folder / "summary.json").read_text())
        assert set(summary["heldout"].values()) == {None}
        assert summary["steps"] == 2
        assert (folder / "checkpoints" / "last.ckpt").is_file()

    def test_several_configs_and_print_config(self, tmp_path, capsys) -> None:
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text("recipe:\n  kv_cache: mxfp4\n")
        with pytest.raises(SystemExit):
            TraceCLI(args=["fit", *SMALL, "--config", str(overlay), "--print_config"])
        printed = capsys.readouterr().out
        assert "kv_cache: mxfp4" in printed
        assert "weights: nvfp4" in printed
        assert "callbacks: null" in printed  # defaults of ours are not the user's configuration


class TestDefaultCallbacks:
    def test_all_by_default(self) -> None:
        kinds = [RolloutProgressBar, CompletionsLogger, RunSummary, RunReport, HFExport, RunCheckpoint]
        assert [type(callback) for callback in default_callbacks([])] == kinds

    def test_the_users_own_are_not_doubled(self) -> None:
        class OwnBar(ProgressBar):
            pass

        class OwnSummary(RunSummary):
            pass

        added = default_callbacks([OwnBar(), OwnSummary(), ModelCheckpoint()])
        assert [type(callback) for callback in added] == [CompletionsLogger, RunReport, HFExport, RunCheckpoint]
        assert added[-1].only_on_exception
        assert added[-1].filename != "last"

    def test_flags_of_the_trainer(self) -> None:
        added = default_callbacks([], progress_bar=False, checkpoints=False)
        assert not any(isinstance(callback, ProgressBar | Checkpoint) for callback in added)
