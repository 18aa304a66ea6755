"""The trainer's quantised forward: the same parameters, rounded like the rollout's, with straight-through gradients."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from numerics import assert_bit_equal
from tiny import VOCAB, make_engine, make_model, make_policy, make_prompts, rollout_logprobs, sampling
from tiny import Scorer as Scored
from trace_kernels import get_format
from trace_lightning.models.layout import read_layout
from trace_lightning.models.policy import final_hidden, set_gradient_checkpointing
from trace_lightning.quantization import rounding as rounding_file
from trace_lightning.quantization.qat import QATLinear, install_qat
from trace_lightning.quantization.rounding import GuidedRounding, NearestRounding
from trace_lightning.recipe import GuidanceConfig, QuantRecipe

W4A4KV4 = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gpt2", "qwen3_moe"]


def quantized_names(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QATLinear)]


def token_ids(rows: int = 3, columns: int = 12) -> Tensor:
    return torch.randint(6, VOCAB, (rows, columns))


class TestInstall:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_parameters_stay_what_they_were(self, family: str) -> None:
        model = make_model(family)
        keys, parameters = list(model.state_dict()), dict(model.named_parameters())
        install_qat(model, W4A4KV4)
        assert list(model.state_dict()) == keys
        after = dict(model.named_parameters())
        assert after.keys() == parameters.keys()
        assert all(after[name] is parameter for name, parameter in parameters.items())

    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8"])
    def test_changes_the_forward_and_can_be_switched_off(self, fmt: Any) -> None:
        model = make_model("qwen3")
        ids = token_ids()
        plain = model(ids).logits
        state = install_qat(model, QuantRecipe(weights=fmt, activations=fmt, kv_cache=fmt))
        rounded = model(ids).logits
        assert (rounded - plain).norm() / plain.norm() > 0.01
        with state.unquantized():
            assert_bit_equal(model(ids).logits, plain)
        assert_bit_equal(model(ids).logits, rounded)

    @pytest.mark.parametrize("family", ["qwen2", "phi"])
    def test_biases_are_kept_in_full_precision(self, family: str) -> None:
        model = make_model(family)
        biased = {name: m.bias for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}
        install_qat(model, W4A4KV4)
        assert len(set(biased) & set(quantized_names(model))) >= 6
        assert all(model.get_submodule(name).bias is bias for name, bias in biased.items())
        x, linear = torch.zeros(2, 64), model.model.layers[0].self_attn.q_proj
        assert_bit_equal(linear(x), linear.bias.expand(2, -1).contiguous())

    def test_tied_embeddings_are_not_touched(self) -> None:
        """A tied head is the embedding: neither is rounded."""
        model = make_model("qwen3")
        embedding = model.get_input_embeddings()
        install_qat(model, W4A4KV4)
        assert type(model.lm_head) is nn.Linear
        assert model.get_input_embeddings() is embedding
        assert model.lm_head.weight is embedding.weight
        hidden = torch.randn(3, 64)
        assert_bit_equal(model.lm_head(hidden), hidden @ embedding.weight.T)

    def test_fused_groups(self) -> None:
        layout = read_layout(make_model("llama"), W4A4KV4)
        leaves = [
            (group.layer, group.site, [name.rpartition(".")[2] for name in group.names]) for group in layout.groups
        ]
        assert leaves == [
            (layer, site, names)
            for layer in (0, 1)
            for site, names in (
                ("attn_in", ["q_proj", "k_proj", "v_proj"]),
                ("o_in", ["o_proj"]),
                ("mlp_in", ["gate_proj", "up_proj"]),
                ("down_in", ["down_proj"]),
            )
        ]

    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8"])
    def test_odd_sizes(self, fmt: Any) -> None:
        """No width is a multiple of a block."""
        recipe = QuantRecipe(weights=fmt, activations=fmt, kv_cache=fmt)
        policy = make_policy("llama", recipe, hidden_size=36, intermediate_size=17, head_dim=10)
        loss = policy(token_ids(), labels=token_ids()).loss
        loss.backward()
        assert len(quantized_names(policy)) == 14
        assert all(p.grad.isfinite().all() and p.grad.any() for p in policy.parameters())

    @pytest.mark.parametrize(
        ("settings", "kept"),
        [
            ({"bf16_layers": ["first:1"]}, ("layers.0.",)),
            ({"bf16_layers": ["last:1"]}, ("layers.1.",)),
            ({"exclude": ["down_proj", r"0\.self_attn"]}, ("down_proj", "layers.0.self_attn")),
            ({"exclude": ["lm_head"]}, ()),
        ],
    )
    def test_what_the_recipe_keeps(self, settings: Any, kept: tuple[str, ...]) -> None:
        policy = make_policy("llama", QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", **settings))
        everything = [name for name, m in policy.model.named_modules(prefix="model") if isinstance(m, nn.Linear)]
        assert quantized_names(policy) == [name for name in everything if not any(part in name for part in kept)]
        formats = [kv.fmt is not None for kv in policy.trace_qat.kvs]
        assert formats == [not any(f"layers.{i}." == part for part in kept) for i in (0, 1)]

    def test_mistyped_exclude_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"donw_proj.*model\.layers\.0\.self_attn\.q_proj"):
            install_qat(make_model("llama"), QuantRecipe(weights="nvfp4", exclude=["down_proj", "donw_proj"]))

    def test_unknown_attention_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'sdqa' is unknown"):
            install_qat(make_model("llama"), W4A4KV4, attention="sdqa")

    def test_eager_attention_gives_the_same(self) -> None:
        ids, models = token_ids(), [make_model("qwen3") for _ in range(2)]
        for model, attention in zip(models, ("sdpa", "eager"), strict=True):
            install_qat(model, QuantRecipe(kv_cache="nvfp4"), attention=attention)
        assert (models[0](ids).logits - models[1](ids).logits).abs().max() <= 1e-4


class TestAsymmetric:
    """QUADS: the trainer rounds weights alone; the rollout rounds activations too and may return their residual."""

    QUADS = QuantRecipe(weights="nvfp4", activations="nvfp4", trainer="qat_weights", residual_share=0.5)

    def test_the_trainer_rounds_weights_and_not_activations(self) -> None:
        ids = token_ids()
        asymmetric, weights_only = (
            make_policy("qwen3", recipe) for recipe in (self.QUADS.trained, QuantRecipe(weights="nvfp4"))
        )
        assert_bit_equal(asymmetric(ids).logits, weights_only(ids).logits)
        assert QuantRecipe(trainer="bf16", weights="nvfp4", activations="nvfp4").trained == QuantRecipe()
        assert W4A4KV4.trained is W4A4KV4
        assert self.QUADS.label == "W4A4KV16/nvfp4+residual0.5"

    def test_k_and_v_are_rounded_as_the_recipe_says(self) -> None:
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", trainer="qat_weights")
        ids = token_ids()
        with_kv, same, without = (
            make_policy("qwen3", r)(ids).logits
            for r in (recipe.trained, QuantRecipe(weights="nvfp4", kv_cache="nvfp4"), QuantRecipe(weights="nvfp4"))
        )
        assert_bit_equal(with_kv, same)
        assert not torch.equal(with_kv, without)

    def test_a_residual_brings_the_rollout_nearer_to_the_trainer(self) -> None:
        ids = token_ids()
        target = make_policy("qwen3", self.QUADS.trained)(ids).logits
        gaps = []
        for share in (0.0, 0.25, 0.5, 1.0):
            rollout = make_policy("qwen3", dataclasses.replace(self.QUADS, residual_share=share))
            gaps.append((rollout(ids).logits - target).norm().item())
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[-1] < 0.2 * gaps[0]

    def test_gradients_pass_straight_through_the_residual(self) -> None:
        policy, ids = make_policy("qwen3", self.QUADS), token_ids()
        policy(ids).logits.square().mean().backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        assert len(gradients) == len(list(policy.parameters()))
        assert all(g.isfinite().all() for g in gradients)
        assert all((g != 0).any() for g in gradients if g.ndim > 1)

    def test_the_engine_rounds_activations_that_its_policy_does_not(self) -> None:
        """The compatibility decoder is a copy of the policy, and must not inherit what that leaves out."""
        policy, prompts = make_policy("qwen3", self.QUADS.trained), make_prompts(5, 16)
        engine = make_engine(policy, self.QUADS, decoder="hf")
        generation = engine.generate(prompts, sampling(), num_samples=2)
        scored = Scored(prompts, generation, 2)
        rolled = rollout_logprobs(generation)
        both_sides = scored.logprobs(make_policy("qwen3", self.QUADS), 0.8)
        assert (both_sides - rolled).abs().max() < 1e-4
        assert (scored.logprobs(policy, 0.8) - rolled).abs().max() > 1e-3


class TestMixtureOfExperts:
    def test_experts_are_reported_as_not_quantised(self) -> None:
        """Transformers keeps experts as 3-D parameters, out of reach of a walk over linears."""
        policy = make_policy("qwen3_moe", W4A4KV4)
        attention = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)  # q, k, v, o in two layers
        experts = 2 * 4 * 3 * 32 * 64
        router = 2 * 4 * 64
        layout = policy.trace_qat.layout
        assert (layout.quantized_parameters, layout.layer_parameters) == (attention, attention + experts + router)
        assert f"{attention:,} of {attention + experts + router:,} decoder-layer parameters (33.1%)" in layout.report()

    @pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "llama", "gpt2"])
    def test_routers_heads_and_embeddings_never_are(self, family: str) -> None:
        """A router decides, it is not multiplied with: it stays in high precision."""
        policy = make_policy(family, W4A4KV4)
        for name in quantized_names(policy):
            assert not any(part in name.split(".") for part in ("gate", "router", "lm_head", "embed_tokens", "wte"))

    def test_router_that_is_a_linear(self) -> None:
        model = make_model("llama")
        model.model.layers[0].mlp.gate = nn.Linear(64, 4)
        model.model.layers[1].mlp.shared_expert_gate = nn.Linear(64, 1)
        layout = read_layout(model, W4A4KV4)
        assert layout.kept == {
            "model.layers.0.mlp.gate": "router",
            "model.layers.1.mlp.shared_expert_gate": "unknown role",
        }
        assert "model.layers.0.mlp.gate (router)" in layout.report()


class TestForward:
    def test_each_site_is_rounded_once(self) -> None:
        """q, k and v share one rounding of their input, gate and up another."""
        calls: list[tuple[int, str]] = []

        class Counting(NearestRounding):
            def values(self, layer: int, site: str, *args: Any, **kwargs: Any) -> Any:
                calls.append((layer, site))
                return super().values(layer, site, *args, **kwargs)

        policy = make_policy("qwen3", W4A4KV4)
        final_hidden(policy, token_ids(), Counting())
        expected = ["attn_in", "k", "v", "o_in", "mlp_in", "down_in"]
        assert calls == [(layer, site) for layer in (0, 1) for site in expected]

    def test_straight_through_gradient(self) -> None:
        policy = make_policy("llama", W4A4KV4)
        linear, x = policy.model.layers[0].self_attn.o_proj, (3 * torch.randn(5, 64)).requires_grad_()
        upstream = torch.randn(5, 64)
        linear(x).backward(upstream)
        fmt = get_format("nvfp4")
        assert fmt is not None
        rounded_x = fmt.dequantize(fmt.quantize(x.detach()))
        rounded_w = linear.group.round_weight(linear).detach()
        assert x.grad is not None
        assert_bit_equal(x.grad, upstream @ rounded_w)
        assert_bit_equal(linear.weight.grad, upstream.T @ rounded_x)

    def test_cached_weights_are_the_same_and_do_not_outlive_the_block(self) -> None:
        policy, ids = make_policy("qwen3", W4A4KV4), token_ids()
        before = policy(ids).logits
        with policy.trace_qat.cache_weights():
            assert_bit_equal(policy(ids).logits, before)
            assert_bit_equal(policy(ids).logits, before)
            policy(ids).logits.sum().backward()
        with policy.trace_qat.cache_weights(keep=False):
            assert_bit_equal(policy(ids).logits, before)
        assert all(parameter.grad is not None for parameter in policy.parameters())
        assert all(group.cached is None for group in policy.trace_qat.groups)
        for parameter in policy.model.layers.parameters():
            parameter.data *= 1.5
        assert not torch.equal(policy(ids).logits, before), "an optimizer step would go unseen"

    @pytest.mark.parametrize("keep", [True, False])
    def test_outer_scales_are_found_once(self, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where weights are rounded in each forward: taken weight by weight they cost a dozen launches each."""
        policy, ids = make_policy("qwen3", W4A4KV4), token_ids()
        before = policy(ids).logits
        monkeypatch.setattr("trace_lightning.quantization.qat.shared_outer", None)
        with policy.trace_qat.cache_weights(keep=keep):
            assert_bit_equal(policy(ids).logits, before)
        with pytest.raises(TypeError):
            policy(ids)

    def test_under_autocast_weights_are_kept_in_its_dtype_and_gradients_stay_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FP32 copies of all weights beside the masters would double the trainer's memory."""

        ids = token_ids()

        def run() -> tuple[set[torch.dtype], Tensor]:
            policy = make_policy("llama", W4A4KV4)
            with torch.autocast("cpu", torch.bfloat16), policy.trace_qat.cache_weights():
                for _ in range(2):
                    policy(ids).logits.float().logsumexp(-1).sum().backward()
                kept = {value.dtype for group in policy.trace_qat.groups for value in group.cached.values()}
            return kept, torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])

        kept, gradients = run()
        assert kept == {torch.bfloat16}
        monkeypatch.setattr("trace_lightning.quantization.qat.matmul_dtype", lambda weight: weight.dtype)
        kept, expected = run()
        assert kept == {torch.float32}
        assert_bit_equal(gradients, expected)

    @pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
    def test_left_padding_equals_none(self, family: str) -> None:
        """In FP64: a different batch shape must not be able to move a code."""
        recipe = QuantRecipe(kv_cache="nvfp4") if family == "gpt2" else W4A4KV4
        policy = make_policy(family, recipe, dtype=torch.float64)
        ids = token_ids(1, 9)
        padded = torch.cat((torch.full((1, 7), 3), ids), 1).repeat(2, 1)
        padded[1] = token_ids(1, 16)
        mask = torch.ones_like(padded)
        mask[0, :7] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        together = policy(padded, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
        alone = policy(ids).logits.log_softmax(-1)
        assert (together[0, 7:] - alone[0]).abs().max() <= 1e-5
        together.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())

    @pytest.mark.parametrize("family", ["qwen3", "gpt2"])
    def test_right_padding_needs_no_mask(self, family: str) -> None:
        recipe = QuantRecipe(kv_cache="nvfp4") if family == "gpt2" else W4A4KV4
        policy = make_policy(family, recipe, dtype=torch.float64)
        ids = token_ids(1, 9)
        padded = torch.cat((ids, torch.zeros(1, 7, dtype=torch.int64)), 1)
        assert (final_hidden(policy, padded)[:, :9] - final_hidden(policy, ids)).abs().max() <= 1e-5


def test_gradient_checkpointing_recomputes_under_guidance() -> None:
    recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity"))
    policy, prompts = make_policy("qwen3", recipe), make_prompts(5, 9)
    generation = make_engine(policy, recipe).generate(prompts, sampling(), record_guidance=True)
    scored = Scored(prompts, generation, 1)
    for parameter in policy.parameters():  # off the rollout's weights, so that guidance decides some codes
        parameter.data *= 1 + 0.02 * torch.randn_like(parameter)

    def gradients(rounding: Any) -> tuple[Tensor, list[Tensor]]:
        policy.zero_grad()
        hidden = final_hidden(policy, scored.token_ids(), rounding)
        hidden.square().sum().backward()
        return hidden.detach(), [parameter.grad.clone() for parameter in policy.model.layers.parameters()]

    policy.train()
    plain = gradients(GuidedRounding(scored.guidance()))
    nearest = gradients(None)
    set_gradient_checkpointing(policy, True)
    recomputed = gradients(GuidedRounding(scored.guidance()))
    assert_bit_equal(recomputed[0], plain[0])
    for ours, expected in zip(recomputed[1], plain[1], strict=True):
        assert_bit_equal(ours, expected)
    assert any(not torch.equal(a, b) for a, b in zip(nearest[1], plain[1], strict=True)), "guidance decided nothing"


class TestBitsFoundOnce:
    """`guidance.mode: syndrome`: the search for the bits is dear, and recomputation would do it twice."""

    @pytest.fixture
    def scored(self) -> tuple[Any, Scored]:
        guidance = GuidanceConfig(mode="syndrome", audit_sequences=1)
        recipe = dataclasses.replace(W4A4KV4, guidance=guidance)
        policy, prompts = make_policy("qwen3", recipe), make_prompts(5, 9)
        generation = make_engine(policy, recipe).generate(prompts, sampling(), record_guidance=True)
        for parameter in policy.parameters():
            parameter.data *= 1 + 0.002 * torch.randn_like(parameter)
        return policy.train(), Scored(prompts, generation, 1)

    @pytest.fixture
    def found(self, monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
        """Every result of the search."""
        found: list[weakref.ref[Tensor]] = []

        def search(*arguments: Any) -> Tensor:
            bits = searched(*arguments)
            found.append(weakref.ref(bits))
            return bits

        searched = rounding_file.decode_bits
        monkeypatch.setattr(rounding_file, "decode_bits", search)
        return found

    @staticmethod
    def alive(found: list[weakref.ref[Tensor]]) -> int:
        return sum(bits() is not None for bits in found)

    def test_with_recomputation(self, scored, found, monkeypatch) -> None:
        """Kept from the forward to the backward pass alone; what comes out is what comes out of two searches."""
        policy, scorer = scored

        def run() -> tuple[list[Tensor], list[int]]:
            policy.zero_grad()
            found.clear()
            loss = final_hidden(policy, scorer.token_ids(), GuidedRounding(scorer.guidance())).square().sum()
            counts = [len(found), self.alive(found)]
            backward = threading.Thread(target=loss.backward)  # autograd gives each GPU a thread
            backward.start()
            backward.join()
            gradients = [parameter.grad.clone() for parameter in policy.model.layers.parameters()]
            return [loss.detach(), *gradients], [*counts, len(found), self.alive(found)]

        sites = sum(key[1] in ("attn_in", "o_in", "mlp_in") for key in scorer.guidance().record.tables)
        assert sites == len(scorer.guidance().record.tables) > 0
        plain, counts = run()
        assert counts == [sites, 0, sites, 0]  # nothing is kept without recomputation
        set_gradient_checkpointing(policy, True)
        once, counts = run()
        assert counts == [sites, sites, sites, 0]
        monkeypatch.setattr(rounding_file, "found_once", lambda key, find: find())
        twice, counts = run()
        assert counts == [sites, 0, 2 * sites, 0]
        for results in (plain, twice):
            for ours, expected in zip(once, results, strict=True):
                assert_bit_equal(ours, expected)

    def test_nothing_is_kept_where_nothing_is_recomputed(self, scored, found) -> None:
        """Log-probs without gradients, and a forward whose graph was dropped: the next micro-batch searches anew."""
        policy, scorer = scored
        set_gradient_checkpointing(policy, True)
        rounding = GuidedRounding(scorer.guidance())
        with torch.no_grad():
            final_hidden(policy, scorer.token_ids(), rounding)
        first = len(found)
        assert first > 0
        assert self.alive(found) == 0
        hidden = final_hidden(policy, scorer.token_ids(), rounding)
        assert (len(found), self.alive(found)) == (2 * first, first)
        del hidden
        assert self.alive(found) == 0
        final_hidden(policy, scorer.token_ids(), rounding).sum().backward()
        assert (len(found), self.alive(found)) == (3 * first, 0)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_save_pretrained_round_trip(family: str, tmp_path: Path) -> None:
    """What is saved is the masters, and a reader without this library can use them."""
    model, ids = make_model(family), token_ids()
    plain = model(ids).logits
    install_qat(model, W4A4KV4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not quantized_names(loaded)
    assert_bit_equal(loaded.eval()(ids).logits, plain)
    for name, tensor in model.state_dict().items():
        assert_bit_equal(loaded.state_dict()[name], tensor)
