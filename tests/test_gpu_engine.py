"""The engine's fast path on a GPU: kernels, pages, graphs and preemption change how fast tokens come, not which."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from numerics import assert_no_worse_than_torch
from tiny import make_engine, make_model, make_prompts, rollout_logprobs, sync
from trace_kernels.kv_pages import KVPages
from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.recipe import SITES, GuidanceConfig, QuantRecipe
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rollout.base import Generation
from trace_lightning.rollout.batch import DecodeBatch, PrefillBatch, Segment
from trace_lightning.rollout.kv_pool import PagedKV
from trace_lightning.types import SamplingParams

pytestmark = pytest.mark.gpu
PLAIN = QuantRecipe()
W4A16KV4 = QuantRecipe(weights="nvfp4", kv_cache="nvfp4")
W4A4KV4 = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4")
RECIPES = pytest.mark.parametrize("recipe", [PLAIN, W4A16KV4, W4A4KV4], ids=lambda recipe: recipe.label)
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


def model_on_gpu(family: str = "qwen3", **settings: Any) -> Any:
    """Two layers whose shapes the kernels serve: 8 heads of 64 or 128 dims over 2, 1024 wide."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    shape |= {"max_position_embeddings": 4096, "initializer_range": 0.05}
    model = make_model(family, **(shape | {"head_dim": 128} | settings))
    return model.to("cuda", torch.bfloat16)


def fast_engine(model: Any, recipe: QuantRecipe, **settings: Any) -> Any:
    return make_engine(model, recipe, dtype=torch.bfloat16, **({"page_size": 64, "max_num_seqs": 128} | settings))


def tokens(generation: Generation) -> list[list[int]]:
    return [completion.token_ids for completion in generation.completions]


@torch.no_grad()
def policy_logprobs(model: Any, prompts: Any, generation: Generation) -> torch.Tensor:
    """Log-probs of the drawn tokens, one sequence at a time, by the policy's own forward."""
    values = []
    for prompt, completion in zip(prompts, generation.completions, strict=True):
        ids = torch.tensor(prompt.token_ids + completion.token_ids, device="cuda")
        hidden = final_hidden(model, ids[:-1].unsqueeze(0), None)[0, len(prompt.token_ids) - 1 :]
        logprobs, _ = token_logprobs(hidden, logits_head(model), ids[len(prompt.token_ids) :], temperature=1.0)
        values.append(logprobs.cpu())
    return torch.cat(values)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 8}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 40}),
    ],
)
def test_unquantised_engine_equals_the_policy_in_bf16(family: str, settings: Any) -> None:
    model = model_on_gpu(family, **settings)
    prompts = make_prompts(1, 63, 64, 65, 200, 700)
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    drawn = fast_engine(model, PLAIN).generate(prompts, params)
    in_bf16 = policy_logprobs(model, prompts, drawn)
    exact = policy_logprobs(model.float(), prompts, drawn)
    assert_no_worse_than_torch(rollout_logprobs(drawn), in_bf16, exact)


@torch.no_grad()
@RECIPES
def test_decode_equals_prefill_across_every_edge(recipe: QuantRecipe) -> None:
    """Lengths 1 ... 300 and those around the split at 512; the gap must not grow with position."""
    model = model_on_gpu()
    engine = fast_engine(model, recipe)
    decoder, length = engine.decoder, 600
    ids = make_prompts(length)[0].token_ids
    num_pages = -(-length // 64)

    def new_kv() -> PagedKV:
        shape = {"num_pages": num_pages, "page_size": 64, "num_kv_heads": 2, "head_dim": 128}
        kv = PagedKV(decoder.kv_formats, **shape, dtype=torch.bfloat16, device=torch.device("cuda"))
        for layer in range(len(kv.layers)):
            kv.set_outer(layer, *decoder.kv_outer(layer))
        return kv

    pages, kv = list(range(num_pages))[::-1], new_kv()
    table = torch.tensor([pages], dtype=torch.int32, device="cuda")
    checked = [*range(1, 301), *range(505, 520), length]
    decoded = {}
    for position, token in enumerate(ids):
        batch = DecodeBatch(
            token_ids_N=torch.tensor([token], device="cuda"),
            positions_N=torch.tensor([position], device="cuda"),
            slots_N=torch.tensor([pages[position // 64] * 64 + position % 64], device="cuda"),
            page_table_BW=table,
            seq_lens_B=torch.tensor([position + 1], dtype=torch.int32, device="cuda"),
            max_len=length,
        )
        decoded[position + 1] = decoder.forward(batch, kv)[0].float()
    gaps = []
    for n in checked:
        batch = PrefillBatch.of([Segment(ids[:n], 0, pages)], 64, torch.device("cuda"))
        prefilled = decoder.forward(batch, new_kv())[0].float()
        gaps.append(((decoded[n] - prefilled).norm() / prefilled.norm()).item())
    gap = torch.tensor(gaps)
    # Sums of another order move a BF16 value by an ulp, and with it, in a quantised model, codes by a third of theirs.
    limit = {PLAIN.label: 0.01, W4A16KV4.label: 0.1, W4A4KV4.label: 0.4}[recipe.label]
    assert gap.median() < limit
    assert gap[200:300].mean() < 3 * gap[:100].mean() + 1e-3, "the gap grows with position"


@pytest.mark.parametrize(("recipe", "limit"), [(PLAIN, 0.05), (W4A16KV4, 0.2)], ids=lambda value: str(value)[:20])
def test_rows_do_not_depend_on_the_batch(recipe: QuantRecipe, limit: float) -> None:
    """Up to the order of sums, which differs between matmuls of different shapes: so a few tokens, by log-prob."""
    model = model_on_gpu()
    prompts = make_prompts(*[(7 * i) % 150 + 1 for i in range(128)])
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    whole = fast_engine(model, recipe).generate(prompts, params).completions
    for size in (1, 31, 32, 33):
        part = fast_engine(model, recipe, max_num_seqs=size).generate(prompts[:size], params).completions
        gaps = [
            abs(a - b)
            for ours, theirs in zip(part, whole, strict=False)
            if ours.token_ids == theirs.token_ids
            for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)
        ]
        assert len(gaps) >= 1.5 * size, "three quarters of the rows draw the same tokens"
        assert max(gaps) < limit


@RECIPES
def test_greedy_output_is_the_same_after_equal_syncs(recipe: QuantRecipe) -> None:
    model = model_on_gpu()
    engine, prompts = fast_engine(model, recipe), make_prompts(5, 64, 130)
    first = tokens(engine.generate(prompts, GREEDY))
    for version in (1, 2, 3):
        sync(engine, model, version)
        assert tokens(engine.generate(prompts, GREEDY)) == first
    assert len(engine._workspace.graphs) > 0


@RECIPES
def test_graphs_change_nothing(recipe: QuantRecipe) -> None:
    model, prompts = model_on_gpu(), make_prompts(5, 64, 130, 600)
    params = SamplingParams(max_new_tokens=60, temperature=0.8, ignore_eos=True)
    results = [
        fast_engine(model, recipe, **settings).generate(prompts, params, num_samples=4)
        for settings in ({}, {"cuda_graphs": False}, {"decode_window": 3})
    ]
    for other in results[1:]:
        assert tokens(other) == tokens(results[0])
        assert torch.equal(rollout_logprobs(other), rollout_logprobs(results[0]))


def test_shared_prompts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from trace_lightning.rollout import workspace

    model, prompts = model_on_gpu(), make_prompts(600, 1000)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    shared = fast_engine(model, PLAIN).generate(prompts, params, num_samples=8)
    monkeypatch.setattr(workspace, "MIN_SHARED_TOKENS", 10**9)
    apart = fast_engine(model, PLAIN).generate(prompts, params, num_samples=8)
    # Sums in another order differ in the last bits of BF16; a draw that falls near an edge then goes the other way, and
    # the sequences part. Up to there, they must have the same log-probs.
    agreed = []
    for ours, theirs in zip(shared.completions, apart.completions, strict=True):
        pairs = list(zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True))
        together = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert all(abs(a - b) < 0.1 for _, _, a, b in together)
        agreed.append(len(together))
    assert sum(agreed) > 16 * 4


def test_preempted_sequences_are_completed() -> None:
    model, prompts = model_on_gpu(), make_prompts(60, 70, 80, 90)
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    roomy = fast_engine(model, PLAIN).generate(prompts, params, num_samples=4)
    tight = fast_engine(model, PLAIN, kv_cache_tokens=2048).generate(prompts, params, num_samples=4)
    assert roomy.stats["preempted"] == 0
    assert tight.stats["preempted"] > 0
    assert [len(row) for row in tokens(tight)] == [200] * 16
    # A prompt that is prefilled again was decoded before: the same values up to BF16, not the same bits.
    assert sum(a[:100] == b[:100] for a, b in zip(tokens(tight), tokens(roomy), strict=True)) >= 10


def test_memory_is_flat_over_ten_steps() -> None:
    model, prompts = model_on_gpu(), make_prompts(60, 70, 80, 90)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    engine, used = fast_engine(model, W4A16KV4), []
    for version in range(10):
        sync(engine, model, version)
        engine.generate(prompts, params, num_samples=4)
        used.append(torch.cuda.memory_allocated())
    assert max(used[3:]) - min(used[3:]) < 2**20


def test_released_snapshot_is_built_anew() -> None:
    model, prompts = model_on_gpu(), make_prompts(5, 64)
    engine = fast_engine(model, W4A16KV4, keep_snapshot=False)
    before = tokens(engine.generate(prompts, GREEDY))
    gc.collect()  # engines of earlier tests, which could go in between
    held = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match="load_weights first"):
        engine.generate(prompts, GREEDY)
    sync(engine, model, 1)
    assert torch.cuda.memory_allocated() > held
    assert tokens(engine.generate(prompts, GREEDY)) == before


def test_unserved_shapes_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_on_gpu(head_dim=32, num_attention_heads=8)
    engine = fast_engine(model, W4A16KV4)
    engine.generate(make_prompts(5), GREEDY)
    engine.generate(make_prompts(6), GREEDY)
    said = [record for record in caplog.records if "head_dim 32" in record.message]
    assert len(said) == 1


def test_pages_hold_what_the_reference_would_have_written() -> None:
    """Bytes of K and V after a prefill, against the CPU's for the same model: equal but where BF16 sums differed."""
    model, ids = model_on_gpu(), make_prompts(100)[0].token_ids
    pages = {}
    for device in ("cuda", "cpu"):
        engine = make_engine(model.to(device), W4A16KV4, dtype=torch.bfloat16, page_size=64)
        shape = {"num_pages": 2, "page_size": 64, "num_kv_heads": 2, "head_dim": 128}
        kv = PagedKV(engine.decoder.kv_formats, **shape, dtype=torch.bfloat16, device=torch.device(device))
        for layer in range(2):
            kv.set_outer(layer, *engine.decoder.kv_outer(layer))
        engine.decoder.forward(PrefillBatch.of([Segment(ids, 0, [0, 1])], 64, torch.device(device)), kv)
        pages[device] = kv.layers[0]
    for on_gpu, on_cpu in zip(pages["cuda"], pages["cpu"], strict=True):
        assert isinstance(on_gpu, KVPages)
        assert (on_gpu.scale.cpu() != on_cpu.scale).float().mean() < 0.02
        assert (on_gpu.data.cpu() != on_cpu.data).float().mean() < 0.05


@pytest.mark.parametrize("mode", ["parity", "full", "syndrome"])
def test_graphed_steps_record_what_single_ones_do(mode: Any) -> None:
    guidance = GuidanceConfig(mode=mode, sites=list(SITES), audit_sequences=2)
    recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=guidance)
    model, prompts = model_on_gpu(), make_prompts(5, 64, 130, 600)
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    graphed, single = (
        fast_engine(model, recipe, **settings).generate(prompts, params, num_samples=4, record_guidance=True)
        for settings in ({}, {"cuda_graphs": False})
    )
    assert tokens(graphed) == tokens(single)
    for ours, theirs in zip(graphed.completions, single.completions, strict=True):
        for key, table in graphed.guidance.tables.items():
            other = single.guidance.tables[key]
            for name in ("scale", "codes"):
                a, b = getattr(table, name)[ours.guidance_rows], getattr(other, name)[theirs.guidance_rows]
                assert torch.equal(a, b), (key, name)
            if key[1] not in ("k", "v"):
                assert torch.equal(table.outer[ours.guidance_rows], other.outer[theirs.guidance_rows])
    for record in (graphed.guidance, single.guidance):
        assert (record.audit_of_row >= 0).any()
