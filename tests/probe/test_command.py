"""`trace-fit probe` as a user runs it: exit code, files, going on after an interruption, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from trace_lightning import cli
from trace_lightning.probe import command
from trace_lightning.probe.study import Study
from trace_lightning.recipe import QuantRecipe

ROOT = Path(__file__).parents[2]
SMALL = [
    "--trajectories",
    "2",
    "--num_prompts",
    "2",
    "--max_new_tokens",
    "16",
    "--heldout",
    "4",
    "--heldout_samples",
    "2",
]
SMALL += ["--layer_tokens", "64", "--device", "cpu"]


def probe(folder: Path, *arguments: str) -> int:
    return command.main([*SMALL, "--out", str(folder), *arguments])


def record(folder: Path) -> dict:
    return json.loads((folder / "probe.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole small probe of the demo's config."""
    folder = tmp_path_factory.mktemp("probe")
    code = probe(folder, "--config", str(ROOT / "configs" / "grpo_fp4.yaml"), "--formats", "bf16,w4a4kv4")
    assert code == record(folder)["verdict"]["exit_code"]
    return folder


def test_the_config_says_what_is_probed(whole):
    content = record(whole)
    assert content["target"] == "w4a4kv4"
    assert content["settings"]["eval_sampling"]["max_new_tokens"] == 6
    assert set(content["quality"]) == {"bf16", "w4a4kv4"}
    assert len(content["quality"]["bf16"]["questions"]) == 4
    assert content["sync"]["new"] < content["sync"]["old"]


def test_every_field_of_the_json_is_documented(whole):
    page = (ROOT / "docs" / "probe.md").read_text()
    missing = [name for name in record(whole) if f"`{name}`" not in page]
    assert not missing, f"docs/probe.md does not name {missing}"


def test_the_report_opens_offline_and_holds_every_chart(whole):
    page = (whole / "report.html").read_text()
    assert page.count("<svg") == len(list((whole / "plots").glob("*.png"))) == 8
    assert not re.search(r"(src|href)=[\"'](?!#)|url\((?!#)|@import|<script", page), "something would be loaded"
    assert "W4A4KV4" in page.upper()
    assert all(path.stat().st_size > 10_000 for path in (whole / "plots").glob("*.png"))


def test_the_recipe_can_be_pasted(whole):
    import yaml

    recipe = yaml.safe_load((whole / "recipe.yaml").read_text())["recipe"]
    guidance = recipe.pop("guidance", None)
    assert QuantRecipe(**recipe).label == "W4A4KV4/nvfp4"
    assert guidance == {"mode": "parity", "sites": None}


def test_an_interrupted_probe_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    arguments = ("--formats", "bf16,w4a16kv4", "--parts", "divergence,same_tokens,layers")
    with monkeypatch.context() as patch:
        patch.setattr(Study, "layers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            probe(tmp_path, *arguments)
    assert "goes on from there" in capsys.readouterr().out
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert set(done) == {
        "divergence-bf16.json",
        "divergence-w4a16kv4.json",
        "same_tokens-w4a16kv4.json",
        "switches-w4a16kv4.json",
    }
    monkeypatch.setattr(Study, "divergence", lambda *_: pytest.fail("measured twice"))
    probe(tmp_path, *arguments)
    assert all((tmp_path / "parts" / name).stat().st_mtime_ns == time for name, time in done.items())
    assert len(record(tmp_path)["layers"]["w4a16kv4"]) == 2


def test_a_second_recipe_finds_what_was_measured_for_the_first(tmp_path):
    probe(tmp_path, "--formats", "bf16,w4a16kv4", "--parts", "divergence")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("divergence-*")}
    recipe = tmp_path / "kv8.yaml"
    recipe.write_text("recipe: {weights: nvfp4, kv_cache: fp8}\n")
    probe(tmp_path, "--formats", "bf16,w4a16kv4", "--parts", "divergence", "--config", str(recipe))
    assert record(tmp_path)["target"] == "recipe"
    assert {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in before} == before


def test_other_settings_are_measured_again(tmp_path):
    probe(tmp_path, "--formats", "bf16,w4a16kv4", "--parts", "divergence")
    before = (tmp_path / "parts" / "divergence-bf16.json").read_text()
    probe(tmp_path, "--formats", "bf16,w4a16kv4", "--parts", "divergence", "--seed", "1")
    assert (tmp_path / "parts" / "divergence-bf16.json").read_text() != before


def test_random_weights_of_a_shape(tmp_path):
    code = probe(tmp_path, "--shape", "tiny", "--formats", "bf16,w4a16kv4", "--parts", "divergence,same_tokens")
    content = record(tmp_path)
    assert code == content["verdict"]["exit_code"]
    assert content["model"] == "tiny, random weights"
    assert "quality" not in content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--formats", "w5a4kv4"], ["w5a4kv4", "w4a16kv4"]),
        (["--target", "bf16"], ["nothing to decide"]),
        (["--parts", "quality"], ["needs divergence"]),
        (["--parts", "divergence,speed"], ["speed", "same_tokens"]),
        (["--max_new_tokens", "4000"], ["4000", "leaves"]),
        (["--trajectories", "0"], ["--trajectories 0"]),
        (["--model.path", "builtin:tiny-qwen4"], ["did you mean builtin:tiny-qwen3"]),
        (["--shape", "qwen3-1.6b"], ["did you mean", "qwen3-1.7b"]),
        (["--config", "nowhere.yaml"], ["no file nowhere.yaml"]),
        (["--rollout.sampling.temperature", "0"], ["greedy"]),
        (["--rollout.sampling.top_p", "0.9"], ["record_support"]),
        (["--recipe.wieghts", "nvfp4"], ["wieghts", "weights"]),
        (["--device", "cuda"], ["torch sees no GPU"]),
        (["--data.task", "CalculatorProducts"], ["CalculatorProducts has environments", "single turn"]),
        (["--recipe.activations", "nvfp4", "--recipe.residual_share", "0.5"], ["residual_share=0"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_refused_before_anything_is_drawn(tmp_path, monkeypatch, capsys, arguments, words):
    if "cuda" in arguments:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Study, "divergence", lambda *_: pytest.fail("drew"))
    monkeypatch.setattr(sys, "argv", ["trace-fit", "probe", *SMALL, "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(word in message for word in words), message


def test_a_model_without_prompts_and_chat_messages_without_a_template(tmp_path, capsys):
    model = str(ROOT / "src" / "trace_lightning" / "assets" / "tiny_qwen3")
    with pytest.raises(ValueError, match=r"no prompts.*--prompt"):
        probe(tmp_path, "--model.path", model)
    rows = tmp_path / "chat.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": str(i)}], "answer": "1"}) + "\n" for i in range(9))
    )
    task = json.dumps({"class_path": "JsonlTask", "init_args": {"path": str(rows)}})
    with pytest.raises(ValueError, match="no chat template"):
        probe(tmp_path, "--data.task", task)
