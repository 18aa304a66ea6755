"""Every example runs as its first lines say, and stays a size that fits a screen or two."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scripts
from trace_lightning.cli import TraceCLI
from trace_lightning.recipe import SITES, GuidanceConfig, QuantRecipe

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "train_without_cli": ["--steps", "2"],
    "custom_reward": ["--steps", "2"],
    "custom_loss": ["--steps", "2"],
    "custom_task": ["--steps", "2"],
    "custom_format": ["--steps", "2"],
    "custom_metric": ["--steps", "2"],
    "guidance_study": [
        *("--model", "builtin:tiny-qwen3", "--lengths", "4", "8", "--sequences", "2", "--drift", "0", "1"),
        *("--rollouts", "BF16", "W4A16KV4", "W4A4KV4", "--json", "study.json", "--plot", "study.png"),
    ],
    "stability_study": [
        *("--steps", "1", "--seeds", "0", "--arms", "trace_half", "--out", "."),
        *("--data.batch_size=2", "--data.heldout_size=4"),
    ],
    "rounding_spread": ["--orders", "2", "--questions", "8", "--text", __file__, "--json", "spread.json"],
    "estimate_peaks": ["--shapes", "tiny", "--json", "peaks.json"],
    "export_memory": ["--shape", "tiny", "--max_shard_gb", "0.001", "--json", "memory.json"],
    "algorithms_study": [
        *("--steps", "2", "--seeds", "0", "--recipes", "dapo", "cispo", "--jobs", "2", "--out", "."),
        *("--data.batch_size=2", "--data.heldout_size=4", "--rollout.num_generations=4"),
    ],
    "pretrain_tiny": ["--steps", "3", "--out", "tiny"],
    "bench_lora": ["--device", "cpu", "--shape", "tiny", "--rank", "8", "--warm", "1", "--steps", "2"],
    "bench_two_gpus": ["--device", "cpu", "--shape", "tiny", "--steps", "2", "--runs", "one", "fsdp2", "--kill"],
    "bench_step": [
        *("--device", "cpu", "--shape", "tiny", "--recipes", "bf16", "w4a4kv4", "--steps", "1", "--prompts", "2"),
        *("--generations", "2", "--new_tokens", "4", "--json", "step.json"),
    ],
    "bench_ahead": [
        *("--device", "cpu", "--shape", "tiny", "--steps", "3", "--prompts", "2", "--generations", "2"),
        *("--new_tokens", "4", "--json", "ahead.json"),
    ],
}


def run(name: str, folder: Path) -> subprocess.CompletedProcess:
    return scripts.run(EXAMPLES / f"{name}.py", *ARGUMENTS[name], folder=folder)


def check_guidance_study(folder: Path) -> None:
    """Every promise is judged, at every length; kept promises depend on sizes that a test has no time for."""
    content = json.loads((folder / "study.json").read_text())
    assert {"name", "value", "unit", "must", "ok"} == content["rows"][0].keys()
    judged = {row["name"]: row["ok"] for row in content["rows"] if row["must"] is not None}
    wanted = {
        f"{rollout}/parity/0 steps/{length} tokens/{value}"
        for rollout in ("W4A16KV4", "W4A4KV4")
        for length in (4, 8)
        for value in ("max_abs_dlogp", "codes_after")
    }
    assert judged.keys() == wanted
    assert all(type(ok) is bool for ok in judged.values())
    assert any(row["name"].startswith("W4A4KV4/six/1 steps/8 tokens/") for row in content["rows"])
    assert (folder / "study.png").stat().st_size > 10_000


def check_stability_study(folder: Path) -> None:
    """The arm is there with what was measured, and a second call repeats no run."""
    content = json.loads((folder / "stability.json").read_text())
    (runs,) = content["arms"].values()
    assert runs["0"]["summary"]["recipe"]["guidance"] == "parity"
    for name, curve in runs["0"]["curves"].items():
        assert len(curve) == 1, name
        assert curve != [None], name
    again = run("stability_study", folder)
    assert again.returncode == 0
    assert "seed 0" not in again.stdout
    assert len(list(folder.glob("*/version_*"))) == 1


def check_rounding_spread(folder: Path) -> None:
    """Each order has a row of each rule, and the rules round differently."""
    rows = json.loads((folder / "spread.json").read_text())["rows"]
    assert len({(row["order"], row["arm"]) for row in rows}) == 2 * 5
    assert len({row["kl"] for row in rows}) == 2 * 5
    assert all(0 < row["right"] < 1 for row in rows)


def check_estimate_peaks(folder: Path) -> None:
    """Every phase is estimated, and measured where there is a GPU to measure."""
    rows = json.loads((folder / "peaks.json").read_text())["rows"]
    assert [row["phase"] for row in rows] == ["rollout", "train", "step"]
    assert all(row["estimate"] > 0 for row in rows)
    assert all((row["measured"] is not None) is torch.cuda.is_available() for row in rows)


def check_export_memory(folder: Path) -> None:
    content = json.loads((folder / "memory.json").read_text())
    assert len(content["files_gb"]) == 1
    assert content["files_gb"][0] == pytest.approx(
        0.36e-3, rel=0.05
    )  # 9/16 of a byte for a weight, two for an embedding
    assert content["grown_gb"] >= 0


def check_bench_two_gpus(folder: Path) -> None:
    """Both runs were measured; their gain is shown, and judged on GPUs alone."""
    content = json.loads((folder / "two_gpus.json").read_text())
    assert [run["ranks"] for run in content["runs"].values()] == [1, 2]
    assert all(run["rollout_tokens_per_s"] > 0 and run["sync_s"] > 0 for run in content["runs"].values())
    assert {row["name"]: row["ok"] for row in content["promises"]} == {
        "fsdp2/rollout gain": None,
        "fsdp2/step gain": None,
    }


def check_bench_ahead(folder: Path) -> None:
    """As many tokens in both runs, one of them a rollout old; the gain is the ratio of their steps."""
    content = json.loads((folder / "ahead.json").read_text())
    before, after = content["runs"].values()
    assert before["tokens"] == after["tokens"] == 2 * 2 * 4
    assert (before["version_diff"], after["version_diff"]) == (0.0, 1.0)
    assert content["gain"] == {"on-policy": 1.0, "ahead, SMs shared": before["step_s"] / after["step_s"]}
    assert "rollout_wait_s" in after


def check_bench_step(folder: Path) -> None:
    """As many tokens under every recipe; ratios are over BF16."""
    base, fp4 = json.loads((folder / "step.json").read_text())["runs"].values()
    assert base["tokens"] == fp4["tokens"] == 2 * 2 * 4
    assert set(base["gain"].values()) == {1.0}
    assert fp4["gain"]["train_s"] == base["train_s"] / fp4["train_s"]


def check_algorithms_study(folder: Path) -> None:
    """Both recipes have what was measured over two rollouts, and a second call repeats no run."""
    content = json.loads((folder / "algorithms.json").read_text())
    assert content["recipes"].keys() == {"dapo", "cispo"}
    for name, runs in content["recipes"].items():
        summary, curves = runs["0"]["summary"], runs["0"]["curves"]
        assert (summary["rollouts"], summary["steps"]) == ((2, 4) if name == "cispo" else (2, 2))
        assert len(curves["reward"]) == 2
        assert None not in curves["reward"] + curves["entropy"] + curves["clipped"]
    text = (folder / "algorithms.md").read_text()
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| dapo", "| cispo"]
    again = run("algorithms_study", folder)
    assert again.returncode == 0
    assert "done" not in again.stdout
    assert len(list(folder.glob("*/version_*"))) == 2


def check_bench_lora(folder: Path) -> None:
    """All ways have the same columns, and adapters train a part of what full training does."""
    ways = json.loads((folder / "bench_lora.json").read_text())["ways"]
    assert list(ways) == ["full", "adapter", "merged"]
    assert len({tuple(way) for way in ways.values()}) == 1
    assert ways["full"]["trained_share"] >= 1 > 0.3 > ways["adapter"]["trained_share"] > 0
    assert ways["adapter"]["trained"] == ways["merged"]["trained"]
    assert all(way["step_s"] > 0 and way["rollout_tokens_per_s"] > 0 for way in ways.values())
    assert ways["adapter"]["estimated"] < ways["full"]["estimated"]


CHECKS = {
    "bench_lora": check_bench_lora,
    "export_memory": check_export_memory,
    "rounding_spread": check_rounding_spread,
    "guidance_study": check_guidance_study,
    "stability_study": check_stability_study,
    "estimate_peaks": check_estimate_peaks,
    "bench_two_gpus": check_bench_two_gpus,
    "bench_ahead": check_bench_ahead,
    "bench_step": check_bench_step,
    "algorithms_study": check_algorithms_study,
}


def test_no_example_is_forgotten():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example(name, tmp_path):
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
    CHECKS.get(name, lambda folder: None)(tmp_path)


@pytest.mark.parametrize("name", ["train_without_cli", *(name for name in ARGUMENTS if name.startswith("custom_"))])
def test_user_examples_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


def load(path: str):
    if str(EXAMPLES) not in sys.path:  # where a script that is run finds `support`
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_arms_of_the_stability_study_differ_in_the_recipe_and_each_is_valid(tmp_path, monkeypatch):
    study = load("stability_study.py")
    monkeypatch.chdir(tmp_path)
    recipes = {}
    for arm, (_, switches) in study.ARMS.items():
        cli = TraceCLI(args=[f"--config={study.CONFIG}", *switches], run=False)
        recipes[arm] = (cli.model.recipe, len(cli.model.corrections))
    labels = {arm: recipe.label for arm, (recipe, _) in recipes.items()}
    assert labels["bf16"] == "W16A16KV16"
    assert labels["quads"] == "W4A4KV16/nvfp4+residual0.5"
    weights_and_cache = [label for arm, label in labels.items() if "_w4a16" in arm]
    assert len(weights_and_cache) == 5
    assert all(label.startswith("W4A16KV4/nvfp4") for label in weights_and_cache)
    assert sum("A4KV4/nvfp4" in label for label in labels.values()) == len(labels) - 2 - 5
    assert len({str(value) for value in recipes.values()}) == len(study.ARMS)


def test_another_order_of_channels_is_another_rounding_of_the_same_function():
    spread = load("rounding_spread.py")
    model, text = "builtin:tiny-qwen3", torch.arange(4, 20).view(1, -1)
    plain = spread.load_policy(model, QuantRecipe(), dtype=torch.float32)
    before, embedding = spread.next_logprobs(plain, text), plain.get_input_embeddings().weight.clone()
    spread.reorder(plain, 1)
    assert not torch.equal(plain.get_input_embeddings().weight, embedding)
    torch.testing.assert_close(spread.next_logprobs(plain, text), before, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["full", "parity", "syndrome"])
def test_a_restricted_record_is_what_the_engine_would_have_written(mode):
    """One rollout stands for all arms of the study only if its record holds those of all others, byte by byte."""
    agreement = load("support/agreement.py")
    args = argparse.Namespace(model="builtin:tiny-qwen3", prompts=None, lengths=[12], sequences=2, seed=0)
    formats = dict.fromkeys(("weights", "activations", "kv_cache"), "nvfp4")
    wanted = GuidanceConfig(mode=mode, scales="parity", layers="last_half", sites=["o_in", "k"], audit_sequences=2)
    source = agreement.load_masters(args.model, torch.device("cpu"), seed=0)
    everything, _ = agreement.roll_out(args, source, agreement.full_record(formats, 2))
    written, _ = agreement.roll_out(args, source, QuantRecipe(**formats, guidance=wanted))
    assert {site for _, site in everything.guidance.tables} == set(SITES)
    assert torch.equal(everything.token_ids_BT, written.token_ids_BT)
    trainer = agreement.make_trainer(args.model, QuantRecipe(**formats), torch.device("cpu"))
    restricted = agreement.restrict(everything.guidance, wanted, trainer.trace_qat.layout)
    assert restricted.tables.keys() == written.guidance.tables.keys() == {(1, "o_in"), (1, "k")}
    assert restricted.bytes_per_token == written.guidance.bytes_per_token
    for key, table in written.guidance.tables.items():
        for mine, engines in zip(restricted.tables[key].tensors(), table.tensors(), strict=True):
            assert torch.equal(mine, engines), key
