"""Names of formats, what a device is told to do with them, and what makes a stored part stale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trace_lightning.probe import paths
from trace_lightning.probe.plan import ProbeSettings, check_formats, choose_formats, parse_format
from trace_lightning.probe.store import PartStore, model_state
from trace_lightning.recipe import GuidanceConfig, QuantRecipe

BASE = QuantRecipe(weights="nvfp4", kv_cache="nvfp4", bf16_layers=["last:1"], guidance=GuidanceConfig(mode="parity"))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("bf16", "W16A16KV16"),
        ("fp8", "W8A8KV8/fp8"),
        ("mxfp4", "W4A4KV4/mxfp4"),
        ("w4a16kv8", "W4A16KV8/fp8+nvfp4"),
        ("w4a4kv16-mxfp4", "W4A4KV16/mxfp4"),
        ("recipe", "W4A16KV4/nvfp4+parity"),
    ],
)
def test_names(name: str, label: str) -> None:
    recipe = parse_format(name, BASE)
    assert recipe.label == label
    assert recipe.bf16_layers == ([] if name == "bf16" else ["last:1"])


def test_the_target_is_the_recipe_under_the_name_of_its_formats() -> None:
    formats, target = choose_formats(ProbeSettings(formats="bf16, w4a16kv4"), BASE)
    assert target == "w4a16kv4"
    assert formats[target].guidance.mode == "parity"
    assert list(formats) == ["bf16", "w4a16kv4"]
    assert list(choose_formats(ProbeSettings(formats="w4a4kv4,nvfp4,fp8"), BASE)[0]) == [
        "bf16",
        "w4a4kv4",
        "fp8",
        "recipe",
    ]
    assert choose_formats(ProbeSettings(formats="nvfp4", target="w4a4kv4"), BASE)[1] == "nvfp4"
    assert choose_formats(ProbeSettings(formats="fp8"), BASE)[1] == "recipe"
    assert choose_formats(ProbeSettings(formats="fp8"), QuantRecipe())[1] == "w4a16kv4"


def test_an_old_card_and_a_head_without_whole_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(ValueError, match=r"T4 has compute capability 7.5.*8.0"):
        check_formats({"w4": BASE}, torch.device("cuda"), 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(ValueError, match="head dim of 80"):
        check_formats({"w4": parse_format("mxfp4", BASE)}, torch.device("cuda"), 80)
    check_formats({"w4": BASE}, torch.device("cuda"), 64)


def test_paths_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    full = parse_format("nvfp4", BASE)
    assert paths.paths(full, cpu) == dict.fromkeys(("weights", "activations", "kv_cache"), "emulated")
    assert paths.paths(full, cuda) == {"weights": "unpacked", "activations": "emulated", "kv_cache": "unpacked"}
    assert paths.paths(full, cuda, fused=False)["weights"] == "emulated"
    assert paths.paths(QuantRecipe(), cuda) == dict.fromkeys(("weights", "activations", "kv_cache"), "plain")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    for capability, words in {(9, 0): "FP4 activations gain nothing", (10, 0): "not verified on hardware"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert words in " ".join(paths.in_words(cuda))


def test_a_part_is_measured_again_when_what_it_depends_on_changes(tmp_path: Path) -> None:
    calls = []

    def measure() -> dict[str, int]:
        calls.append(1)
        return {"n": len(calls)}

    assert PartStore(tmp_path, "a").get("x", measure, recipe=1) == {"n": 1}
    assert PartStore(tmp_path, "a").get("x", measure, recipe=1) == {"n": 1}
    assert PartStore(tmp_path, "a").get("x", measure, recipe=2) == {"n": 2}
    assert PartStore(tmp_path, "b").get("x", measure, recipe=2) == {"n": 3}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("1")
    before = model_state(tmp_path / "model")
    (tmp_path / "model" / "weights").write_text("22")
    assert model_state(tmp_path / "model") != before
    assert model_state(None) == []
