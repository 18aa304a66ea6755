"""`trace-fit export` on checkpoints of runs: what it finds, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from checkpoints import content, stored
from numerics import assert_bit_equal
from tiny import make_engine
from trace_lightning.cli import main
from trace_lightning.export.source import open_source
from trace_lightning.export.survival import Survival, update_survival
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import QuantRecipe

PATH = "builtin:tiny-qwen3"
RECIPE = QuantRecipe(weights="nvfp4", kv_cache="fp8", exclude=["down_proj"])


def export(*arguments: object) -> int:
    """Exit code of `trace-fit export`."""
    sys.argv = ["trace-fit", "export", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def module() -> PolicyModule:
    module = PolicyModule(PATH, recipe=RECIPE)
    module.configure_model()
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return module


@pytest.fixture
def checkpoint(module, tmp_path) -> Path:
    """A run's folder with what Lightning stores of a module, and the summary of the run."""
    file = tmp_path / "run" / "checkpoints" / "last.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "global_step": 40}, file)
    summary = {
        "steps": 40,
        "heldout": {"first": 0.44, "last": 0.87},
        "eval_sets": {"sums/reward": {"first": 0, "last": 1}},
    }
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    return file


def test_a_checkpoint_gives_the_rollouts_weights(checkpoint, module, tmp_path) -> None:
    assert export("--ckpt_path", checkpoint, "--out", tmp_path / "out", "--format", "nvfp4") == 0
    tensors = stored(tmp_path / "out")
    layer = make_engine(module.policy, RECIPE)._decoder.layers[1]
    assert_bit_equal(tensors["model.layers.1.self_attn.q_proj.weight_packed"], layer.qkv.packed.qdata[:256])
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16  # excluded by the recipe
    assert "lm_head.weight" not in tensors
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]
    assert section["kv_cache_scheme"]["num_bits"] == 8
    assert tensors["model.layers.0.self_attn.k_scale"].shape == (1,)
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        PATH,
        "40 optimizer steps",
        "| heldout reward | 0.44 | 0.87 |",
        "W4A16KV8/fp8+nvfp4",
        "byte for byte",
    ):
        assert words in card


def test_plain_export_resumes_the_masters(checkpoint, module, tmp_path) -> None:
    assert export("--ckpt_path", checkpoint, "--out", tmp_path / "out") == 0
    again = PolicyModule(str(tmp_path / "out"), recipe=RECIPE)
    again.configure_model()
    for (name, one), two in zip(module.policy.named_parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(one, two), name
    source = open_source(str(tmp_path / "out"))  # the recipe came along
    assert source.record.recipe == RECIPE


def test_update_survival_is_reported(checkpoint, tmp_path, capsys) -> None:
    arguments = ("--ckpt_path", checkpoint, "--out", tmp_path / "out", "--format", "nvfp4", "--survival")
    assert export(*arguments) == 0
    assert "of the update" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "trace_export.json").read_text())
    assert 0.5 < record["survival"]["kept"] < 1.5
    assert "Of the update by training they keep" in (tmp_path / "out" / "README.md").read_text()
    assert export("--ckpt_path", checkpoint, "--out", tmp_path / "hf", "--survival") == 2


def refused(capsys, tmp_path: Path, *arguments: object) -> str:
    before = sorted(tmp_path.rglob("*"))
    assert export(*arguments) == 2
    assert sorted(tmp_path.rglob("*")) == before
    return capsys.readouterr().err


def test_what_is_no_checkpoint_is_refused(checkpoint, module, tmp_path, capsys) -> None:
    out = ("--out", tmp_path / "out", "--format", "nvfp4")
    short = tmp_path / "short.ckpt"
    short.write_bytes(checkpoint.read_bytes()[:-2000])
    assert "short.ckpt is no checkpoint, or is cut short" in refused(capsys, tmp_path, "--ckpt_path", short, *out)
    other = tmp_path / "other.ckpt"
    torch.save({"weights": torch.zeros(1)}, other)
    assert "no checkpoint of a PolicyModule: it holds weights" in refused(capsys, tmp_path, "--ckpt_path", other, *out)
    state = module.state_dict()
    state.pop("policy.model.norm.weight")
    torch.save({"state_dict": state, "hyper_parameters": dict(module.hparams)}, other)
    assert "model.norm.weight (128,) is missing" in refused(capsys, tmp_path, "--ckpt_path", other, *out)
    moved = dict(module.hparams) | {"path": "/gone"}
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": moved}, other)
    assert "by --model.path" in refused(capsys, tmp_path, "--ckpt_path", other, *out)
    assert "no directory" in refused(capsys, tmp_path, "--ckpt_path", tmp_path / "nothing", *out)
    assert "has no config.json" in refused(capsys, tmp_path, "--ckpt_path", checkpoint.parent, *out)
    assert export("--ckpt_path", other, *out, "--model.path", PATH) == 0


def test_a_target_that_exists_is_refused_before_the_source_is_read(checkpoint, tmp_path, capsys) -> None:
    assert export("--ckpt_path", PATH, "--out", tmp_path / "out") == 0
    before = content(tmp_path / "out")
    assert "exists" in refused(capsys, tmp_path, "--ckpt_path", tmp_path / "nothing", "--out", tmp_path / "out")
    assert "is what is exported" in refused(
        capsys, tmp_path, "--ckpt_path", tmp_path / "out", "--out", tmp_path / "out", "--overwrite"
    )
    assert content(tmp_path / "out") == before
    shutil.copytree(tmp_path / "out", checkpoint.parents[1] / "policy")
    policy = ("--out", checkpoint.parents[1] / "policy", "--overwrite")
    assert "is what is exported" in refused(capsys, tmp_path, "--ckpt_path", checkpoint.parents[1], *policy)


def test_rewards_are_those_of_the_last_weights(checkpoint) -> None:
    content = torch.load(checkpoint, weights_only=True)
    torch.save(content | {"global_step": 20}, checkpoint.with_name("best.ckpt"))
    assert open_source(str(checkpoint)).record.evaluation
    early = open_source(str(checkpoint.with_name("best.ckpt"))).record
    assert (early.steps, early.evaluation) == (20, {})


class TestSurvival:
    """What FP4 leaves of an update, on weights where that is known."""

    GROUPS = (("a", "b"),)

    @staticmethod
    def weights() -> dict[str, torch.Tensor]:
        return {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(32, 64)}

    def total(self, before, after) -> Survival:
        return sum(update_survival(before, after, self.GROUPS, "nvfp4").values(), Survival())

    def test_a_large_update_survives(self) -> None:
        before, after = self.weights(), self.weights()
        found = self.total(before, after)
        assert found.kept == pytest.approx(1, abs=0.05)
        assert found.size == pytest.approx(1, abs=0.05)

    def test_an_update_below_every_threshold_is_gone(self) -> None:
        before = {name: w.sign() + (w == 0) for name, w in self.weights().items()}  # every weight on its grid value
        found = self.total(before, {name: w * (1 + 1e-3 * torch.rand(w.shape)) for name, w in before.items()})
        assert (found.kept, found.size, found.changed) == (0, 0, 0)

    def test_a_small_update_survives_on_average_only(self) -> None:
        before = self.weights()
        after = {name: w + 0.003 * torch.randn_like(w) for name, w in before.items()}
        found = self.total(before, after)
        assert found.size > 3  # few weights move, and those by whole steps
        assert found.changed < 0.1
        assert self.total(before, before).as_dict() == {}
