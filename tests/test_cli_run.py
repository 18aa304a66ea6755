"""Short runs through the command line: what they leave behind, also when resumed, interrupted or broken."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from transformers import AutoModelForCausalLM

from trace_lightning.callbacks import CompletionsLogger, HFExport, RolloutProgressBar, RunCheckpoint, RunSummary
from trace_lightning.cli import TraceCLI, default_callbacks

ROOT = Path(__file__).parents[1]
SMALL = ["--config", str(ROOT / "configs" / "grpo_fp4.yaml"), "--run_name", "r"]
SMALL += ["--data.batch_size", "2", "--data.heldout_size", "4", "--rollout.num_generations", "2"]
EVERY = ["--trainer.callbacks+=CompletionsLogger", "--trainer.callbacks.every_n_steps=1"]
LEFT = {"config.yaml", "metrics.csv", "summary.json", "curves.png", "guidance_layers.csv"}
LEFT |= {"completions.jsonl", "checkpoints", "policy"}


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

    def test_summary_has_the_whole_history(self, whole, parts) -> None:
        one, two = (json.loads((folder / "summary.json").read_text()) for folder in (whole, parts[1]))
        for name in ("reward", "heldout", "divergence", "guidance_sites", "per_position", "steps", "rollouts"):
            assert two[name] == one[name]

    def test_command_line_wins_over_the_checkpoint(self, parts, tmp_path) -> None:
        arguments = ["--ckpt_path", str(parts[0] / "checkpoints" / "last.ckpt"), "--model.max_grad_norm", "0.5"]
        cli = TraceCLI(args=["fit", *SMALL, "--trainer.max_steps", "2", "--runs_dir", str(tmp_path), *arguments])
        assert cli.model.max_grad_norm == 0.5


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
        resumed = fit(tmp_path, *EVERY, "--ckpt_path", str(folder / "checkpoints" / "last.ckpt"), steps=4)
        assert completions(folder) | completions(resumed) == completions(whole)
        for name, value in weights(whole).items():
            assert torch.equal(value, weights(resumed)[name]), name

    def test_failed(self, tmp_path) -> None:
        folder = self.stopped(tmp_path, RuntimeError("out of memory"), RuntimeError)
        assert {path.name for path in folder.iterdir()} >= LEFT - {"policy"}
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "failed"
        assert summary["error"] == "RuntimeError: out of memory"
        assert weights(folder)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal(self, tmp_path, number: signal.Signals) -> None:
        command = [sys.executable, "-m", "trace_lightning.cli", "fit", *SMALL, "--runs_dir", str(tmp_path)]
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}"}
        command += ["--trainer.max_steps", "100000"]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            metrics = tmp_path / "r" / "version_0" / "metrics.csv"
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                if metrics.exists() and len(metrics.read_text().splitlines()) > 3:
                    break
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()
        folder = tmp_path / "r" / "version_0"
        assert {path.name for path in folder.iterdir()} >= LEFT, (tmp_path / "log").read_text()
        assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
        assert weights(folder)


class TestTrainerFlags:
    def test_fast_dev_run_leaves_nothing(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        fit(tmp_path, "--trainer.fast_dev_run", "true")
        assert not list(tmp_path.iterdir())

    def test_without_a_logger_files_still_go_to_the_run(self, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        fit(tmp_path / "runs", "--trainer.logger", "false")
        assert [path.name for path in tmp_path.iterdir()] == ["runs"]
        folder = tmp_path / "runs" / "r" / "version_0"
        assert {path.name for path in folder.iterdir()} == LEFT - {"metrics.csv"}

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
        kinds = [RolloutProgressBar, CompletionsLogger, RunSummary, HFExport, RunCheckpoint]
        assert [type(callback) for callback in default_callbacks([])] == kinds

    def test_the_users_own_are_not_doubled(self) -> None:
        class OwnBar(ProgressBar):
            pass

        class OwnSummary(RunSummary):
            pass

        added = default_callbacks([OwnBar(), OwnSummary(), ModelCheckpoint()])
        assert [type(callback) for callback in added] == [CompletionsLogger, HFExport, RunCheckpoint]
        assert added[-1].only_on_exception
        assert added[-1].filename != "last"

    def test_flags_of_the_trainer(self) -> None:
        added = default_callbacks([], progress_bar=False, checkpoints=False)
        assert not any(isinstance(callback, ProgressBar | Checkpoint) for callback in added)
