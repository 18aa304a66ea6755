"""Runs and exports that start from FP4 checkpoints of other programs, and bad input, which changes nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import save_file

from checkpoints import PACKED, content, make_source, stored, write_foreign
from numerics import assert_bit_equal
from tiny import make_engine, make_model
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.source import open_source
from trace_lightning.models.checkpoint import StoredTensors, load_model
from trace_lightning.models.policy import load_policy
from trace_lightning.recipe import QuantRecipe

CT = ExportFormat(format="nvfp4")
MODELOPT = ExportFormat(format="nvfp4", dialect="modelopt")
NAME = "model.layers.0.mlp.up_proj"


class TestForeign:
    def test_values_are_those_of_its_own_reader(self, tmp_path) -> None:
        tensors = write_foreign(tmp_path / "foreign")
        scales = torch.cat([t.view(torch.uint8).flatten() for n, t in tensors.items() if n.endswith("weight_scale")])
        assert ((scales > 0) & (scales < 8)).any()  # subnormal block scales
        weights = dict(load_model(tmp_path / "foreign", torch.float32).named_parameters())
        scheme, reader = preset_name_to_scheme("NVFP4A16", ["Linear"]), BaseCompressor.get_value_from_registry(PACKED)
        for name in (n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")):
            local = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            theirs = reader.decompress(local, scheme)["weight"].float()  # rounded to BF16 on the way
            error = (weights[f"{name}.weight"] - theirs).abs() / theirs.abs().clamp_min(1e-30)
            assert error.max() <= 2**-7, name

    def test_export_keeps_every_byte(self, tmp_path) -> None:
        for modelopt, how in ((False, CT), (True, MODELOPT)):
            tensors = write_foreign(tmp_path / how.dialect, modelopt=modelopt)
            export_source(open_source(str(tmp_path / how.dialect)), tmp_path / f"{how.dialect}-again", how)
            again = stored(tmp_path / f"{how.dialect}-again")
            assert again.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert_bit_equal(again[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))

    def test_its_cache_scheme_and_input_scales_stay(self, tmp_path) -> None:
        write_foreign(tmp_path / "foreign", modelopt=True)
        export_source(open_source(str(tmp_path / "foreign")), tmp_path / "again", MODELOPT)
        details = json.loads((tmp_path / "again" / "hf_quant_config.json").read_text())["quantization"]
        assert details["quant_algo"] == "NVFP4"
        assert details["kv_cache_quant_algo"] == "FP8"

    def test_a_run_starts_from_it(self, tmp_path) -> None:
        write_foreign(tmp_path / "foreign")
        recipe = QuantRecipe(weights="nvfp4")
        policy = load_policy(str(tmp_path / "foreign"), recipe, dtype=torch.float32)
        linear = make_engine(policy, recipe)._decoder.layers[0].o
        master = policy.get_parameter("model.layers.0.self_attn.o_proj.weight").detach()
        # The first requantisation moves values: its block scales are others, and none is subnormal.
        error, blocks = ((linear.weight - master).abs().unflatten(1, (-1, 16)), master.abs().unflatten(1, (-1, 16)))
        smallest_step = linear.packed.outer_scale * 2**-6 / 2
        assert error.max() > 0
        assert (error <= 0.2 * blocks.amax(-1, keepdim=True) + smallest_step / 2).all()
        assert all(parameter.requires_grad for parameter in policy.parameters())


def damaged(directory: Path, change) -> Path:
    """A foreign checkpoint whose tensors went through `change`."""
    tensors = write_foreign(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def cut(directory: Path) -> Path:
    write_foreign(directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return directory


def config_with(directory: Path, **section: object) -> Path:
    write_foreign(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= section
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def scale_of(value: float):
    return lambda t: t.update({f"{NAME}.weight_global_scale": torch.tensor([value])})


BAD = {
    "scale_missing": (lambda d: damaged(d, lambda t: t.pop(f"{NAME}.weight_scale")), f"{NAME}.weight_scale is missing"),
    "outer_missing": (lambda d: damaged(d, lambda t: t.pop(f"{NAME}.weight_global_scale")), "weight_global_scale is m"),
    "codes_missing": (lambda d: damaged(d, lambda t: t.pop(f"{NAME}.weight_packed")), f"{NAME}.weight_packed is miss"),
    "linear_missing": (
        lambda d: damaged(d, lambda t: [t.pop(k) for k in list(t) if k.startswith(NAME)]),
        rf"{NAME}.weight \(96, 64\) is missing",
    ),
    "shape": (
        lambda d: damaged(d, lambda t: t.update({f"{NAME}.weight_packed": torch.zeros(4, 32, dtype=torch.uint8)})),
        rf"{NAME}.weight_packed is torch.uint8 \(4, 32\), but .*\(96, 32\)",
    ),
    "plain_shape": (
        lambda d: damaged(d, lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
        r"model.norm.weight has the shape \(3,\), the model wants \(64,\)",
    ),
    "dtype": (
        lambda d: damaged(d, lambda t: t.update({f"{NAME}.weight_scale": t[f"{NAME}.weight_scale"].bfloat16()})),
        "weight_scale is torch.bfloat16",
    ),
    "zero": (lambda d: damaged(d, scale_of(0.0)), "weight_global_scale is 0.0; it must be positive"),
    "nan": (lambda d: damaged(d, scale_of(float("nan"))), "weight_global_scale is nan"),
    "truncated": (cut, "model.safetensors is cut short"),
    "method": (lambda d: config_with(d, quant_method="gptq"), "quantised by gptq; compressed-tensors and modelopt can"),
    "format": (
        lambda d: config_with(
            d, config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 4}, "format": "pack-quantized"}}
        ),
        "'pack-quantized': nvfp4-pack-quantized and",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_checkpoints_are_refused_by_name(fault, tmp_path) -> None:
    make, message = BAD[fault]
    directory = make(tmp_path / "bad")
    target = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        export_source(open_source(str(directory)), target, CT)
    with pytest.raises(ValueError, match=message):
        load_policy(str(directory), QuantRecipe(), dtype=torch.float32)
    assert not target.exists()


def test_a_missing_shard_is_named(tmp_path) -> None:
    export_source(open_source("builtin:tiny-qwen3"), tmp_path / "a", ExportFormat(format="nvfp4", max_shard_gb=1e-4))
    (tmp_path / "a" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names model-00002-of-00003.safetensors, which is missing"):
        StoredTensors(tmp_path / "a")


@pytest.fixture
def ready(tmp_path) -> Path:
    """A directory that an export has made."""
    export_source(open_source("builtin:tiny-qwen3"), tmp_path / "ready", CT)
    return tmp_path / "ready"


class TestTarget:
    def test_an_existing_one_needs_overwrite(self, ready) -> None:
        before, source = content(ready), open_source("builtin:tiny-qwen3")
        with pytest.raises(ValueError, match=r"ready exists; .* --overwrite"):
            export_source(source, ready, ExportFormat(format="mxfp4"))
        assert content(ready) == before
        export_source(source, ready, ExportFormat(format="mxfp4"), overwrite=True)
        assert content(ready).keys() == before.keys()
        assert content(ready) != before

    def test_what_is_no_model_is_never_replaced(self, tmp_path) -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter.tex").write_text("years")
        with pytest.raises(ValueError, match="no model, and will not be replaced"):
            export_source(open_source("builtin:tiny-qwen3"), tmp_path / "thesis", CT, overwrite=True)
        assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years"

    @pytest.mark.parametrize("fmt", ["hf", "nvfp4"])
    def test_a_full_disk_changes_nothing(self, ready, fmt, monkeypatch) -> None:
        def full(*args, **kwargs) -> None:
            raise OSError(28, "No space left on device")

        before = content(ready)
        monkeypatch.setattr("trace_lightning.export.folder.save_file", full)
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
        with pytest.raises(ValueError, match=f"{re.escape(str(ready))} could not be written: .*No space left"):
            export_source(open_source("builtin:tiny-qwen3"), ready, ExportFormat(format=fmt), overwrite=True)
        assert content(ready) == before
        assert [path.name for path in ready.parent.iterdir()] == ["ready"]

    def test_leftovers_of_a_crash_are_cleared(self, ready) -> None:
        for name in (".ready.part", ".ready.old", "ready.old"):  # the last one is the user's
            shutil.copytree(ready, ready.with_name(name))
        export_source(open_source("builtin:tiny-qwen3"), ready, CT, overwrite=True)
        assert sorted(path.name for path in ready.parent.iterdir()) == ["ready", "ready.old"]

    def test_a_replacement_that_stops_half_way_is_undone(self, ready, monkeypatch) -> None:
        before, rename = content(ready), Path.rename

        def refuse(path: Path, target: Path) -> Path:
            if path.name.endswith(".part"):
                raise OSError("refused")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(ValueError, match="refused; what was there before is untouched"):
            export_source(open_source("builtin:tiny-qwen3"), ready, ExportFormat(format="mxfp4"), overwrite=True)
        assert content(ready) == before
        monkeypatch.undo()
        ready.rename(ready.with_name(".ready.old"))  # killed between the two renames
        with pytest.raises(ValueError, match=r"ready exists"):
            export_source(open_source("builtin:tiny-qwen3"), ready, CT)
        assert content(ready) == before


def test_tokenizer_chat_template_and_generation_config_come_along(tmp_path) -> None:
    source = open_source("builtin:tiny-qwen3")
    source.tokenizer.chat_template = "{{ messages[0].content }}"
    export_source(source, tmp_path / "out", CT)
    again = open_source(str(tmp_path / "out"))
    assert again.tokenizer.chat_template == source.tokenizer.chat_template
    assert again.tokenizer("12+34=")["input_ids"] == source.tokenizer("12+34=")["input_ids"]
    assert again.model.generation_config.eos_token_id == source.model.generation_config.eos_token_id


class TestFormats:
    def test_a_second_rounding_is_refused(self, ready, tmp_path) -> None:
        with pytest.raises(ValueError, match="is in nvfp4; in mxfp4 it would be rounded twice"):
            export_source(open_source(str(ready)), tmp_path / "out", ExportFormat(format="mxfp4"))

    def test_no_dialect_for_mxfp4(self, tmp_path) -> None:
        with pytest.raises(ValueError, match="modelopt stores nvfp4, not mxfp4"):
            export_source(
                open_source("builtin:tiny-qwen3"), tmp_path / "out", ExportFormat(format="mxfp4", dialect="modelopt")
            )

    def test_stacked_experts_go_in_plain_format_only(self, tmp_path) -> None:
        source = make_source(make_model("qwen3_moe"), QuantRecipe())
        with pytest.raises(ValueError, match=r"stacks the weights of several experts.* --format hf"):
            export_source(source, tmp_path / "out", CT)
        export_source(source, tmp_path / "out", ExportFormat())
        assert load_model(tmp_path / "out", torch.float32).num_parameters() == source.model.num_parameters()

    def test_a_policy_without_linears_is_refused(self, tmp_path) -> None:
        with pytest.raises(ValueError, match="no linear that the recipe quantises"):
            export_source(make_source(make_model("gpt2"), QuantRecipe()), tmp_path / "out", CT)

    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    def test_a_diverged_policy_is_refused(self, fmt, tmp_path) -> None:
        model = make_model("llama")
        model.get_parameter("model.layers.1.mlp.gate_proj.weight").data[3, 5] = float("nan")
        with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj: a weight is not finite"):
            export_source(make_source(model, QuantRecipe()), tmp_path / "out", ExportFormat(format=fmt))
        assert not any(tmp_path.iterdir())

    def test_plain_format_out_of_fp4_holds_the_values(self, ready, tmp_path) -> None:
        export_source(open_source(str(ready)), tmp_path / "out", ExportFormat(dtype="bfloat16"))
        values = dict(load_model(ready, torch.bfloat16).named_parameters())
        for name, parameter in load_model(tmp_path / "out", torch.bfloat16).named_parameters():
            assert_bit_equal(parameter.detach(), values[name].detach())
