"""Every config parses, says how to run it, and runs; every switch of the recipe works from the command line."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from pathlib import Path

import pytest
import yaml

from test_docs import NOT_METRICS, undocumented
from trace_lightning.callbacks import Rollout
from trace_lightning.cli import main
from trace_lightning.models.resolve import cache_dir

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
ALGORITHMS = [path for path in OVERLAYS if "model" in yaml.safe_load(path.read_text())]
RECIPES = [path for path in OVERLAYS if path not in ALGORITHMS]  # number formats
FP4 = str(ROOT / "configs" / "grpo_fp4.yaml")
SMALL = [
    "--trainer.max_steps",
    "1",
    "--data.batch_size",
    "2",
    "--data.heldout_size",
    "4",
    "--rollout.num_generations",
    "2",
]
# The names of checkpoints that a test machine may not have; the embedded model stands in for them.
STAND_IN = {
    "prepared:smollm2": ["--model.path", "builtin:tiny-qwen3"],
    "Qwen3-0.6B": ["--model.path", "builtin:tiny-qwen3"],
}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """`curves.png` takes two thirds of the time of so short a run, and test_cli_run.py looks at it."""
    monkeypatch.setattr("trace_lightning.callbacks.summary.draw_curves", lambda *_: None)


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["trace-fit", *arguments])
    monkeypatch.setenv("TRACE_LIGHTNING_DEBUG", "1")
    main()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_a_header_and_runs(config, tmp_path, monkeypatch):
    header = [line for line in config.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert "trace-fit fit --config" in text
    assert "Hardware" in text
    assert "xpected" in text
    content = yaml.safe_load(config.read_text())
    extra = list(STAND_IN.get(content["model"]["path"], []))
    if content["model"]["path"] in STAND_IN:
        extra += ["--data.task", "TwoDigitAddition", "--rollout.sampling.stop", "[]", "--trainer.precision", "32-true"]
        extra += ["--rollout.sampling.max_new_tokens", "5", "--data.max_prompt_length", "null"]
    run(monkeypatch, "fit", "--config", str(config), *SMALL, *extra, "--runs_dir", str(tmp_path))
    (summary,) = tmp_path.glob("*/version_0/summary.json")
    assert json.loads(summary.read_text())["steps"] >= 1
    with (summary.parent / "metrics.csv").open() as file:
        assert not undocumented(set(next(csv.reader(file))) - NOT_METRICS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_header_and_runs_on_top_of_a_config(recipe, tmp_path, monkeypatch):
    header = "\n".join(line for line in recipe.read_text().splitlines() if line.startswith("#"))
    assert f"--config configs/grpo_fp4.yaml --recipe configs/recipes/{recipe.name}" in header
    assert "Hardware" in header
    assert "xpected" in header
    run(monkeypatch, "fit", "--config", FP4, *SMALL, "--recipe", str(recipe), "--runs_dir", str(tmp_path))
    (used,) = tmp_path.glob("*/version_0/config.yaml")
    content = yaml.safe_load(recipe.read_text())
    written = yaml.safe_load(used.read_text())["recipe"]
    assert written | content | {"guidance": written["guidance"]} == written
    assert written["guidance"] | content["guidance"] == written["guidance"]


def test_the_recipes_are_four():
    assert [path.stem for path in RECIPES] == ["blackwell", "blackwell_small", "hopper", "hopper_small"]


ALGORITHM_NAMES = (
    *("cispo", "dapo", "decoupled_ppo", "dr_grpo", "grpo", "grpo_kl", "gspo", "ppo_bypass"),
    *("reinforce_pp", "reinforce_pp_baseline", "rloo", "sapo"),
)


def test_every_algorithm_has_a_recipe():
    assert tuple(path.stem for path in ALGORITHMS) == ALGORITHM_NAMES


@pytest.mark.parametrize("recipe", ALGORITHMS, ids=lambda path: path.stem)
def test_every_algorithm_runs_for_two_steps_on_top_of_a_config(recipe, tmp_path, monkeypatch):
    header = "\n".join(line for line in recipe.read_text().splitlines() if line.startswith("#"))
    assert f"--config configs/grpo_fp4.yaml --config configs/recipes/{recipe.name}" in header
    assert "Hardware" in header
    assert "xpected" in header
    (page,) = re.findall(r"docs/algorithms/\w+\.md", header)
    assert (ROOT / page).exists()
    content = yaml.safe_load(recipe.read_text())
    steps = 2 * content["model"].get("num_minibatches", 1)
    monkeypatch.setattr(Rollout, "on_train_batch_end", counted(calls := [], Rollout.on_train_batch_end))
    small = [*SMALL, "--trainer.max_steps", str(steps), "--trainer.num_sanity_val_steps", "0"]
    run(monkeypatch, "fit", "--config", FP4, "--config", str(recipe), *small, "--runs_dir", str(tmp_path))
    (used,) = tmp_path.glob("*/version_0/config.yaml")
    written = yaml.safe_load(used.read_text())["model"]
    assert written["loss"]["class_path"].rpartition(".")[2] == content["model"]["loss"]["class_path"]
    assert len(calls) == 2
    for metrics in calls:
        assert math.isfinite(metrics["loss"])
        assert metrics["skipped_steps"] == 0
    assert not undocumented(set(calls[-1]))


def counted(calls, hook):
    def around(self, trainer, *args):
        hook(self, trainer, *args)
        calls.append(dict(trainer.callback_metrics))

    return around


def test_a_config_may_name_a_recipe_file(tmp_path, monkeypatch, capsys):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"recipe: {ROOT / 'configs' / 'recipes' / 'hopper.yaml'}\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "fit", "--config", FP4, "--config", str(overlay), "--print_config")
    recipe = yaml.safe_load(capsys.readouterr().out)["recipe"]
    assert (recipe["activations"], recipe["guidance"]["sites"]) == ("none", ["k", "v"])


@pytest.mark.slow
@pytest.mark.skipif(not (cache_dir() / "smollm2-135m-instruct").is_dir(), reason="needs `trace-fit prepare smollm2`")
def test_the_smollm2_config_runs_on_its_own_model(tmp_path, monkeypatch):
    config = ROOT / "configs" / "grpo_fp4_smollm2.yaml"
    run(monkeypatch, "fit", "--config", str(config), *SMALL, "--runs_dir", str(tmp_path))


SWITCHES = [
    "--recipe.kv_cache mxfp4",
    "--recipe.kv_cache fp8",
    "--recipe.kv_cache none",
    "--recipe.weights mxfp4",
    "--recipe.weights fp8",
    "--recipe.weights none",
    "--recipe.activations mxfp4",
    "--recipe.activations fp8",
    "--recipe.activations none",
    "--recipe.four_over_six true",
    "--recipe.kv_rotation hadamard",
    "--recipe.exclude [down_proj]",
    "--recipe.bf16_layers [first:1]",
    "--recipe.guidance.mode full",
    "--recipe.guidance.mode none",
    "--recipe.guidance.scales parity",
    "--recipe.guidance.layers last_half",
    "--recipe.guidance.layers last:1",
    "--recipe.guidance.sites [attn_in,o_in,mlp_in,down_in,k,v]",
    "--recipe.guidance.store host",
    "--recipe.guidance.audit_sequences 0",
    "--recipe.trainer bf16 --recipe.guidance.mode none",
    "--recipe.trainer qat_weights --recipe.guidance.mode none",
    "--recipe.trainer qat_weights --recipe.guidance.mode none --recipe.kv_cache none --recipe.residual_share 0.5",
    "--model.loss TBPO --model.corrections []",
    "--model.loss ScoreCentering --model.corrections [] --rollout.sampling.record_logprobs 8",
    "--model.corrections [Veto,IcePop]",
    "--model.loss GSPOToken",
    "--model.loss CISPOBand --model.advantages BatchAdvantage --rollout.num_generations 1",
    "--model.loss GRPO --model.loss.beta 0.1 --model.loss.kl K1 --model.loss.kl.gradient ratio",
    "--model.loss PPO --model.loss.entropy_coef 0.01 --model.length_penalty KimiLength",
    "--model.length_penalty LengthDiscount --rollout.dynamic_sampling.max_refills 1",
    "--model.bypass_mode true --model.corrections [GeometricRejection]",
    "--model.corrections [GeometricRejection,K3Rejection,TIS]",
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_works_from_the_command_line(switch, tmp_path, monkeypatch):
    quiet = [
        "--trainer.num_sanity_val_steps",
        "0",
        "--trainer.logger",
        "false",
        "--trainer.enable_checkpointing",
        "false",
    ]
    run(monkeypatch, "fit", "--config", FP4, *SMALL, *quiet, "--runs_dir", str(tmp_path), *switch.split())


def test_print_config_round_trips(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "fit", "--config", FP4, "--recipe.kv_cache", "mxfp4", "--print_config")
    first = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(first)
    with pytest.raises(SystemExit):
        run(monkeypatch, "fit", "--config", str(tmp_path / "printed.yaml"), "--print_config")
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)
    assert yaml.safe_load(first)["recipe"]["kv_cache"] == "mxfp4"


def test_later_configs_win(tmp_path, monkeypatch, capsys):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("recipe:\n  activations: none\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "fit", "--config", FP4, "--config", str(overlay), "--print_config")
    recipe = yaml.safe_load(capsys.readouterr().out)["recipe"]
    assert (recipe["activations"], recipe["weights"]) == ("none", "nvfp4")


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_other_verbs_run(verb, tmp_path, monkeypatch):
    run(
        monkeypatch,
        verb,
        "--config",
        FP4,
        "--data.heldout_size",
        "4",
        "--runs_dir",
        str(tmp_path),
        "--trainer.logger",
        "false",
    )
