"""The engine as its caller sees it: how completions end, what a weight sync changes, and what is refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from tiny import (
    EOS,
    Scorer,
    TinyTokenizer,
    make_engine,
    make_model,
    make_policy,
    make_prompts,
    perturbed,
    rollout_logprobs,
    sampling,
    sync,
)
from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.recipe import SITES, GuidanceConfig, QuantRecipe
from trace_lightning.rollout import fused_decoder as decoder_module
from trace_lightning.rollout import workspace
from trace_lightning.rollout.base import Generation
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.fused_decoder import FusedDecoder
from trace_lightning.rollout.kv_pool import PagePool
from trace_lightning.types import Completion, SamplingParams

PROMPTS = make_prompts(1, 5, 16, 31)
PLAIN = QuantRecipe()
W4A4KV4 = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4")
GREEDY = sampling(temperature=0, max_new_tokens=16, ignore_eos=True)
BOTH_DECODERS = pytest.mark.parametrize("decoder", ["fused", "hf"])


def tokens(generation: Generation) -> list[list[int]]:
    return [completion.token_ids for completion in generation.completions]


def greedy(engine: LocalEngine) -> list[list[int]]:
    return tokens(engine.generate(PROMPTS, GREEDY))


def cut_after(completion: Completion, ends: set[int]) -> tuple[list[int], str]:
    """What of a completion is left, and why it ends, if the ids `ends` end it."""
    for i, token in enumerate(completion.token_ids):
        if token in ends:
            return completion.token_ids[: i + 1], "stop"
    return completion.token_ids, "length"


class TestEndOfCompletions:
    """Draws are counter-based, so a run that ends earlier is a prefix of one that does not."""

    @staticmethod
    def unbroken(engine: LocalEngine) -> list[Completion]:
        return engine.generate(PROMPTS, sampling(max_new_tokens=40, ignore_eos=True), num_samples=4).completions

    def check(self, engine: LocalEngine, ends: set[int], **settings: Any) -> None:
        full = self.unbroken(engine)
        ended = engine.generate(PROMPTS, sampling(max_new_tokens=40, **settings), num_samples=4).completions
        expected = [cut_after(completion, ends) for completion in full]
        assert [(c.token_ids, c.finish_reason) for c in ended] == expected
        assert {reason for _, reason in expected} == {"stop", "length"}, "one of the ways to end did not occur"
        for completion, whole in zip(ended, full, strict=True):
            assert completion.logprobs == pytest.approx(whole.logprobs[: len(completion.token_ids)], abs=1e-5)

    @pytest.mark.parametrize("eos", [EOS, [5, 6], [5, 6, 77]])
    def test_every_eos_id_ends_and_is_kept(self, eos: Any) -> None:
        """Models with several EOS ids: each of them ends a completion."""
        model = make_model("qwen3")
        model.generation_config.eos_token_id = eos
        self.check(make_engine(model, PLAIN), set(eos) if isinstance(eos, list) else {eos})

    def test_ids_of_all_sources_count(self) -> None:
        model = make_model("qwen3", eos_token_id=[9, 10])
        model.generation_config.eos_token_id = [10, 11]
        assert make_engine(model, PLAIN)._stopping.eos == {9, 10, 11, EOS}

    def test_stop_token_ids(self) -> None:
        self.check(make_engine(make_model("qwen3"), PLAIN), {EOS, 40, 41}, stop_token_ids=[40, 41])

    def test_stop_strings_end_with_the_token_that_contains_one(self) -> None:
        ends = {EOS, ord("A"), 12, 127}  # these two read <12> and <127>
        self.check(make_engine(make_model("qwen3"), PLAIN), ends, stop=["A", "<12"])

    def test_unknown_stop_string_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'AB', which no token"):
            make_engine(make_model("qwen3"), PLAIN).generate(PROMPTS, sampling(stop=["AB"]))

    @pytest.mark.parametrize("length", [1, 2, 9])
    @BOTH_DECODERS
    def test_max_new_tokens(self, decoder: str, length: int) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN, decoder=decoder)
        generation = engine.generate(PROMPTS, sampling(max_new_tokens=length, ignore_eos=True), num_samples=3)
        assert [len(row) for row in tokens(generation)] == [length] * 12
        assert {c.finish_reason for c in generation.completions} == {"length"}
        assert generation.stats["generated_tokens"] == 12 * length

    def test_zero_new_tokens_are_refused(self) -> None:
        """A limit of nothing is refused when the parameters are made."""
        with pytest.raises(ValueError, match="max_new_tokens=0"):
            SamplingParams(max_new_tokens=0)

    def test_ids_are_the_truth_and_text_is_decoded_from_them(self) -> None:
        """Token ids are the truth, text is derived."""
        for completion in self.unbroken(make_engine(make_model("qwen3"), PLAIN)):
            assert completion.text == TinyTokenizer().decode(completion.token_ids, skip_special_tokens=True)
            assert len(completion.logprobs) == len(completion.token_ids)


@BOTH_DECODERS
def test_residual_compensation_brings_the_rollout_closer_to_unrounded_activations(decoder: str) -> None:
    """QUADS: weights rounded on both sides, activations in the rollout alone, with their error added again or not."""
    rolled = {}
    for share in (0.0, 0.5, 1.0):
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", trainer="qat_weights", residual_share=share)
        policy = make_policy("qwen3", recipe.trained)
        drawn = make_engine(policy, recipe, decoder=decoder).generate(PROMPTS, sampling(max_new_tokens=40))
        rolled[share] = (rollout_logprobs(drawn) - Scorer(PROMPTS, drawn, 1).logprobs(policy, 0.8)).abs().mean()
    assert rolled[1.0] < rolled[0.5] < rolled[0.0]
    assert rolled[1.0] < rolled[0.0] / 3


class TestBatching:
    @pytest.mark.parametrize("recipe", [PLAIN, W4A4KV4], ids=lambda recipe: recipe.label)
    def test_completions_do_not_depend_on_what_runs_beside_them(self, recipe: QuantRecipe) -> None:
        policy = make_policy("qwen3", recipe, dtype=torch.float64)
        engines = [
            make_engine(policy, recipe, dtype=torch.float64, **settings)
            for settings in (
                {"max_num_seqs": 64},
                {"max_num_seqs": 1},
                {"max_num_seqs": 3, "prefill_tokens": 6},
                {"max_num_seqs": 64, "kv_cache_tokens": 80, "page_size": 8},
            )
        ]
        reference, *others = (engine.generate(PROMPTS, sampling(), num_samples=5) for engine in engines)
        for other in others:
            assert tokens(other) == tokens(reference)
            assert (rollout_logprobs(other) - rollout_logprobs(reference)).abs().max() <= 1e-5

    @pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
    def test_unquantised_fp32(self, max_num_seqs: int) -> None:
        model = make_model("llama")
        expected = make_engine(model, PLAIN).generate(PROMPTS, sampling(), num_samples=5)
        ours = make_engine(model, PLAIN, max_num_seqs=max_num_seqs).generate(PROMPTS, sampling(), num_samples=5)
        assert tokens(ours) == tokens(expected)

    def test_order_of_prompts_does_not_matter(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        there, back = (tokens(engine.generate(order, sampling())) for order in (PROMPTS, PROMPTS[::-1]))
        assert there == back[::-1]

    def test_samples_and_seeds_differ(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        rows = tokens(engine.generate(PROMPTS, sampling(), num_samples=5))
        assert len(set(map(tuple, rows))) == 20
        assert rows != tokens(engine.generate(PROMPTS, sampling(seed=1), num_samples=5))
        assert rows == tokens(engine.generate(PROMPTS, sampling(), num_samples=5))

    def test_a_groups_prompt_is_fed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fed: list[int] = []
        forward = FusedDecoder.forward

        def counting(self: FusedDecoder, batch: Any, kv: Any) -> Tensor:
            fed.append(len(batch.token_ids_N))
            return forward(self, batch, kv)

        engine = make_engine(make_model("qwen3"), PLAIN, max_num_seqs=4)
        monkeypatch.setattr(FusedDecoder, "forward", counting)
        rows = tokens(engine.generate(PROMPTS, sampling(), num_samples=6))
        assert sum(fed) == sum(len(p.token_ids) for p in PROMPTS) + sum(len(row) - 1 for row in rows)

    def test_progress(self) -> None:
        seen: list[tuple[int, int]] = []
        make_engine(make_model("qwen3"), PLAIN).generate(
            PROMPTS, sampling(), num_samples=3, progress=lambda done, total: seen.append((done, total))
        )
        assert seen == sorted(seen)
        assert seen[-1] == (12, 12)


class TestMemory:
    def test_no_page_leaks_and_storage_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pools: list[PagePool] = []

        class Watched(PagePool):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                pools.append(self)

        monkeypatch.setattr(workspace, "PagePool", Watched)
        engine = make_engine(make_model("qwen3"), W4A4KV4)
        storages, counts = set(), []
        for version in range(4):
            engine.generate(PROMPTS, sampling(), num_samples=3)
            sync(engine, engine._policy, version)
            storages.add(engine._workspace.kv.layers[0][0].data.data_ptr())  # type: ignore[union-attr]
            gc.collect()
            counts.append(sum(issubclass(type(thing), PackedFP4Tensor) for thing in gc.get_objects()))
        assert len(pools) == 4
        assert all(pool.num_free == pool.num_pages for pool in pools)
        assert len(storages) == 1
        assert len(set(counts)) == 1, "one copy of the weights alive"

    def test_grows_when_a_call_needs_more(self) -> None:
        engine = make_engine(make_model("qwen3"), W4A4KV4)
        engine.generate(PROMPTS[:1], sampling())
        small = engine._workspace.kv.num_pages  # type: ignore[union-attr]
        longer = engine.generate(PROMPTS, sampling(), num_samples=3)
        assert engine._workspace.kv.num_pages > small  # type: ignore[union-attr]
        assert tokens(longer) == tokens(
            make_engine(make_model("qwen3"), W4A4KV4).generate(PROMPTS, sampling(), num_samples=3)
        )

    @pytest.mark.parametrize("recipe", [PLAIN, W4A4KV4], ids=lambda recipe: recipe.label)
    def test_preempted_sequences_go_on_where_they_stopped(self, recipe: QuantRecipe) -> None:
        """Pages for a third of what the sequences need: the draws are those of an engine with room for all."""
        policy = make_policy("qwen3", recipe, dtype=torch.float64)
        params = sampling(max_new_tokens=40)
        roomy, tight = (
            make_engine(policy, recipe, dtype=torch.float64, **settings).generate(PROMPTS, params, num_samples=4)
            for settings in ({}, {"kv_cache_tokens": 256})
        )
        assert roomy.stats["preempted"] == 0
        assert tight.stats["preempted"] > 0
        assert tokens(tight) == tokens(roomy)
        assert (rollout_logprobs(tight) - rollout_logprobs(roomy)).abs().max() <= 1e-5

    def test_guidance_covers_preempted_sequences(self) -> None:
        recipe = QuantRecipe(kv_cache="nvfp4", guidance=GuidanceConfig(mode="full"))
        policy = make_policy("qwen3", recipe, dtype=torch.float64)
        engine = make_engine(policy, recipe, dtype=torch.float64, kv_cache_tokens=256)
        drawn = engine.generate(PROMPTS, sampling(max_new_tokens=40), num_samples=4, record_guidance=True)
        assert drawn.stats["preempted"] > 0
        guided = Scorer(PROMPTS, drawn, 4).guided_logprobs(policy, 0.8)
        assert (guided - rollout_logprobs(drawn)).abs().max() <= 1e-4

    def test_released_between_rollouts(self) -> None:
        model = make_model("qwen3")
        engine = make_engine(model, W4A4KV4, keep_snapshot=False)
        first = greedy(engine)
        assert engine._decoder is None
        assert engine._workspace.kv is None
        with pytest.raises(ValueError, match="load_weights first"):
            greedy(engine)
        sync(engine, model, 1)
        assert greedy(engine) == first

    def test_a_check_leaves_a_working_engine_alone(self) -> None:
        model = make_model("qwen3")
        engine = make_engine(model, W4A4KV4)
        before = greedy(engine)
        storage = engine._workspace.kv
        engine.check(make_policy("qwen3", W4A4KV4).to("meta"), engine.tokenizer, W4A4KV4)
        assert greedy(engine) == before
        assert engine._workspace.kv is storage

    @pytest.mark.parametrize("mode", ["parity", "syndrome"])
    def test_guidance_widens_while_the_snapshot_is_released(self, mode: Any) -> None:
        """To all sites, and from syndromes to bits."""
        recipe = QuantRecipe(activations="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode=mode))
        model = make_policy("qwen3", recipe)
        engine = make_engine(model, recipe, keep_snapshot=False)
        engine.generate(PROMPTS, sampling(), record_guidance=True)
        assert engine._decoder is None
        assert engine.widen_guidance()
        sync(engine, model, 1)
        record = engine.generate(PROMPTS, sampling(), record_guidance=True).guidance
        assert record is not None
        assert {site for _, site in record.tables} == set(SITES)
        assert record.config.mode == "parity"
        assert not engine.widen_guidance()

    def test_a_cache_bounded_by_memory_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Far more is wanted than fits: small changes of what is free move neither the cache nor its graphs."""
        engine, sizes = make_engine(make_model("qwen3"), PLAIN), []
        for possible in (120, 130, 90, 136, 160):
            monkeypatch.setattr(workspace.Workspace, "_possible_tokens", lambda *_, n=possible: n)
            engine.generate(PROMPTS, sampling(), num_samples=4)
            sizes.append(engine._workspace.kv.num_pages * engine.page_size)  # type: ignore[union-attr]
        assert sizes == [120, 120, 120, 120, 160]

    def test_graphs_that_write_to_a_cache_go_with_it(self) -> None:
        """The next cache may begin at the address of the last one, so addresses alone do not tell them apart."""
        engine = make_engine(make_model("qwen3"), W4A4KV4)
        engine.generate(PROMPTS[:1], sampling())
        engine._workspace.sync_graph.run("key", lambda: None)
        engine.generate(PROMPTS, sampling(), num_samples=3)
        steps: list[str] = []
        engine._workspace.sync_graph.run("key", lambda: steps.append("not from a graph"))
        assert steps

    def test_graphs_of_temperatures_that_pass_by_do_not_pile_up(self) -> None:
        engine, kept = make_engine(make_model("qwen3"), PLAIN), []
        for temperature in (1.0, 0.9, 0.8, 0.9, 0.7, 0.6):
            engine.generate(PROMPTS, sampling(temperature=temperature))
            kept.append(bool(engine._workspace.graphs._seen))
            engine._workspace.graphs._seen.add("a shape")
        assert kept == [False, True, True, True, True, False]

    def test_interrupted_call_takes_no_pages_with_it(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN, kv_cache_tokens=60)
        expected = greedy(engine)

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, GREEDY, progress=interrupt)
        assert greedy(engine) == expected

    def test_packed_cache_and_weights_are_small(self) -> None:
        engines = [make_engine(make_model("qwen3"), recipe) for recipe in (PLAIN, W4A4KV4)]
        for engine in engines:
            engine.generate(PROMPTS, sampling())
        sizes = [engine._workspace.kv.nbytes for engine in engines]  # type: ignore[union-attr]
        assert sizes[1] / sizes[0] == 4.5 / 32


@pytest.mark.parametrize("recipe", [PLAIN, W4A4KV4], ids=lambda recipe: recipe.label)
@BOTH_DECODERS
class TestSync:
    def test_equal_syncs_change_nothing_and_a_restored_weight_restores_all(
        self, decoder: str, recipe: QuantRecipe
    ) -> None:
        """A sync writes into the same layout every time."""
        model = make_model("qwen3")
        engine = make_engine(model, recipe, decoder=decoder)
        first = greedy(engine)
        for version in (1, 2, 3):
            sync(engine, model, version)
            assert greedy(engine) == first
        weight = model.model.layers[0].self_attn.v_proj.weight.data
        saved = weight.clone()
        weight.neg_()
        assert greedy(engine) == first, "the snapshot is its own"
        sync(engine, model, 4)
        assert greedy(engine) != first
        weight.copy_(saved)
        sync(engine, model, 5)
        assert greedy(engine) == first

    def test_after_an_update_as_a_fresh_engine(self, decoder: str, recipe: QuantRecipe) -> None:
        """No key or value of the old policy is read again."""
        model = make_model("qwen3")
        engine, before = make_engine(model, recipe, decoder=decoder), perturbed(model, 0.2)
        old = engine.generate(PROMPTS, sampling())
        sync(engine, before, 1)
        new = engine.generate(PROMPTS, sampling())
        fresh = make_engine(before, recipe, decoder=decoder).generate(PROMPTS, sampling())
        assert tokens(new) == tokens(fresh) != tokens(old)
        assert_bit_equal(rollout_logprobs(new), rollout_logprobs(fresh))

    def test_kv_scales_follow_the_weights(self, decoder: str, recipe: QuantRecipe) -> None:
        """V of the first layer grows by 8, and with its scales by 8 not one byte of it changes."""
        model = make_model("llama")
        engine = make_engine(model, recipe, decoder=decoder)
        whole_pages = make_prompts(4, 8, 16)  # others are copied with what the rest of their page held before

        def cached_v() -> Tensor:
            engine.generate(whole_pages, sampling(max_new_tokens=1))
            slots = torch.arange(engine._workspace.kv.num_pages * engine.page_size)  # type: ignore[union-attr]
            return engine._workspace.kv.read(0, slots)[1]  # type: ignore[union-attr]

        before, outer = cached_v(), engine.decoder.kv_outer(0)[1]
        outer = None if outer is None else outer.clone()  # it is renewed in place
        model.model.layers[0].self_attn.v_proj.weight.data *= 8
        model.model.layers[0].self_attn.q_proj.weight.data *= 8
        model.model.layers[0].self_attn.k_proj.weight.data *= 8  # the fused group shares one weight scale
        sync(engine, model, 1)
        assert before.any()
        assert_bit_equal(cached_v(), 8 * before)
        if outer is not None:
            assert torch.equal(engine.decoder.kv_outer(0)[1], 8 * outer)  # type: ignore[arg-type]

    def test_version_travels_and_a_failed_load_changes_nothing(self, decoder: str, recipe: QuantRecipe) -> None:
        model = make_model("qwen2")  # has biases, which can be forgotten too
        engine = make_engine(model, recipe, decoder=decoder)
        sync(engine, model, 3)
        first = greedy(engine)
        other = dict(perturbed(model, 0.5).named_parameters())
        for name in other:
            with pytest.raises(ValueError, match=f"missing.*{name}"):
                engine.load_weights([(n, t) for n, t in other.items() if n != name], version=4)
        with pytest.raises(ValueError, match=r"does not know.*model\.surplus\.weight"):
            engine.load_weights([*other.items(), ("model.surplus.weight", torch.ones(2))], version=4)
        assert engine.policy_version == 3
        assert greedy(engine) == first
        assert {c.policy_version for c in engine.generate(PROMPTS, GREEDY).completions} == {3}

    def test_tied_head_may_be_named_or_left_out(self, decoder: str, recipe: QuantRecipe) -> None:
        model = make_model("qwen3")
        engine = make_engine(model, recipe, decoder=decoder)
        first = greedy(engine)
        assert "lm_head.weight" in model.state_dict()
        engine.load_weights(model.state_dict().items(), version=1)
        assert greedy(engine) == first


class TestSnapshot:
    def test_stays_at_its_addresses(self) -> None:
        """A CUDA graph that captured them must read the new weights."""
        model = make_model("llama", tie_word_embeddings=True)
        engine = make_engine(model, W4A4KV4)

        def addresses() -> list[int]:
            decoder = engine.decoder
            assert isinstance(decoder, FusedDecoder)
            linears = [linear for layer in decoder.layers for linear in layer.linears]
            packed = [t for linear in linears for t in linear.packed.packed_tensors().values()]  # type: ignore[union-attr]
            small = [*decoder._small.values(), decoder.head]
            return [t.data_ptr() for t in (*packed, *(linear.weight for linear in linears), *small)]

        before = addresses()
        sync(engine, perturbed(model, 0.1), 1)
        assert addresses() == before

    @BOTH_DECODERS
    def test_policy_is_left_alone(self, decoder: str) -> None:
        policy = make_policy("qwen3", W4A4KV4).train()
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        engine = make_engine(policy, W4A4KV4, decoder=decoder)
        engine.generate(PROMPTS, sampling())
        assert policy.training
        assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.parameters())
        assert policy.state_dict().keys() == before.keys()
        for name, tensor in policy.state_dict().items():
            assert_bit_equal(tensor, before[name])
        assert engine.decoder.model is policy or decoder == "hf"  # type: ignore[attr-defined]

    def test_second_setup_forgets_the_first(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        engine.setup(make_model("llama"), TinyTokenizer(), W4A4KV4, dtype=torch.float32)  # type: ignore[arg-type]
        assert engine.policy_version == -1
        with pytest.raises(ValueError, match="load_weights first"):
            engine.generate(PROMPTS, sampling())


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs=0"),
            ({"page_size": 0}, "page_size=0"),
            ({"prefill_tokens": 0}, "prefill_tokens=0"),
            ({"memory_fraction": 0.0}, "memory_fraction=0"),
            ({"memory_fraction": 1.5}, "memory_fraction=1.5"),
            ({"kv_cache_tokens": -5}, "kv_cache_tokens=-5"),
            ({"decoder": "fast"}, "decoder='fast'.*auto, fused, hf"),
        ],
    )
    def test_bad_arguments(self, settings: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LocalEngine(**settings)

    def test_fused_decoder_of_an_unknown_family(self) -> None:
        with pytest.raises(ValueError, match="knows llama, qwen2, qwen3, mistral, not gpt2"):
            make_engine(make_model("gpt2"), PLAIN, decoder="fused")

    @pytest.mark.parametrize("foreign", [-1, 10**6])
    def test_stop_ids_outside_of_the_vocabulary(self, foreign: int) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        with pytest.raises(ValueError, match=rf"stop_token_ids has \[{foreign}\]"):
            engine.generate(PROMPTS, sampling(stop_token_ids=[5, foreign]))

    def test_an_activation_without_a_kernel(self) -> None:
        model = make_model("llama", hidden_act="relu")
        with pytest.raises(ValueError, match=r"not relu, which LlamaForCausalLM has: use engine.decoder=hf"):
            make_engine(model, PLAIN)
        make_engine(model, PLAIN, decoder="hf").generate(PROMPTS, GREEDY)

    def test_generate_before_load(self) -> None:
        engine = LocalEngine()
        engine.setup(make_model("qwen3"), TinyTokenizer(), PLAIN, dtype=torch.float32)  # type: ignore[arg-type]
        assert engine.policy_version == -1
        with pytest.raises(ValueError, match="no weights yet"):
            engine.generate(PROMPTS, sampling())

    def test_nothing_to_generate(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        with pytest.raises(ValueError, match="0 prompts"):
            engine.generate([], sampling())
        with pytest.raises(ValueError, match="0 samples"):
            engine.generate(PROMPTS, sampling(), num_samples=0)
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            engine.generate(make_prompts(0, 3), sampling())

    @pytest.mark.parametrize("family", ["qwen3", "gpt2"])
    def test_positions_beyond_the_context(self, family: str) -> None:
        """Not an IndexError in the middle of a batch, and no rotary angles that were never trained."""
        limit = {"n_positions": 32} if family == "gpt2" else {"max_position_embeddings": 32}
        engine = make_engine(make_model(family, **limit), PLAIN)
        engine.generate(make_prompts(20), sampling(max_new_tokens=12, ignore_eos=True))
        with pytest.raises(ValueError, match=r"prompt of 21 and max_new_tokens=12 exceed the context.*32 tokens"):
            engine.generate(make_prompts(5, 21), sampling())

    def test_completions_may_be_cut_at_the_end_of_the_context(self) -> None:
        engine = make_engine(make_model("qwen3", max_position_embeddings=32), PLAIN)
        params = sampling(max_new_tokens=12, ignore_eos=True, beyond_context="cut")
        drawn = engine.generate(make_prompts(5, 21, 30), params).completions
        assert [len(completion.token_ids) for completion in drawn] == [12, 11, 2]
        assert {completion.finish_reason for completion in drawn} == {"length"}
        with pytest.raises(ValueError, match="a prompt of 32"):
            engine.generate(make_prompts(32), params)

    def test_sequence_larger_than_the_cache(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN, kv_cache_tokens=40)
        with pytest.raises(
            ValueError, match="31 prompt and 12 new tokens does not fit the KV cache, which holds 36 tokens"
        ):
            engine.generate(PROMPTS, sampling())
        engine.generate(PROMPTS[:3], sampling())

    def test_exclude_that_splits_a_fused_group(self) -> None:
        recipe = QuantRecipe(weights="nvfp4", exclude=["k_proj"])
        model = make_model("qwen3")
        with pytest.raises(ValueError, match=r"splits the fused group.*q_proj.*k_proj"):
            make_engine(model, recipe)
        make_engine(model, recipe, decoder="hf").generate(PROMPTS, sampling())

    def test_capped_attention_scores(self) -> None:
        from transformers import Gemma2Config, Gemma2ForCausalLM

        from trace_lightning.quantization.qat import install_qat

        config = Gemma2Config(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, pad_token_id=None, attn_implementation="eager",
        )  # fmt: skip
        policy = Gemma2ForCausalLM(config).eval()
        install_qat(policy, W4A4KV4, attention="eager")
        with pytest.raises(ValueError, match="softcap"):
            make_engine(policy, W4A4KV4)


def without_rope(args: Any, *, keep_cos: bool) -> Any:
    """The arguments of `kv_append` with rotary angles of zero, or with their sines alone missing."""
    cos, sin = args[4:6]
    return *args[:4], cos if keep_cos else torch.ones_like(cos), torch.zeros_like(sin), *args[6:]


class TestVerify:
    @pytest.mark.parametrize(
        ("name", "broken"),
        [
            ("add_rms_norm", lambda real: lambda r, p, g, eps, **rest: real(r, p, g, eps + 0.05, **rest)),
            ("kv_append", lambda real: lambda *args, **rest: real(*without_rope(args, keep_cos=False), **rest)),
            ("kv_append", lambda real: lambda *args, **rest: real(*without_rope(args, keep_cos=True), **rest)),
        ],
    )
    def test_a_wrong_decoder_is_caught_before_it_draws(
        self, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decoder_module, name, broken(getattr(decoder_module, name)))
        with pytest.raises(ValueError, match=r"decoder disagrees with Qwen3ForCausalLM.*decoder=hf"):
            make_engine(make_model("qwen3"), W4A4KV4)
        assert make_engine(make_model("qwen3"), W4A4KV4, verify=False).policy_version == 0
        assert make_engine(make_model("qwen3"), W4A4KV4, decoder="hf").policy_version == 0

    def test_a_failed_check_leaves_nothing_to_draw_from(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, model = LocalEngine(), make_model("qwen3")
        engine.setup(model, TinyTokenizer(), PLAIN, dtype=torch.float32)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            real = decoder_module.kv_append
            patch.setattr(decoder_module, "kv_append", lambda *a, **k: real(*without_rope(a, keep_cos=False), **k))
            with pytest.raises(ValueError, match="disagrees"):
                sync(engine, model, 0)
        assert engine.policy_version == -1
        sync(engine, model, 0)
        assert engine.policy_version == 0

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
    def test_a_right_one_passes_in_bf16_over_a_quantised_policy(self, family: str) -> None:
        policy = make_policy(family, W4A4KV4)
        assert make_engine(policy, W4A4KV4, dtype=torch.bfloat16).policy_version == 0


class TestMostLikelyTokens:
    """`record_logprobs`: the engine's top-k are the trainer's."""

    @staticmethod
    def recorded(generation: Generation) -> tuple[Tensor, Tensor]:
        ids = [completion.topk_ids for completion in generation.completions]
        logprobs = [completion.topk_logprobs for completion in generation.completions]
        return torch.cat(ids), torch.cat(logprobs)  # type: ignore[arg-type]

    @BOTH_DECODERS
    def test_equal_the_trainers_log_probs_of_the_same_ids(self, decoder: str) -> None:
        policy = make_model("qwen3")
        params = sampling(record_logprobs=7)
        generation = make_engine(policy, PLAIN, decoder=decoder).generate(PROMPTS, params, num_samples=3)
        ids, logprobs = self.recorded(generation)
        scorer = Scorer(PROMPTS, generation, 3)
        logits = logits_head(policy)(final_hidden(policy, scorer.token_ids())[scorer.predicting()])
        expected = (logits / 0.8).log_softmax(-1).detach()
        assert ids.shape == logprobs.shape == (len(expected), 7)
        torch.testing.assert_close(logprobs, expected.gather(-1, ids), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logprobs, expected.topk(7).values, atol=1e-5, rtol=1e-5)

    def test_survive_preemption(self) -> None:
        policy = make_policy("qwen3", PLAIN, dtype=torch.float64)
        params = sampling(max_new_tokens=40, record_logprobs=4)
        roomy, tight = (
            make_engine(policy, PLAIN, dtype=torch.float64, **settings).generate(PROMPTS, params, num_samples=4)
            for settings in ({}, {"kv_cache_tokens": 256})
        )
        assert tight.stats["preempted"] > 0
        assert torch.equal(self.recorded(tight)[0], self.recorded(roomy)[0])
        torch.testing.assert_close(self.recorded(tight)[1], self.recorded(roomy)[1], atol=1e-5, rtol=1e-5)

    def test_a_small_vocabulary_is_padded(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        ids, logprobs = self.recorded(engine.generate(PROMPTS, sampling(record_logprobs=130)))
        assert ids.shape[1] == 130
        assert (ids[:, 128:] == -1).all()
        assert (logprobs[:, 128:] == -torch.inf).all()
        assert torch.equal(ids[:, :128].sort(-1).values, torch.arange(128).expand(len(ids), 128))

    def test_nothing_is_kept_unless_asked_for(self) -> None:
        engine = make_engine(make_model("qwen3"), PLAIN)
        drawn = [engine.generate(PROMPTS, sampling(record_logprobs=k)) for k in (5, 0)]
        assert self.recorded(drawn[0])[0].shape[1] == 5
        assert all(c.topk_ids is None and c.topk_logprobs is None for c in drawn[1].completions)
        assert tokens(drawn[0]) == tokens(drawn[1])

    @pytest.mark.gpu
    def test_are_the_same_from_a_graph(self) -> None:
        shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128}
        model = make_model("qwen3", **shape, initializer_range=0.05).to("cuda", torch.bfloat16)
        params, drawn = sampling(max_new_tokens=30, record_logprobs=6), []
        for cuda_graphs in (False, True):
            settings = {"page_size": 64, "decode_window": 4, "cuda_graphs": cuda_graphs}
            drawn.append(make_engine(model, PLAIN, dtype=torch.bfloat16, **settings).generate(PROMPTS, params))
        assert tokens(drawn[0]) == tokens(drawn[1])
        eager, graphed = (self.recorded(generation) for generation in drawn)
        assert torch.equal(eager[0], graphed[0])
        assert torch.equal(eager[1], graphed[1])
        for completion in drawn[1].completions:
            assert completion.topk_ids is not None
            assert completion.topk_ids.shape == (len(completion.token_ids), 6)


class TestTruncatedSampling:
    """The trainer renormalises over the recorded support."""

    TRUNCATIONS = pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}])

    @TRUNCATIONS
    def test_ratio_is_one_with_the_support_and_below_without(self, truncation: Any) -> None:
        policy = make_model("qwen3")
        params = sampling(record_support=32, **truncation)
        params.check_trainable()
        generation = make_engine(policy, PLAIN).generate(PROMPTS, params, num_samples=3)
        scorer, rolled = Scorer(PROMPTS, generation, 3), rollout_logprobs(generation)
        ratio = (scorer.logprobs(policy, 0.8, with_support=True) - rolled).exp()
        assert (ratio - 1).abs().max() <= 1e-5, "a PPO ratio clips nothing"
        biased = (scorer.logprobs(policy, 0.8) - rolled).exp()
        assert biased.max() <= 1 + 1e-5
        assert biased.mean() < 0.95

    @TRUNCATIONS
    def test_refused_for_training_without_the_support(self, truncation: Any) -> None:
        with pytest.raises(ValueError, match="record_support"):
            sampling(**truncation).check_trainable()

    def test_works_under_quantisation_and_guidance(self) -> None:
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", guidance=GuidanceConfig(mode="parity"))
        policy = make_policy("qwen3", recipe, dtype=torch.float64)
        params = sampling(record_support=16, top_p=0.9)
        engine = make_engine(policy, recipe, dtype=torch.float64)
        generation = engine.generate(PROMPTS, params, num_samples=2, record_guidance=True)
        scored = Scorer(PROMPTS, generation, 2).logprobs(policy, 0.8, with_support=True)
        assert (scored - rollout_logprobs(generation)).abs().max() <= 1e-5


def test_a_rollout_leaves_the_policys_angles_alone() -> None:
    """Which transformers rewrites in a forward pass beyond the original context; the trainer's may run beside it."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16} | factors
    policy = make_policy("llama", PLAIN, rope_parameters=rope)
    angles = policy.get_decoder().rotary_emb.inv_freq.clone()
    make_engine(policy, PLAIN, decoder="fused").generate(PROMPTS, GREEDY)
    assert torch.equal(policy.get_decoder().rotary_emb.inv_freq, angles)
