"""The parity chain: where rollout and trainer part, one of these says at which link.

    HF policy = engine, unquantised     engine prefill = engine decode     packer = fake quantiser     QAT = engine

FP32 sums differ in their last bits between batch shapes, and one such bit can move an FP4 code. Links that no guidance
protects are therefore compared in FP64, where no code flips and the allowed gap is that of the arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal, assert_no_worse_than_torch
from tiny import Scorer, make_engine, make_model, make_policy, make_prompts, rollout_logprobs, sampling
from trace_kernels.hadamard import rotate
from trace_lightning.quantization.qat import QATLinear, install_qat
from trace_lightning.quantization.rounding import NEAREST, NearestRounding
from trace_lightning.recipe import FP4, SITES, GuidanceConfig, QuantRecipe
from trace_lightning.rollout.batch import DecodeBatch, PrefillBatch, Segment
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.fused_decoder import FusedDecoder
from trace_lightning.rollout.kv_pool import PagedKV

PROMPTS = make_prompts(1, 5, 16, 17, 31)
NUM_SAMPLES = 2


def recipe_of(weights: str, activations: str, kv_cache: str, **settings: Any) -> QuantRecipe:
    """Formats, and guidance at every FP4 site if `mode` is among the settings."""
    guidance = GuidanceConfig()
    if "mode" in settings:
        sites = [s for s in SITES if (kv_cache if s in ("k", "v") else activations) in FP4]
        fields = {name: settings.pop(name) for name in ("mode", "scales", "store", "layers") if name in settings}
        guidance = GuidanceConfig(sites=sites, **fields)
    return QuantRecipe(weights=weights, activations=activations, kv_cache=kv_cache, guidance=guidance, **settings)  # type: ignore[arg-type]


def both_sides(
    policy: Any, engine: LocalEngine, temperature: float = 0.8, *, guided: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens by the engine and by the trainer."""
    generation = engine.generate(
        PROMPTS, sampling(temperature=temperature), num_samples=NUM_SAMPLES, record_guidance=guided
    )
    scorer = Scorer(PROMPTS, generation, NUM_SAMPLES)
    score = scorer.guided_logprobs if guided else scorer.logprobs
    return rollout_logprobs(generation), score(policy, temperature)


class TestUnquantised:
    """Both sides divide the logits by the temperature."""

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
    def test_engine_equals_hf_policy(self, family: str, temperature: float) -> None:
        policy = make_model(family)
        engine = make_engine(policy, QuantRecipe())
        assert isinstance(engine.decoder, FusedDecoder) == (family != "gpt2")
        ours, theirs = both_sides(policy, engine, temperature)
        assert (ours - theirs).abs().max() <= 1e-5
        assert (theirs - ours).exp().mean() == pytest.approx(1, abs=1e-2)

    def test_without_the_temperature_it_would_not(self) -> None:
        policy = make_model("qwen3")
        generation = make_engine(policy, QuantRecipe()).generate(PROMPTS, sampling(temperature=0.6))
        raw = Scorer(PROMPTS, generation, 1).logprobs(policy, 1.0)
        assert (rollout_logprobs(generation) - raw).abs().max() > 0.1

    @pytest.mark.parametrize("family", ["gemma", "phi", "qwen3_moe", "mixtral", "olmoe"])
    def test_hf_decoder_serves_other_families(self, family: str) -> None:
        policy = make_model(family)
        ours, theirs = both_sides(policy, make_engine(policy, QuantRecipe()))
        assert (ours - theirs).abs().max() <= 1e-5

    def test_bf16_engine_is_no_further_from_fp32_than_autocast(self) -> None:
        """Cast for cast the same but in attention, which the engine computes more exactly than a CPU's BF16 does."""
        policy = make_model("qwen3")
        generation = make_engine(policy, QuantRecipe(), dtype=torch.bfloat16).generate(PROMPTS, sampling())
        scorer = Scorer(PROMPTS, generation, 1)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = scorer.logprobs(policy, 0.8)
        full = scorer.logprobs(policy, 0.8)
        assert_no_worse_than_torch(rollout_logprobs(generation), autocast, full)
        assert (autocast - full).abs().median() > 1e-3, "BF16 would not have been told from FP32"


def last_hidden_by_prefill(engine: LocalEngine, ids: list[int], page_size: int) -> Tensor:
    """Final hidden states after each prefix of `ids`, all prefixes in one prefill: [len(ids), hidden]."""
    prefixes = [ids[: n + 1] for n in range(len(ids))]
    per_sequence = -(-len(ids) // page_size)
    kv = new_kv(engine, per_sequence * len(ids), page_size)
    pages = [list(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(len(ids))]
    segments = [Segment(prefix, 0, own) for prefix, own in zip(prefixes, pages, strict=True)]
    return engine.decoder.forward(PrefillBatch.of(segments, page_size, engine.device), kv)


def last_hidden_by_chunks(engine: LocalEngine, ids: list[int], page_size: int, chunk: int) -> Tensor:
    """Final hidden states at the end of each chunk of one prompt, prefilled chunk by chunk."""
    num_pages = -(-len(ids) // page_size)
    kv, pages = new_kv(engine, num_pages, page_size), list(range(num_pages))
    segments = (Segment(ids[start : start + chunk], start, pages) for start in range(0, len(ids), chunk))
    batches = (PrefillBatch.of([segment], page_size, engine.device) for segment in segments)
    return torch.cat([engine.decoder.forward(batch, kv) for batch in batches])


def last_hidden_by_decode(engine: LocalEngine, ids: list[int], page_size: int) -> Tensor:
    """The same, one token at a time, with pages in reverse order."""
    num_pages = -(-len(ids) // page_size)
    kv, pages = new_kv(engine, num_pages, page_size), torch.arange(num_pages - 1, -1, -1)

    def feed(token: int, position: int) -> Tensor:
        batch = DecodeBatch(
            token_ids_N=torch.tensor([token]),
            positions_N=torch.tensor([position]),
            slots_N=pages[position // page_size].reshape(1) * page_size + position % page_size,
            page_table_BW=pages.unsqueeze(0).int(),
            seq_lens_B=torch.tensor([position + 1], dtype=torch.int32),
            max_len=position + 1,
        )
        return engine.decoder.forward(batch, kv)

    return torch.cat([feed(token, position) for position, token in enumerate(ids)])


def new_kv(engine: LocalEngine, num_pages: int, page_size: int) -> PagedKV:
    decoder = engine.decoder
    kv = PagedKV(
        decoder.kv_formats,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        dtype=engine.dtype,
        device=engine.device,
    )
    for layer in range(len(kv.layers)):
        kv.set_outer(layer, *decoder.kv_outer(layer))
    return kv


class TestDecodeEqualsPrefill:
    """Lengths cross page edges; the gap must not grow with position."""

    @pytest.mark.parametrize("page_size", [4, 16])
    @pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
    @pytest.mark.parametrize("fmt", ["none", "fp8", "nvfp4", "mxfp4"])
    @torch.no_grad()
    def test_same_hidden_states(self, fmt: str, family: str, page_size: int) -> None:
        recipe = recipe_of(fmt, fmt, fmt)
        policy = make_policy(family, recipe, dtype=torch.float64)
        engine = make_engine(policy, recipe, dtype=torch.float64)
        ids = make_prompts(40)[0].token_ids
        prefill, decode = (run(engine, ids, page_size) for run in (last_hidden_by_prefill, last_hidden_by_decode))
        gap = (prefill - decode).norm(dim=-1) / prefill.norm(dim=-1)
        assert gap.max() <= 1e-6
        assert gap[20:].max() <= 10 * gap[:20].max() + 1e-9, "the gap grows with position"

    @torch.no_grad()
    def test_fp32_gap_is_flat_without_a_quantised_cache(self) -> None:
        policy = make_model("llama")
        engine = make_engine(policy, QuantRecipe())
        ids = make_prompts(160)[0].token_ids
        prefill, decode = (run(engine, ids, 16) for run in (last_hidden_by_prefill, last_hidden_by_decode))
        gap = (prefill - decode).abs().amax(-1)
        assert gap.max() <= 1e-5
        assert gap[80:].mean() <= 2 * gap[:80].mean()

    @torch.no_grad()
    def test_quantised_cache_changes_the_numbers(self) -> None:
        """Otherwise the tests above would compare a cache that nobody reads."""
        policy = make_model("qwen3")
        ids = make_prompts(40)[0].token_ids
        engines = [make_engine(policy, recipe_of("none", "none", fmt)) for fmt in ("none", "fp8", "nvfp4", "mxfp4")]
        plain, *others = (last_hidden_by_decode(engine, ids, 4) for engine in engines)
        errors = [((other - plain).norm() / plain.norm()).item() for other in others]
        assert 1e-3 < errors[0] < errors[1] < errors[2] < 0.5


GUIDED = [
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity"), id="nvfp4"),
    pytest.param(recipe_of("mxfp4", "mxfp4", "mxfp4", mode="parity"), id="mxfp4"),
    pytest.param(recipe_of("nvfp4", "none", "nvfp4", mode="parity"), id="W4A16KV4"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="full"), id="full"),
    pytest.param(recipe_of("mxfp4", "mxfp4", "nvfp4", mode="full", store="host"), id="mxfp4-full-host"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity", scales="parity"), id="scale-parity"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="syndrome", scales="parity"), id="syndrome"),
    pytest.param(recipe_of("mxfp4", "none", "mxfp4", mode="syndrome", store="host"), id="mxfp4-syndrome-host"),
    pytest.param(recipe_of("mxfp4", "mxfp4", "mxfp4", mode="full", scales="parity"), id="mxfp4-full-scale-parity"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity", kv_rotation="hadamard"), id="hadamard"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="full", four_over_six=True), id="four-over-six"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity", bf16_layers=["first:1"]), id="bf16-layers"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity", exclude=["down_proj"]), id="exclude-down"),
    pytest.param(recipe_of("nvfp4", "nvfp4", "nvfp4", mode="parity", exclude=[r"0\.self_attn"]), id="exclude-attn"),
]

CROSSED = ("W4A16KV4", "nvfp4", "mxfp4", "hadamard", "exclude-down", "bf16-layers")


class TestQuantised:
    """The trainer in QAT mode assigns the rollout's probabilities to the rollout's tokens."""

    @pytest.mark.parametrize("recipe", GUIDED)
    def test_guided_trainer_equals_engine(self, recipe: QuantRecipe) -> None:
        policy = make_policy("qwen3", recipe)
        ours, theirs = both_sides(policy, make_engine(policy, recipe), guided=True)
        assert (ours - theirs).abs().max() <= 1e-4

    @pytest.mark.parametrize("recipe", [*GUIDED, pytest.param(recipe_of("fp8", "fp8", "fp8"), id="fp8")])
    def test_nearest_trainer_equals_engine(self, recipe: QuantRecipe) -> None:
        policy = make_policy("qwen3", recipe, dtype=torch.float64)
        ours, theirs = both_sides(policy, make_engine(policy, recipe, dtype=torch.float64))
        assert (ours - theirs).abs().max() <= 1e-5

    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    @pytest.mark.parametrize("head_dim", [40, 80, 96, 128])
    def test_sizes_that_are_no_whole_blocks(self, head_dim: int, fmt: str) -> None:
        """Widths and head dims that are no multiple of a block."""
        recipe = recipe_of(fmt, fmt, fmt, mode="parity", scales="parity")
        policy = make_policy("qwen3", recipe, head_dim=head_dim, hidden_size=60, intermediate_size=33)
        ours, theirs = both_sides(policy, make_engine(policy, recipe), guided=True)
        assert (ours - theirs).abs().max() <= 1e-4

    @pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt2", "gemma", "qwen3_moe"])
    def test_every_family(self, family: str) -> None:
        activations = "none" if family == "gpt2" else "nvfp4"  # its Conv1D layers stay in high precision
        recipe = recipe_of("nvfp4", activations, "nvfp4", mode="parity")
        policy = make_policy(family, recipe)
        ours, theirs = both_sides(policy, make_engine(policy, recipe), guided=True)
        assert (ours - theirs).abs().max() <= 1e-4

    @pytest.mark.parametrize("recipe", [case for case in GUIDED if case.id in CROSSED])
    def test_both_decoders_draw_the_same(self, recipe: QuantRecipe) -> None:
        policy = make_policy("qwen3", recipe, dtype=torch.float64)
        fused, hf = (
            make_engine(policy, recipe, decoder=kind, dtype=torch.float64).generate(PROMPTS, sampling())
            for kind in ("fused", "hf")
        )
        assert [c.token_ids for c in fused.completions] == [c.token_ids for c in hf.completions]
        assert (rollout_logprobs(fused) - rollout_logprobs(hf)).abs().max() <= 1e-5

    def test_an_unquantised_trainer_would_differ(self) -> None:
        recipe = recipe_of("nvfp4", "nvfp4", "nvfp4")
        policy = make_model("qwen3")
        ours, theirs = both_sides(policy, make_engine(policy, recipe))
        assert (ours - theirs).abs().mean() > 0.02


class TestPackerEqualsFakeQuantiser:
    """One quantiser on both sides, bit for bit."""

    @staticmethod
    def uneven_policy(recipe: QuantRecipe) -> Any:
        """Q, k, v (and gate, up) with ranges far apart must still share one outer scale."""
        policy = make_model("qwen3")
        for layer in policy.model.layers:
            layer.self_attn.k_proj.weight.data *= 4
            layer.self_attn.v_proj.weight.data *= 0.5
            layer.mlp.up_proj.weight.data *= 3
        install_qat(policy, recipe)
        return policy

    @pytest.mark.parametrize("decoder", ["fused", "hf"])
    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8"])
    def test_weights(self, fmt: str, decoder: str) -> None:
        recipe = recipe_of(fmt, "none", "none")
        policy = self.uneven_policy(recipe)
        engine = make_engine(policy, recipe, decoder=decoder)
        held = held_weights(engine)
        linears = {name: module for name, module in policy.named_modules() if isinstance(module, QATLinear)}
        assert len(linears) == 14
        for name, linear in linears.items():
            rounded = linear.group.round_weight(linear).detach()
            assert_bit_equal(held[name], rounded)
            assert not torch.equal(rounded, linear.weight)

    def test_packed_bytes_hold_the_same_values_under_one_outer_scale(self) -> None:
        recipe = recipe_of("nvfp4", "none", "none")
        policy = self.uneven_policy(recipe)
        decoder = make_engine(policy, recipe).decoder
        assert isinstance(decoder, FusedDecoder)
        for layer, hf_layer in zip(decoder.layers, policy.model.layers, strict=True):
            assert_bit_equal(layer.qkv.packed.dequantize(), layer.qkv.weight)  # type: ignore[union-attr]
            assert layer.qkv.packed.outer_scale.numel() == 1  # type: ignore[union-attr]
            largest = hf_layer.self_attn.k_proj.weight.abs().max()
            expected = (largest / (448.0 * 6.0)).detach().log2().ceil().exp2()
            assert_bit_equal(layer.qkv.packed.outer_scale.view(()), expected)  # type: ignore[union-attr]
            for name, part in layer.qkv.parts.items():
                master = policy.get_submodule(name).weight
                half_the_widest_gap = master.abs().max() / 6
                assert (part - master).abs().max() <= 1.07 * half_the_widest_gap  # and the rounding of the scale

    @pytest.mark.parametrize("rotation", ["none", "hadamard"])
    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8"])
    def test_kv_pool(self, fmt: str, rotation: str) -> None:
        recipe = recipe_of("none", "none", fmt, kv_rotation=rotation)
        policy = make_policy("qwen3", recipe)
        engine = make_engine(policy, recipe)
        query, key, value = torch.randn(2, 4, 9, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32)
        for layer, kv_site in enumerate(policy.trace_qat.kvs):
            _, k_trainer, v_trainer = kv_site(query, key, value, NEAREST)
            kv, slots = new_kv(engine, 5, 4), torch.randperm(20)[:18]
            tokens = [x.transpose(1, 2).flatten(0, 1) for x in (rotate(key) if rotation == "hadamard" else key, value)]
            kv.write(layer, slots, *tokens, NearestRounding())
            for read, expected in zip(kv.read(layer, slots.view(2, 9)), (k_trainer, v_trainer), strict=True):
                assert_bit_equal(read.transpose(1, 2).contiguous(), expected.contiguous())


def held_weights(engine: LocalEngine) -> dict[str, Tensor]:
    """Dequantised weights of the snapshot by the name of the linear."""
    decoder = engine.decoder
    if isinstance(decoder, FusedDecoder):
        return {
            name: part for layer in decoder.layers for linear in layer.linears for name, part in linear.parts.items()
        }
    return {name: module.weight for name, module in decoder.model.named_modules() if isinstance(module, QATLinear)}  # type: ignore[attr-defined]
