"""Exported bytes: those of the rollout, and those that independent readers understand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor as TorchaoNVFP4
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from checkpoints import TOKENIZER, content, make_source, stored
from numerics import assert_bit_equal, assert_no_worse_than_torch
from tiny import make_engine, make_model, make_policy, make_prompts, rollout_logprobs, sampling
from trace_kernels import get_format
from trace_lightning.export.calibration import read_texts
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.fp4 import quantize_group
from trace_lightning.export.source import open_source
from trace_lightning.models.checkpoint import load_model
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.recipe import QuantRecipe

W4A16 = QuantRecipe(weights="nvfp4", kv_cache="nvfp4")
# hidden 72: linears on it are no whole blocks; intermediate 96 is whole in both formats
FAMILIES = {"llama": {"hidden_size": 72, "head_dim": 16}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}}


def bf16_model(family: str, **settings):
    """A model whose weights BF16 holds exactly, so that what is not in FP4 is exported exactly."""
    model = make_model(family, **settings)
    for parameter in model.parameters():  # `model.bfloat16()` would round the angles of RoPE as well
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", W4A16),
        ("qwen2", dataclasses.replace(W4A16, four_over_six=True)),
        ("qwen3", QuantRecipe(weights="mxfp4")),
    ],
)
def test_bytes_are_those_of_the_rollout(family, recipe, tmp_path) -> None:
    policy = make_policy(family, recipe, **FAMILIES[family])
    export_source(make_source(policy, recipe), tmp_path / "out", ExportFormat(format=recipe.weights))
    tensors, seen = stored(tmp_path / "out"), 0
    for layer in make_engine(policy, recipe)._decoder.layers:
        for linear in layer.linears:
            packed, row = linear.packed, 0
            for name, part in linear.parts.items():
                rows, row = slice(row, row + len(part)), row + len(part)
                if part.shape[1] % packed.format.block_size:  # as values
                    assert_bit_equal(tensors[f"{name}.weight"], part.bfloat16())
                    continue
                seen += 1
                assert_bit_equal(tensors[f"{name}.weight_packed"], packed.qdata[rows])
                assert_bit_equal(tensors[f"{name}.weight_scale"].view(torch.uint8), packed.scale[rows])
                if recipe.weights == "nvfp4":  # one outer scale for the whole group
                    assert_bit_equal(1 / tensors[f"{name}.weight_global_scale"], packed.outer_scale.reshape(1))
    assert seen == (4 if family == "llama" else 14)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_compressed_tensors_reads_the_same_weights(fmt, tmp_path) -> None:
    recipe = QuantRecipe(weights=fmt, activations=fmt)
    target, source = tmp_path / "out", make_source(make_model("qwen3"), recipe)
    export_source(source, target, ExportFormat(format=fmt, activations="none"))
    section = json.loads((target / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(section).config_groups.values()
    reader, tensors = BaseCompressor.get_value_from_registry(section["format"]), stored(target)
    ours = dict(load_model(target, torch.float32).named_parameters())
    names = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    for name in names:
        local = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        assert_bit_equal(reader.decompress(local, scheme)["weight"].float(), ours[f"{name}.weight"])
    assert len(names) == 14


def test_torchao_reads_the_same_weights_from_modelopt(tmp_path) -> None:
    target = tmp_path / "out"
    export_source(make_source(make_model("qwen3"), W4A16), target, ExportFormat(format="nvfp4", dialect="modelopt"))
    tensors, ours = stored(target), dict(load_model(target, torch.float32).named_parameters())
    names = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    for name in names:
        codes, outer = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_2"]
        theirs = TorchaoNVFP4(codes, tensors[f"{name}.weight_scale"], 16, torch.float32, per_tensor_scale=outer)
        assert_bit_equal(theirs.dequantize(torch.float32), ours[f"{name}.weight"])
    assert len(names) == 14
    assert not any(name.endswith("input_scale") for name in tensors)  # W4A16 has none
    details = json.loads((target / "hf_quant_config.json").read_text())["quantization"]
    assert details["quant_algo"] == "W4A16_NVFP4"
    assert details["kv_cache_quant_algo"] == "NVFP4"
    assert details["exclude_modules"] == ["lm_head"]


def drawn_logprobs(model, prompts, generation, num_samples: int) -> torch.Tensor:
    """Log-probs that a Hugging Face model gives to the tokens that an engine drew, flat."""
    found = []
    for index, completion in enumerate(generation.completions):
        prompt = prompts[index // num_samples].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(logprobs.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1))
    return torch.cat(found)


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")  # the wanted way to dequantise
@pytest.mark.parametrize(("family", "fmt"), [("llama", "nvfp4"), ("qwen2", "nvfp4"), ("qwen3", "mxfp4")])
def test_transformers_gives_the_log_probs_of_the_engine(family, fmt, tmp_path) -> None:
    recipe, model = QuantRecipe(weights=fmt), bf16_model(family, **FAMILIES[family])
    export_source(make_source(model, recipe), tmp_path / "out", ExportFormat(format=fmt))
    prompts, params = make_prompts(7, 5), sampling(temperature=1.0)
    generation = make_engine(model, recipe).generate(prompts, params, num_samples=2)
    exact = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, quantization_config=exact)
    theirs = theirs.float()  # transformers 5.17 leaves the dequantised linears in BF16, in which they are exact
    reference = drawn_logprobs(theirs, prompts, generation, 2)
    # What is stored in BF16 is exact here: both sides compute in FP32 and differ by the order of sums alone.
    torch.testing.assert_close(rollout_logprobs(generation), reference, rtol=0, atol=2e-5)
    as_served = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).bfloat16()
    engine = make_engine(model, recipe, dtype=torch.bfloat16)
    scored = engine.generate(prompts, params, num_samples=2)
    served = drawn_logprobs(as_served, prompts, scored, 2)
    reference = drawn_logprobs(theirs, prompts, scored, 2)
    assert_no_worse_than_torch(rollout_logprobs(scored), served, reference)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_byte_identical(family, dialect, tmp_path) -> None:
    how = ExportFormat(format="nvfp4", dialect=dialect, max_shard_gb=4e-5)
    export_source(make_source(make_model(family, **FAMILIES[family]), W4A16), tmp_path / "a", how)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    assert "lm_head.weight" in stored(tmp_path / "a") or family != "llama"
    assert ("lm_head.weight" in stored(tmp_path / "a")) == (family == "llama")  # the others are tied
    export_source(open_source(str(tmp_path / "a")), tmp_path / "b", how)
    # transformers takes any tokenizer beside a qwen2 config for Qwen2's own, also this one of single characters
    ours = [name for name in content(tmp_path / "a") if family != "qwen2" or not name.startswith("tokenizer")]
    assert [name for name in ours if content(tmp_path / "a")[name] != content(tmp_path / "b")[name]] == []
    assert content(tmp_path / "a").keys() == content(tmp_path / "b").keys()


def test_the_other_dialect_and_back(tmp_path) -> None:
    one, other = (ExportFormat(format="nvfp4", dialect=name) for name in ("compressed-tensors", "modelopt"))
    export_source(make_source(make_model("llama"), W4A16), tmp_path / "a", one)
    export_source(open_source(str(tmp_path / "a")), tmp_path / "b", other)
    export_source(open_source(str(tmp_path / "b")), tmp_path / "c", one)
    assert content(tmp_path / "a").keys() == content(tmp_path / "c").keys()
    first, last = stored(tmp_path / "a"), stored(tmp_path / "c")
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert_bit_equal(last[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_run_that_starts_from_an_export_rolls_out_the_same_weights(tmp_path) -> None:
    policy = make_policy("qwen3", W4A16)
    export_source(make_source(policy, W4A16), tmp_path / "out", ExportFormat(format="nvfp4"))
    again = load_policy(str(tmp_path / "out"), W4A16, dtype=torch.float32)
    for before, after in zip(*(make_engine(p, W4A16)._decoder.layers for p in (policy, again)), strict=True):
        for one, two in zip(before.linears, after.linears, strict=True):
            assert_bit_equal(one.packed.qdata, two.packed.qdata)
            assert_bit_equal(one.weight, two.weight)


@pytest.mark.parametrize(("fmt", "four_over_six"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
def test_quantising_our_values_again_changes_none(fmt, four_over_six) -> None:
    weights = [torch.randn(64, 96) * scale for scale in (1.0, 1e-3)]
    first = [packed.dequantize(torch.float32) for packed in quantize_group(weights, fmt, four_over_six)]
    for before, again in zip(first, quantize_group(first, fmt, four_over_six), strict=True):
        assert_bit_equal(again.dequantize(torch.float32), before)


def test_kv_scales_are_those_of_the_rollout(tmp_path) -> None:
    policy = make_policy("qwen3", W4A16)
    record = export_source(
        make_source(policy, W4A16), tmp_path / "out", ExportFormat(format="nvfp4", dialect="modelopt")
    )
    decoder, tensors = make_engine(policy, W4A16)._decoder, stored(tmp_path / "out")
    for layer, scales in enumerate(record.kv_scales):
        k, v = decoder.kv_outer(layer)
        assert scales == {"k": k.flatten().tolist(), "v": v.flatten().tolist()}
        name = f"model.layers.{layer}.self_attn"
        assert tensors[f"{name}.k_proj.k_scale"] == k.amax()
        assert tensors[f"{name}.v_proj.v_scale"] == v.amax()


def test_a_rotated_cache_is_not_announced(tmp_path) -> None:
    recipe = dataclasses.replace(W4A16, kv_rotation="hadamard", bf16_layers=["first:1"])
    how = ExportFormat(format="nvfp4", dialect="modelopt")
    record = export_source(make_source(make_policy("qwen3", recipe), recipe), tmp_path / "out", how)
    details = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert details["kv_cache_quant_algo"] is None
    assert "model.layers.0.mlp.up_proj" in details["exclude_modules"]
    assert not any(name.endswith("k_scale") for name in stored(tmp_path / "out"))
    assert [bool(scales) for scales in record.kv_scales] == [False, True]


class TestInputs:
    """W4A4: one scale for all tokens, measured on texts."""

    @pytest.fixture
    def run(self, tmp_path) -> Path:
        run = tmp_path / "run"
        run.mkdir()
        lines = [{"prompt": "12+34=", "completion": "46"}, {"prompt": "7*8=", "completion": "56"}]
        (run / "completions.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return run

    def test_both_dialects_store_one_number_two_ways(self, run, tmp_path) -> None:
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4")
        policy = make_policy("qwen3", recipe)
        for dialect in ("compressed-tensors", "modelopt"):
            how = ExportFormat(format="nvfp4", dialect=dialect)
            record = export_source(make_source(policy, recipe, run), tmp_path / dialect, how)
            assert record.calibration == "2 texts of completions.jsonl"
        divisors, factors = stored(tmp_path / "compressed-tensors"), stored(tmp_path / "modelopt")
        names = [name for name in factors if name.endswith(".input_scale")]
        assert len(names) == 14
        for name in names:
            assert divisors[name.replace("input_scale", "input_global_scale")] == 1 / factors[name]
        q, k = (factors[f"model.layers.0.self_attn.{p}_proj.input_scale"] for p in "qk")
        assert q == k
        section = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
        (scheme,) = QuantizationConfig.model_validate(section).config_groups.values()
        assert scheme.input_activations.dynamic == "local"

    def test_a_fixed_scale_rounds_like_a_scale_per_token(self) -> None:
        fmt, x = get_format("nvfp4"), torch.randn(64, 128) * torch.logspace(-2, 0, 64)[:, None]
        fixed = fmt.outer_from_amax(x.abs().amax().reshape(1, 1) * 4)
        assert_bit_equal(fmt.dequantize(fmt.quantize(x, fixed)), fmt.dequantize(fmt.quantize(x)))

    def test_the_package_rounds_inputs_as_the_rollout_does(self, run, tmp_path) -> None:
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4")
        source = make_source(make_policy("qwen3", recipe), recipe, run)
        export_source(source, tmp_path / "out", ExportFormat(format="nvfp4"))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        fmt, module, equal, total = get_format("nvfp4"), model.get_submodule("model.layers.1.mlp.up_proj"), 0, 0
        module.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].flatten(0, 1)))
        inputs: list[torch.Tensor] = []
        model(torch.arange(6, 31)[None])
        for x in inputs:
            theirs = forward_quantize(module, x, "input", module.quantization_scheme.input_activations)
            ours = fmt.dequantize(fmt.quantize(x)).to(x.dtype)
            equal, total = equal + int((theirs == ours).sum()), total + x.numel()
        assert total == 25 * 64
        assert equal >= 0.99 * total  # the rest are ties, which its order of operations decides otherwise

    def test_texts_are_needed(self, tmp_path) -> None:
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4")
        with pytest.raises(ValueError, match=r"--calibration .* --activations none"):
            export_source(make_source(make_model("qwen3"), recipe), tmp_path / "out", ExportFormat(format="nvfp4"))
        file = tmp_path / "texts.jsonl"
        file.write_text(json.dumps({"messages": "12+34="}))
        with pytest.raises(ValueError, match=r"texts.jsonl has no line with a `prompt`"):
            read_texts(file, load_tokenizer(TOKENIZER))
        assert not (tmp_path / "out").exists()

    def test_separators_inside_a_text_do_not_cut_it(self, tmp_path) -> None:
        file = tmp_path / "texts.jsonl"
        file.write_bytes('{"text": "1+\u20281"}\r\n12+34=\r\n'.encode())
        assert read_texts(file, load_tokenizer(TOKENIZER)) == ["1+\u20281", "12+34="]
