"""Adapters over a frozen FP4 base: both sides agree, the base is held once, and plain peft reads what is left."""

from __future__ import annotations

import copy
import gc
import shutil
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora import engine_of, make_adapted
from numerics import assert_bit_equal
from ranks import worker
from test_parity import PROMPTS, both_sides, recipe_of
from tiny import Scorer, make_batch, make_model, rollout_logprobs, sampling
from trace_lightning.callbacks import HFExport, RunCheckpoint
from trace_lightning.export.adapters import adapters_in
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.record import ExportRecord
from trace_lightning.export.source import adapter_source, open_source
from trace_lightning.models.lora import LoraConfig, base_checksum, frozen_tensors, install_lora
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.models.sharding import Weights
from trace_lightning.models.tiny import tiny_model, tiny_tokenizer
from trace_lightning.module import PolicyModule
from trace_lightning.quantization.kv import KVWeights, kv_outer_scales
from trace_lightning.quantization.lora import AdapterLinear, adapter_parameters, merged_state
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.fused_decoder import FusedDecoder
from trace_lightning.rollout.microbatch import take
from trace_lightning.rollout.reference import ReferenceConfig, ReferencePolicy
from trace_lightning.rollout.scoring import score
from trace_lightning.rollout.shared_linear import SharedLinear
from trace_lightning.strategy import FSDP2Strategy

W4 = QuantRecipe(weights="nvfp4")
GUIDED = {
    "W4A16KV4": recipe_of("nvfp4", "none", "nvfp4", mode="parity"),
    "W4A4KV4": recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity"),
    "mxfp4": recipe_of("mxfp4", "mxfp4", "mxfp4", mode="parity"),
    "mixed": recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity", exclude=["down_proj"], bf16_layers=["first:1"]),
    "unquantised": QuantRecipe(),
}
CPU = torch.device("cpu")


class TestParity:
    """Where the two sides part, importance ratios measure it."""

    @pytest.mark.parametrize("decoder", ["fused", "hf"])
    @pytest.mark.parametrize("rollout", ["adapter", "merged"])
    @pytest.mark.parametrize("name", ["W4A16KV4", "W4A4KV4", "mixed"])
    def test_guided_trainer_equals_engine(self, name: str, rollout: str, decoder: str) -> None:
        recipe = GUIDED[name]
        policy = make_adapted(recipe, rollout)
        engine = engine_of(policy, recipe, decoder=decoder)
        ours, theirs = both_sides(policy, engine, guided=True)
        assert (ours - theirs).abs().max() <= 1e-4
        with policy.trace_lora.off():
            without = both_sides(policy, engine, guided=True)[1]
        assert (ours - without).abs().mean() > 0.02, "adapters that do nothing would agree as well"

    @pytest.mark.parametrize("name", ["mxfp4", "unquantised"])
    @pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3_moe"])
    def test_other_families_and_formats(self, family: str, name: str) -> None:
        recipe = GUIDED[name]
        policy = make_adapted(recipe, family=family, targets=["q_proj", "v_proj", "o_proj"])
        ours, theirs = both_sides(policy, engine_of(policy, recipe), guided=name != "unquantised")
        assert (ours - theirs).abs().max() <= 1e-4

    @pytest.mark.parametrize("rollout", ["adapter", "merged"])
    def test_both_bound_k_and_v_alike(self, rollout: str) -> None:
        """The bound follows the adapters, biases and gains that no sync brings."""
        recipe = GUIDED["W4A4KV4"]
        policy = make_adapted(recipe, rollout, family="qwen2")
        for layer in policy.model.layers:
            layer.self_attn.k_proj.bias.data += 100
            layer.self_attn.v_proj.lora_B.data *= 100
        engine = engine_of(policy, recipe)
        for index, kv in enumerate(policy.trace_qat.kvs):
            weights = KVWeights.of(*kv._modules)
            expected = kv_outer_scales(weights, 2, kv.fmt, rotated=False, device=CPU)
            for ours, theirs in zip(engine.decoder.kv_outer(index), expected, strict=True):
                assert_bit_equal(ours, theirs)
            with policy.trace_lora.off():
                without = KVWeights.of(*kv._modules)
            assert (weights.v - without.v).abs().max() > 0
            outer = kv_outer_scales(without, 2, kv.fmt, rotated=False, device=CPU)
            assert not torch.equal(outer[1], expected[1])

    @pytest.mark.parametrize("name", ["W4A16KV4", "W4A4KV4"])
    def test_packed_matmuls_of_few_rows(self, name: str) -> None:
        """As on a GPU, where they read the codes and permuted inputs."""
        policy = make_adapted(GUIDED[name])
        engine = engine_of(policy, GUIDED[name])
        for layer in engine.decoder.layers:  # type: ignore[attr-defined]
            for linear in layer.linears:
                linear.crossover = 128
        ours, theirs = both_sides(policy, engine, guided=True)
        assert (ours - theirs).abs().max() <= 1e-4

    @pytest.mark.parametrize("rollout", ["adapter", "merged"])
    def test_bf16(self, rollout: str) -> None:
        """Frozen weights in BF16, adapters in FP32 under autocast: a BF16 policy's gap, not a wrong cast's."""
        recipe = GUIDED["W4A4KV4"]
        policy = make_adapted(recipe, rollout, dtype=torch.bfloat16)
        engine = engine_of(policy, recipe, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = both_sides(policy, engine, guided=True)
        assert {p.dtype for p in adapter_parameters(policy).values()} == {torch.float32}
        assert (ours - theirs).abs().mean() <= 1e-2

    def test_bf16_casts_are_those_of_autocast(self) -> None:
        policy = make_adapted(GUIDED["W4A4KV4"])
        engine = engine_of(policy, GUIDED["W4A4KV4"], dtype=torch.bfloat16)
        attention = policy.model.layers[0].self_attn
        x = torch.randn(5, 64).bfloat16()
        shared = engine.decoder.layers[0].qkv  # type: ignore[attr-defined]
        with torch.autocast("cpu", torch.bfloat16), policy.trace_qat.unquantized(), torch.no_grad():
            theirs = torch.cat([m(x) for m in (attention.q_proj, attention.k_proj, attention.v_proj)], -1)
        ours = shared(x)[0]
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert (ours != theirs).float().mean() < 0.02, "sums in another order may round a few numbers otherwise"


class TestHeldOnce:
    """The memory that LoRA is chosen for."""

    def reachable(self, *roots: Any) -> list[Tensor]:
        seen, found, todo = set(), [], list(roots)
        while todo:
            item = todo.pop()
            if id(item) in seen or isinstance(item, ModuleType | FunctionType | type):
                continue
            seen.add(id(item))
            if isinstance(item, Tensor) and not isinstance(item, PackedFP4Tensor):
                found.append(item)
            todo += gc.get_referents(item)
        return found

    @pytest.mark.parametrize("decoder", ["fused", "hf"])
    def test_no_weight_of_the_base_is_there_in_full(self, decoder: str) -> None:
        recipe = GUIDED["W4A4KV4"]
        policy = make_adapted(recipe, vocab_size=160)
        shapes = {tuple(m.group.base.shape) for m in policy.modules() if isinstance(m, AdapterLinear)}
        shapes |= {(m.out_features, m.in_features) for m in policy.modules() if isinstance(m, AdapterLinear)}
        assert (160, 64) not in shapes, "the embedding is no linear"
        engine = engine_of(policy, recipe, decoder=decoder)
        engine.generate(PROMPTS, sampling())
        tensors = self.reachable(policy, engine)
        assert any(tuple(t.shape) == (160, 64) for t in tensors), "the walk must reach weights"
        assert not [t.shape for t in tensors if t.is_floating_point() and tuple(t.shape) in shapes]
        own = {
            id(m.group.base): m.group.base.qdata.data_ptr() for m in policy.modules() if isinstance(m, AdapterLinear)
        }
        assert len({t.data_ptr() for t in tensors if t.dtype == torch.uint8} & set(own.values())) == len(own) == 8
        codes = [t for t in tensors if t.dtype == torch.uint8 and t.ndim == 2 and t.shape[0] in (64, 96, 192, 256)]
        assert len({t.data_ptr() for t in codes}) == 2 * len(own), "codes and scales of each base, once"

    def test_a_sync_brings_the_adapters_to_where_they_were(self) -> None:
        recipe = GUIDED["W4A16KV4"]
        policy = make_adapted(recipe)
        engine = engine_of(policy, recipe)
        assert set(Weights(policy).names) == set(adapter_parameters(policy))
        linears = [linear for layer in engine.decoder.layers for linear in layer.linears]  # type: ignore[attr-defined]
        assert all(isinstance(linear, SharedLinear) for linear in linears)
        before = [(t.data_ptr()) for linear in linears for t in (linear.a, linear.b)]
        packed = [t.clone() for linear in linears for t in linear.packed.packed_tensors().values()]
        for parameter in adapter_parameters(policy).values():
            parameter.data *= 1.5
        for version in (1, 2, 3):
            engine.load_weights(Weights(policy), version=version)
        assert before == [(t.data_ptr()) for linear in linears for t in (linear.a, linear.b)]
        for ours, then in zip((t for x in linears for t in x.packed.packed_tensors().values()), packed, strict=True):
            assert_bit_equal(ours, then)
        fresh = engine_of(policy, recipe).generate(PROMPTS, sampling())
        again = engine.generate(PROMPTS, sampling())
        assert [c.token_ids for c in again.completions] == [c.token_ids for c in fresh.completions]
        assert again.completions[0].policy_version == 3

    @pytest.mark.parametrize("decoder", ["fused", "hf"])
    def test_a_base_that_has_moved_is_found_again(self, decoder: str) -> None:
        """Lightning moves a policy to the host after each fit: the engine must not hold on to where it was."""
        recipe = GUIDED["W4A16KV4"]
        policy = make_adapted(recipe)
        engine = engine_of(policy, recipe, decoder=decoder)
        first, drawn = engine.decoder, engine.generate(PROMPTS, sampling())
        engine.load_weights(Weights(policy), version=1)
        assert engine.decoder is first, "made anew without need"
        for layer in policy.model.layers:  # as `.to` another device does
            for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj):
                linear._apply(lambda tensor: tensor.clone())
        engine.load_weights(Weights(policy), version=2)
        assert engine.decoder is not first
        again = engine.generate(PROMPTS, sampling())
        assert [c.token_ids for c in again.completions] == [c.token_ids for c in drawn.completions]

    def test_merged_weights_are_rounded_once(self) -> None:
        """Never Q(Q(W) + BA), and 20 syncs without an update move nothing."""
        policy = make_adapted(W4, "merged")
        engine = engine_of(policy, W4)
        master = {name: p.clone() for name, p in policy.named_parameters()}
        held = engine.decoder.layers[0].o.packed  # type: ignore[attr-defined]
        once = held.qdata.clone()
        for version in range(20):
            engine.load_weights(Weights(policy), version=version)
        assert_bit_equal(held.qdata, once)
        for name, parameter in policy.named_parameters():
            assert_bit_equal(parameter.data, master[name])
        name = "model.layers.0.self_attn.o_proj"
        exact = master[f"{name}.weight"] + 2 * master[f"{name}.lora_B"] @ master[f"{name}.lora_A"]
        assert_bit_equal(held.dequantize(), type(held).from_hp(exact).dequantize())

    def test_unmerged_weights_are_refused_by_name(self) -> None:
        policy = make_adapted(W4, "merged")
        engine = engine_of(policy, W4)
        with pytest.raises(ValueError, match=r"does not know.*lora_A"):
            engine.load_weights(policy.named_parameters(), version=1)
        assert engine.policy_version == 0


class TestPeft:
    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft of transformers
    def test_round_trip(self, tmp_path: Path) -> None:
        """Plain peft over the dequantised base gives the engine's log-probs."""
        import peft

        policy = make_adapted(W4)
        generation = engine_of(policy, W4).generate(PROMPTS, sampling())
        plain = make_model("qwen3")
        with policy.trace_lora.off():
            base = merged_state(policy)
        assert base.keys() == dict(plain.named_parameters()).keys()
        plain.load_state_dict(base, strict=False)
        plain.save_pretrained(tmp_path / "base")
        load_tokenizer("builtin:tiny-qwen3").save_pretrained(tmp_path / "base")
        adapters = adapters_in(policy, str(tmp_path / "base"))
        assert adapters is not None
        source = adapter_source(adapters, None, ExportRecord(recipe=W4), None, "the policy")
        export_source(source, tmp_path / "policy", ExportFormat(format="adapter"))
        config = peft.PeftConfig.from_pretrained(tmp_path / "policy")
        assert (config.base_model_name_or_path, config.r, config.lora_alpha) == (str(tmp_path / "base"), 4, 8)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(loaded, tmp_path / "policy").eval()
        theirs = Scorer(PROMPTS, generation, 1).logprobs(adapted.get_base_model(), 0.8)
        assert (rollout_logprobs(generation) - theirs).abs().max() <= 1e-5
        with adapted.disable_adapter():
            without = Scorer(PROMPTS, generation, 1).logprobs(adapted.get_base_model(), 0.8)
        assert (theirs - without).abs().mean() > 0.02

    def test_merged_state_is_what_the_engine_holds(self) -> None:
        policy = make_adapted(W4)
        generation = engine_of(policy, W4).generate(PROMPTS, sampling())
        plain = make_model("qwen3")
        plain.load_state_dict(merged_state(policy), strict=False)
        theirs = Scorer(PROMPTS, generation, 1).logprobs(plain, 0.8)
        assert (rollout_logprobs(generation) - theirs).abs().max() <= 1e-5

    def test_a_missing_package_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(ImportError, match=r"trace-lightning\[peft\]"):
            make_adapted(W4)


class TestReference:
    @pytest.mark.parametrize("rollout", ["adapter", "merged"])
    def test_it_is_the_base_without_a_second_copy(self, rollout: str) -> None:
        """Nothing is rounded but the base; with B = 0 and nothing else rounded the KL begins at 0."""
        policy = make_adapted(W4, rollout)
        reference = ReferencePolicy(ReferenceConfig(), "nowhere", "sdpa")
        reference.load(policy, CPU)
        assert reference.model is None
        micro = take(make_batch(), [0, 1, 2, 3], CPU)
        got = reference.score(micro, temperature=0.7)
        plain = make_model("qwen3")
        with policy.trace_lora.off():
            plain.load_state_dict(merged_state(policy), strict=False)
        install_qat(plain, QuantRecipe())
        assert (got - score(plain, micro, temperature=0.7)[0]).abs().max() <= 1e-5
        ours = score(policy, micro, temperature=0.7)[0]
        assert (got - ours).abs().max() > 0.02
        for name, parameter in adapter_parameters(policy).items():
            parameter.data *= not name.endswith("lora_B")
        if rollout == "adapter":
            assert_bit_equal(reference.score(micro, temperature=0.7), score(policy, micro, temperature=0.7)[0].detach())


class TestBadInput:
    @pytest.mark.parametrize(
        ("targets", "message"),
        [
            (["q_prj"], r"'q_prj' matches no module of Qwen3ForCausalLM; did you mean q_proj"),
            (["q_proj", "experts"], r"'experts' matches no module"),
            (["lm_head"], r"matches lm_head, which is no linear of a known site"),
            (["embed_tokens"], r"matches model.embed_tokens, which is no linear"),
        ],
    )
    def test_targets(self, targets: list[str], message: str) -> None:
        model = make_model("qwen3")
        install_qat(model, W4)
        with pytest.raises(ValueError, match=message):
            install_lora(model, LoraConfig(target_modules=targets), W4)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"rank": 0}, "model.lora.rank=0 must be above 0"),
            ({"dropout": 0.1}, "noise in the trainer"),
            ({"target_modules": []}, "target_modules is empty"),
            ({"rollout": "bf16"}, "expected adapter or merged"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LoraConfig(**settings)

    @pytest.mark.parametrize(
        ("recipe", "message"),
        [
            (QuantRecipe(weights="fp8"), "no packed form"),
            (QuantRecipe(weights="nvfp4", trainer="bf16"), "model.lora.rollout=merged"),
        ],
    )
    def test_recipes(self, recipe: QuantRecipe, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_policy("builtin:tiny-qwen3", recipe, dtype=torch.float32, lora=LoraConfig())
        load_policy("builtin:tiny-qwen3", recipe, dtype=torch.float32, lora=LoraConfig(rollout="merged"))

    @pytest.mark.parametrize("rollout", ["adapter", "merged"])
    def test_half_a_fused_group(self, rollout: str) -> None:
        recipe = QuantRecipe(weights="nvfp4", exclude=["k_proj"])
        with pytest.raises(ValueError, match=r"recipe.exclude splits the fused group"):
            engine_of(make_adapted(recipe, rollout), recipe)


class TestRun:
    """What a run keeps, and that another goes on from there."""

    def fit(self, folder: Path, steps: int, checkpoint: Path | None = None, **settings: Any) -> Any:
        pl.seed_everything(0)
        lora = LoraConfig(rank=4, target_modules=["q_proj", "v_proj", "down_proj"])
        module = PolicyModule(
            **({"path": "builtin:tiny-qwen3", "recipe": worker.GUIDED, "learning_rate": 1e-2, "lora": lora} | settings)
        )
        callbacks = [worker.make_rollout(), RunCheckpoint(), HFExport()]
        files = {"enable_checkpointing": True, "default_root_dir": folder}
        trainer = worker.make_trainer("auto", *callbacks, max_steps=steps, **files)
        trainer.fit(module, worker.make_data(), ckpt_path=checkpoint)
        return module

    def test_resume_is_exact_and_checkpoints_hold_adapters_only(self, tmp_path: Path) -> None:
        unbroken = self.fit(tmp_path / "unbroken", 3)
        self.fit(tmp_path / "first", 2)
        (path,) = (tmp_path / "first").rglob("last.ckpt")
        resumed = self.fit(tmp_path / "second", 3, path)
        raw = torch.load(path, weights_only=True)
        names = adapter_parameters(unbroken.policy)
        assert raw["state_dict"].keys() == {f"policy.{name}" for name in names}
        assert raw["lora_base"]["path"] == "builtin:tiny-qwen3"
        (optimizer,) = raw["optimizer_states"]
        assert len(optimizer["state"]) == len(names) == 12
        for name, parameter in adapter_parameters(resumed.policy).items():
            assert_bit_equal(parameter.data, names[name].data)
        (exported,) = (tmp_path / "second").rglob("adapter_model.safetensors")
        stored = load_file(exported)
        assert len(stored) == 12
        for name, parameter in names.items():
            assert_bit_equal(stored[f"base_model.model.{name}.weight"], parameter.data)
        (last,) = (tmp_path / "second").rglob("last.ckpt")
        loaded = adapter_parameters(PolicyModule.load_from_checkpoint(last, weights_only=True).policy)
        assert all(torch.equal(loaded[name], parameter) for name, parameter in names.items())
        other = {"recipe": QuantRecipe(weights="mxfp4")}
        with pytest.raises(ValueError, match=r"trained over builtin:tiny-qwen3"):
            self.fit(tmp_path / "third", 3, path, **other)
        with pytest.raises(ValueError, match=r"model.path and model.lora"):
            self.fit(tmp_path / "fourth", 3, path, lora=None)

    def test_an_export_has_the_codes_of_a_rollout_over_an_fp32_checkpoint(self, tmp_path: Path) -> None:
        tiny_model().save_pretrained(tmp_path / "base")
        tiny_tokenizer().save_pretrained(tmp_path / "base")
        lora = LoraConfig(rank=4, rollout="merged")
        module = PolicyModule(str(tmp_path / "base"), recipe=worker.GUIDED, learning_rate=1e-2, lora=lora)
        rollout = worker.make_rollout()
        files = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = worker.make_trainer("auto", rollout, RunCheckpoint(), max_steps=1, precision="bf16-mixed", **files)
        trainer.fit(module, worker.make_data())
        rollout.engine.load_weights(Weights(module.policy), version=1)
        (path,) = tmp_path.rglob("last.ckpt")
        how = ExportFormat(format="nvfp4", activations="none")
        assert export_source(open_source(str(path)), tmp_path / "out", how).quantized_as_trained
        codes = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.self_attn.o_proj.weight_packed"]
        assert_bit_equal(codes, rollout.engine.decoder.layers[1].o.packed.qdata)

    def test_adapters_are_exported_over_their_own_base_alone(self, tmp_path: Path) -> None:
        """The path of the base is not enough: other weights may lie there, and the same ones elsewhere."""
        torch.manual_seed(0)
        model, other = tiny_model(), tiny_model()
        for name, each in {"base": model, "fp32": model, "other": other}.items():
            (each.bfloat16() if name == "base" else each.float()).save_pretrained(tmp_path / name)
            tiny_tokenizer().save_pretrained(tmp_path / name)
        self.fit(tmp_path / "run", 1, path=str(tmp_path / "base"))
        (checkpoint,), (policy,) = ((tmp_path / "run").rglob(name) for name in ("last.ckpt", "policy"))
        for path in (str(checkpoint), str(policy)):
            open_source(path)
            open_source(path, str(tmp_path / "fp32"))
            with pytest.raises(
                ValueError, match=r"trained over .*base, and .*other holds other weights.*--model\.path"
            ):
                open_source(path, str(tmp_path / "other"))
        shutil.rmtree(tmp_path / "base")
        (tmp_path / "other").rename(tmp_path / "base")
        with pytest.raises(ValueError, match=r"base holds other weights"):
            open_source(str(policy))

    def test_the_base_is_packed_group_by_group_wherever_tensors_are_made(self) -> None:
        with torch.device("meta"):  # in Lightning's place, whose context is the GPU
            policy = load_policy("builtin:tiny-qwen3", W4, dtype=torch.bfloat16, lora=LoraConfig())
        assert {tensor.device for tensor in (*policy.parameters(), *frozen_tensors(policy))} == {CPU}

    def test_sharding_is_refused_at_the_start(self) -> None:
        trainer = pl.Trainer(accelerator="cpu", strategy=FSDP2Strategy(), logger=False, enable_checkpointing=False)
        with pytest.raises(ValueError, match=r"use trainer.strategy=ddp"):
            PolicyModule(path="builtin:tiny-qwen3", recipe=W4, lora=LoraConfig()).trainer = trainer


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_bf16_true_narrows_the_weights_alone(lora: LoraConfig | None) -> None:
    """Rewards and log-probs stay FP32, so that the two sides' agreement is measured and not rounded away."""
    module = PolicyModule(path="builtin:tiny-qwen3", recipe=worker.GUIDED, num_minibatches=2, lora=lora)
    trainer = worker.make_trainer("auto", worker.make_rollout(), max_steps=2, precision="bf16-true")
    seen: set[torch.dtype] = set()
    compare = module.measured.compare
    module.measured.compare = lambda old, new, mask: (seen.update((old.dtype, new.dtype)), compare(old, new, mask))
    trainer.fit(module, worker.make_data())
    assert seen == {torch.float32}
    assert {parameter.dtype for parameter in module.policy.parameters()} == {torch.bfloat16}


def test_the_checksum_tells_bases_apart() -> None:
    first, second = (make_adapted(W4, seed=seed) for seed in (0, 1))
    assert base_checksum(first) == base_checksum(make_adapted(W4))
    narrow = make_model("qwen3").bfloat16()
    sums = set()
    for dtype in (torch.bfloat16, torch.float32):
        install_qat(model := copy.deepcopy(narrow).to(dtype), W4)
        install_lora(model, LoraConfig(), W4)
        sums.add(base_checksum(model))
    assert len(sums) == 1, "a BF16 checkpoint, held in BF16 or FP32"
    assert base_checksum(first) != base_checksum(second)
    second = make_adapted(W4)
    second.trace_lora.scaling *= 2  # the same base, and adapters that mean something else
    assert base_checksum(first) != base_checksum(second)
    assert isinstance(engine_of(first, W4).decoder, FusedDecoder)
