"""Low-rank adapters: what the package peft makes of the same files, and FP4 that rounds the sum once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from checkpoints import content, stored
from numerics import assert_bit_equal
from trace_lightning.export.adapters import Adapters, MergedWeights
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.fp4 import quantize_group
from trace_lightning.export.record import read_record
from trace_lightning.export.source import open_source
from trace_lightning.hparams import to_plain
from trace_lightning.models.checkpoint import load_model
from trace_lightning.recipe import QuantRecipe

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21
PATH = "builtin:tiny-qwen3"
RECIPE = QuantRecipe(weights="nvfp4", kv_cache="nvfp4")
NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The tiny model as a directory."""
    export_source(open_source(PATH), tmp_path_factory.mktemp("base") / "model", ExportFormat())
    return next(tmp_path_factory.getbasetemp().glob("base*/model"))


@pytest.fixture(scope="module")
def trained(base):
    """A peft model with adapters that are not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load_model(base, torch.float32), config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def adapter(trained, base, tmp_path) -> Path:
    trained.peft_config["default"].base_model_name_or_path = str(base)
    trained.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = peft.PeftModel.from_pretrained(load_model(base, torch.float32), adapter).merge_and_unload()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_merged_weights_are_pefts(base, adapter, tmp_path) -> None:
    record = export_source(open_source(str(adapter)), tmp_path / "out", ExportFormat())
    assert record.adapters == "merge"
    for name, parameter in load_model(tmp_path / "out", torch.float32).named_parameters():
        torch.testing.assert_close(parameter.detach(), merged_by_peft(base, adapter)[name], rtol=0, atol=1e-6)


def test_fp4_rounds_the_sum_once(adapter, tmp_path) -> None:
    source = open_source(str(adapter.parent))  # a run's folder
    before = source.base.weights
    record = export_source(source, tmp_path / "out", ExportFormat(format="nvfp4"), before=before)
    names = [NAME.replace("q_", f"{part}_") for part in "qkv"]
    packed = quantize_group([source.weights[f"{name}.weight"] for name in names], "nvfp4", False)
    tensors = stored(tmp_path / "out")
    for name, weight in zip(names, packed, strict=True):
        assert_bit_equal(tensors[f"{name}.weight_packed"], weight.qdata)
    assert 0.8 < record.survival["kept"] < 1.2
    assert not record.quantized_as_trained  # peft's files do not say how the rollout ran


def test_beside_an_fp4_base(base, adapter, tmp_path) -> None:
    how = ExportFormat(format="nvfp4", adapters="beside")
    export_source(open_source(str(adapter)), tmp_path / "out", how)
    export_source(open_source(str(base)), tmp_path / "plain", ExportFormat(format="nvfp4"))
    assert content(tmp_path / "plain")["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    theirs = merged_by_peft(base, adapter)
    for name, tensor in merged_by_peft(base, tmp_path / "out" / "adapter").items():
        assert torch.equal(tensor, theirs[name])
    assert "--lora-modules policy=PATH/adapter" in (tmp_path / "out" / "README.md").read_text()


def run_checkpoint(trained, folder: Path, path: str, **settings: object) -> Path:
    """What a run stores that trained adapters: these alone, under `policy.`."""
    state = {}
    for name, parameter in trained.named_parameters():
        if ".lora_" in name:
            linear, _, matrix = name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".")
            state[f"policy.{linear}.{matrix}"] = parameter.detach()
    lora = {"class_path": "x.LoraConfig", "init_args": {"rank": 4, "alpha": 8.0, "rollout": "merged"} | settings}
    hparams = {"path": path, "recipe": to_plain(RECIPE), "lora": lora}
    file = folder / "run" / "checkpoints" / "last.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({"state_dict": state, "hyper_parameters": hparams, "global_step": 5}, file)
    return file


def test_a_checkpoint_of_adapters(trained, base, adapter, tmp_path) -> None:
    source = open_source(str(run_checkpoint(trained, tmp_path, str(base))))
    record = export_source(source, tmp_path / "out", ExportFormat(format="nvfp4"))
    assert record.quantized_as_trained
    assert record.kv_scales
    export_source(open_source(str(adapter)), tmp_path / "same", ExportFormat(format="nvfp4"))
    assert content(tmp_path / "out")["model.safetensors"] == content(tmp_path / "same")["model.safetensors"]
    export_source(source, tmp_path / "alone", ExportFormat(format="adapter"))
    assert peft.PeftConfig.from_pretrained(tmp_path / "alone").base_model_name_or_path == str(base)
    theirs = merged_by_peft(base, adapter)
    for name, tensor in merged_by_peft(base, tmp_path / "alone").items():
        assert torch.equal(tensor, theirs[name])


@pytest.mark.parametrize(("rollout", "as_trained"), [("adapter", "beside"), ("merged", "merge")])
def test_which_form_the_rollout_ran(rollout, as_trained, trained, base, tmp_path) -> None:
    source = open_source(str(run_checkpoint(trained, tmp_path, str(base), rollout=rollout)))
    export_source(source, tmp_path / "policy", ExportFormat(format="adapter"))
    for path, of in {"run": source, "policy": open_source(str(tmp_path / "policy"))}.items():
        for adapters in ("merge", "beside"):
            record = export_source(of, tmp_path / path / adapters, ExportFormat(format="nvfp4", adapters=adapters))
            assert record.quantized_as_trained == (adapters == as_trained)


def test_a_foreign_base_is_not_what_the_rollout_packed(trained, base, tmp_path) -> None:
    how = ExportFormat(format="nvfp4", adapters="beside", activations="none")
    for name in ("ours", "foreign"):
        directory = tmp_path / name
        export_source(open_source(str(base)), directory, ExportFormat(format="nvfp4"))
        record = dataclasses.replace(read_record(directory), quantized_as_trained=True)
        record.write(directory)
        if name == "foreign":
            (directory / "trace_export.json").unlink()
        file = run_checkpoint(trained, tmp_path / f"run-{name}", str(directory), rollout="adapter")
        record = export_source(open_source(str(file)), tmp_path / f"out-{name}", how)
        assert record.quantized_as_trained == (name == "ours")


def test_adapters_may_be_on_another_device_than_their_base() -> None:
    adapters = Adapters({"l": (torch.zeros(2, 16), torch.zeros(8, 2))}, 2, 2.0, 1.0, "")
    merged = MergedWeights({"l.weight": torch.zeros(8, 16, device="meta")}, adapters)
    assert merged["l.weight"].is_meta


class TestRefused:
    def change(self, adapter: Path, **settings: object) -> str:
        config = json.loads((adapter / "adapter_config.json").read_text()) | settings
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        return str(adapter)

    def test_variants_that_are_no_sum(self, adapter) -> None:
        with pytest.raises(ValueError, match="uses use_dora, which is more than"):
            open_source(self.change(adapter, use_dora=True))
        with pytest.raises(ValueError, match="is of type IA3"):
            open_source(self.change(adapter, peft_type="IA3"))

    def test_a_base_that_is_gone(self, adapter, base, caplog) -> None:
        path = self.change(adapter, base_model_name_or_path="/gone")
        with pytest.raises(ValueError, match=r"is needed as well.* by --model.path"):
            open_source(path)
        assert open_source(path, str(base)).adapters is not None
        assert f"does not say which weights its adapters were trained over: {base} is taken" in caplog.text

    def test_files_that_are_cut_short(self, adapter) -> None:
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
            open_source(str(adapter))

    def test_adapters_of_another_model(self, base) -> None:
        weights = open_source(str(base)).weights
        wrong = {NAME: (torch.zeros(4, 64), torch.zeros(256, 4))}
        adapters = Adapters(wrong, 4, 8.0, 2.0, str(base))
        with pytest.raises(ValueError, match=rf"the adapter of {NAME} is \(256, 4\) x \(4, 64\), .* \(256, 128\)"):
            MergedWeights(weights, adapters)
        elsewhere = dataclasses.replace(adapters, pairs={"model.layers.9.q_proj": wrong[NAME]})
        with pytest.raises(ValueError, match=r"has no model.layers.9.q_proj.weight"):
            MergedWeights(weights, elsewhere)

    def test_a_policy_without_adapters(self, base, tmp_path) -> None:
        for how in (ExportFormat(format="adapter"), ExportFormat(format="nvfp4", adapters="beside")):
            with pytest.raises(ValueError, match="has no low-rank adapters"):
                export_source(open_source(str(base)), tmp_path / "out", how)
