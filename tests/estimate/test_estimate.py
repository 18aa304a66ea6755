"""The estimate: totals worked out by hand, the sizes that engine and trainer really have, and the published speeds."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from kernel_path import use_kernels
from trace_lightning.bench.roofline import FORMATS, kv_bytes
from trace_lightning.bench.shapes import SHAPES, NoTokenizer, make_model
from trace_lightning.cli import main
from trace_lightning.estimate.advice import advice, fits, what_to_change
from trace_lightning.estimate.cards import CARDS, find_card
from trace_lightning.estimate.command import plans, read_config
from trace_lightning.estimate.memory import (
    CONTEXT_BYTES,
    fit,
    items,
    kept_snapshot,
    layer_bytes,
    microbatch_tokens,
    peaks,
    pool_bytes,
    record_row_bytes,
    record_tokens,
)
from trace_lightning.estimate.plan import Plan
from trace_lightning.estimate.speed import Span, decode_parts, phases, rows_side_by_side, speedups, step, total, train
from trace_lightning.models.lora import LoraConfig, install_lora
from trace_lightning.models.policy import final_hidden, set_gradient_checkpointing
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.types import Problem, Prompt, SamplingParams

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PARITY = GuidanceConfig(mode="parity")


def make_plan(shape: str = "tiny", recipe: str = "w4a16kv4", guidance: GuidanceConfig | None = None, **more) -> Plan:
    chosen = dataclasses.replace(FORMATS[recipe], guidance=guidance or GuidanceConfig())
    more = ({"new_tokens": 1024} if shape == "tiny" else {}) | more
    return Plan(model=shape, shape=SHAPES[shape], recipe=chosen, card=more.pop("card", CARDS["h200"]), **more)


def sizes(plan: Plan) -> dict[str, float]:
    return {item.name: item.bytes for item in items(plan)}


class TestMemoryByHand:
    """qwen3-8b: 6,945,767,424 weights in linears, 622,329,856 in the head, as many in the embedding."""

    LINEARS, HEAD = 36 * (4096 * 128 * 80 + 3 * 4096 * 12288), 151936 * 4096
    PLAN = make_plan(
        "qwen3-8b", prompts=32, samples=16, prompt_length=512, new_tokens=4096, gradient_checkpointing=True
    )

    def test_trainer(self):
        params, found = self.LINEARS + 2 * self.HEAD, sizes(self.PLAN)
        assert found["master weights"] == found["gradients"] == 4 * params
        assert found["AdamW moments"] == 8 * params
        assert found["weight copies, BF16"] == 2 * (self.LINEARS + self.HEAD)
        tokens = 3 * 4608  # three sequences of 4608 in 16384
        one_layer = 12 * 4096 + 6 * (4096 + 1024 + 12288) + 4 * 32
        assert found["activations kept"] == tokens * (one_layer + 36 * 4 * 4096 + 16 * 4096)

    def test_rollout(self):
        found = sizes(self.PLAN)
        assert found["snapshot, BF16 linears"] == 2 * self.LINEARS
        assert found["snapshot, packed linears"] == 0.5625 * self.LINEARS
        assert found["snapshot, embedding and head"] == (4 + 2) * self.HEAD
        free = 139 * 2**30 - 1.5e9 - 4 * (self.LINEARS + 2 * self.HEAD) - 2.5625 * self.LINEARS - 6 * self.HEAD
        assert found["KV pool"] == pytest.approx(0.4 * free)
        assert fit(self.PLAN, 4096) == int(0.4 * free / (41472 * (4096 + 32 + 64)))

    @pytest.mark.parametrize(("kept", "linear"), [("bf16", 2), ("fp8", 1)])
    def test_a_reference_is_held_in_every_phase_and_costs_a_forward_pass(self, kept, linear):
        plan = dataclasses.replace(self.PLAN, reference=kept, kv_cache_tokens=1024)
        without = dataclasses.replace(plan, reference="none")
        size = linear * self.LINEARS + 2 * 2 * self.HEAD
        assert sizes(plan)[f"reference, {kept.upper()}"] == size
        assert all(peaks(plan)[phase] - peaks(without)[phase] == size for phase in peaks(plan))
        smaller = sizes(dataclasses.replace(self.PLAN, reference=kept))["KV pool"]
        assert sizes(self.PLAN)["KV pool"] - smaller == pytest.approx(0.4 * size)
        assert (
            train(plan)["train"] == train(dataclasses.replace(without, num_minibatches=2))["train"]
        )  # as old log-probs

    def test_bf16_masters_halve_the_trainer(self):
        mixed, true = sizes(self.PLAN), sizes(dataclasses.replace(self.PLAN, precision="bf16-true"))
        for name in ("master weights", "gradients", "AdamW moments"):
            assert true[name] == mixed[name] / 2
        assert true["snapshot, embedding and head"] == 4 * self.HEAD
        assert true["weight copies, BF16"] == 2 * self.LINEARS  # what QAT rounds; the head is read as it is

    def test_peaks_add_up_what_exists(self):
        plan = dataclasses.replace(self.PLAN, keep_snapshot=False)
        found, peak = sizes(plan), peaks(plan)
        held = 16 * plan.shape.params + CONTEXT_BYTES
        assert peak["step"] == held
        assert peak["train"] - held == pytest.approx(
            found["weight copies, BF16"]
            + found["activations kept"]
            + found["activations in work"]
            + found["logits of a chunk"]
        )
        assert peaks(self.PLAN)["step"] - sizes(self.PLAN)["KV pool"] > peak["step"]

    def test_drawing_while_the_trainer_works_adds_both_sides_up(self):
        """The engine's work is there in training too, a second record is written, and every FP4 site is recorded."""
        plan = make_plan("qwen3-8b", "w4a4kv4", PARITY, max_version_diff=1)
        narrow = dataclasses.replace(plan, max_version_diff=0)
        wide = dataclasses.replace(plan.recipe.guidance, sites=("attn_in", "o_in", "mlp_in", "down_in", "k", "v"))
        before = dataclasses.replace(narrow, recipe=dataclasses.replace(plan.recipe, guidance=wide))
        assert plan.guided_sites == before.guided_sites != narrow.guided_sites
        work, record = (sizes(before)[name] for name in ("prefill or logits in work", "guidance record"))
        assert peaks(plan)["train"] - peaks(before)["train"] == pytest.approx(work + record)
        assert peaks(plan)["rollout"] - peaks(before)["rollout"] == pytest.approx(record)
        with pytest.raises(ValueError, match="max_version_diff=1 draws while"):
            dataclasses.replace(plan, keep_snapshot=False)

    def test_gpus_split_the_prompts_and_add_buckets(self):
        four = dataclasses.replace(self.PLAN, gpus=4)
        assert (four.own_prompts, four.sequences) == (8, 128)
        assert sizes(four)["DDP buckets"] == 4 * four.shape.params
        assert "DDP buckets" not in sizes(self.PLAN)

    def test_a_micro_batch_holds_one_sequence_at_least(self):
        assert microbatch_tokens(dataclasses.replace(self.PLAN, max_tokens_per_microbatch=100)) == 4608
        assert microbatch_tokens(dataclasses.replace(self.PLAN, prompts=1, samples=2)) == 2 * 4608


class TestGuidance:
    @pytest.mark.parametrize(("recipe", "published"), [("w4a16kv4", 10_752), ("w4a4kv4", 32_592)])
    def test_bytes_per_token_of_the_1_7b_shape(self, recipe, published):
        assert record_row_bytes(make_plan("qwen3-1.7b", recipe, PARITY)) == published  # docs/results/h200.md

    @pytest.mark.parametrize("exclude", [["[qkv]_proj"], ["mlp.(gate|up)"], ["0.mlp"]], ids=str)
    def test_what_excluded_linears_feed_is_in_the_record(self, exclude):
        plan = make_plan("tiny", "w4a4kv4", PARITY)
        plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, exclude=exclude))
        assert run_engine(plan)._sites == plan.guided_sites

    @pytest.mark.parametrize("recipe", ["w4a16kv4", "w4a4kv4", "w4a4kv4-mxfp4"])
    @pytest.mark.parametrize(
        "guidance",
        [
            PARITY,
            GuidanceConfig(mode="full", scales="parity"),
            GuidanceConfig(mode="parity", sites=["k", "v"], layers="last:1"),
        ],
    )
    def test_the_engine_records_so_many_bytes(self, recipe, guidance):
        plan = make_plan("tiny", recipe, guidance, prompts=2, samples=2, prompt_length=5, new_tokens=4)
        engine = run_engine(plan)
        generation = engine.generate(
            prompts_of(plan), SamplingParams(max_new_tokens=4), num_samples=2, record_guidance=True
        )
        record = generation.guidance
        assert engine._sites == plan.guided_sites
        # Tables are columns of one matrix or two (K and V have their own), whose rows are padded.
        rows = {table.codes.untyped_storage().data_ptr(): table.codes.stride(0) for table in record.tables.values()}
        assert sum(rows.values()) == record_row_bytes(plan) >= record.bytes_per_token
        # The last token of a completion is never fed: `record_tokens` counts it, as the engine's own check does.
        assert record.num_rows == record_tokens(plan, 4 - 1)

    def test_where_the_record_lies(self):
        device = make_plan("qwen3-1.7b", "w4a4kv4", PARITY)
        host = make_plan("qwen3-1.7b", "w4a4kv4", GuidanceConfig(mode="parity", store="host"))
        assert sizes(device)["guidance record"] == sizes(host)["guidance record"]
        moved = peaks(device)["train"] - peaks(host)["train"]
        assert moved == pytest.approx(sizes(device)["guidance record"])
        assert sizes(host)["guidance, window of steps"] > 0

    def test_without_guidance_there_is_none(self):
        assert record_row_bytes(make_plan()) == 0
        assert not any(name.startswith("guidance") for name in sizes(make_plan()))


def run_engine(plan: Plan, **settings) -> LocalEngine:
    masters = torch.float32 if plan.master_bytes == 4 else torch.bfloat16
    policy = make_model(plan.shape, None, CPU).to(masters)
    engine = LocalEngine(page_size=plan.page_size, max_num_seqs=plan.max_num_seqs, verify=False, **settings)
    engine.setup(policy, NoTokenizer(), plan.recipe, dtype=torch.bfloat16)
    engine.load_weights(policy.named_parameters(), version=0)
    return engine


def prompts_of(plan: Plan) -> list[Prompt]:
    ids = list(range(1, 1 + plan.prompt_length))
    return [Prompt(token_ids=ids, problem=Problem(prompt=""), uid=i) for i in range(plan.own_prompts)]


class TestAgainstTheEngine:
    @pytest.mark.parametrize("recipe", ["bf16", "kv8", "w4a16kv4", "w4a16kv4-mxfp4"])
    def test_kv_pool(self, recipe):
        plan = make_plan("tiny", recipe, prompts=2, samples=2, prompt_length=12, new_tokens=4, page_size=16)
        engine = run_engine(plan)
        engine.generate(prompts_of(plan), SamplingParams(max_new_tokens=4), num_samples=2)
        assert engine._workspace.kv.nbytes == pool_bytes(plan)
        assert engine._workspace.kv.nbytes == kv_bytes(plan.shape, plan.recipe) * (4 + 2) * (12 + 4 + 16)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    @pytest.mark.parametrize("tied", [True, False])
    def test_snapshot(self, precision, tied):
        plan = make_plan(precision=precision)
        plan = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, tied=tied))
        decoder = run_engine(plan).decoder
        held = {id(decoder.embedding): decoder.embedding.nbytes, id(decoder.head): decoder.head.nbytes}
        for linear in (linear for layer in decoder.layers for linear in layer.linears):
            held[id(linear)] = linear.weight.nbytes + linear.packed.qdata.nbytes + linear.packed.scale.nbytes
        assert sum(held.values()) == kept_snapshot(plan)


def kept_by_autograd(plan: Plan, tokens: int) -> int:
    """Bytes of distinct tensors that a trainer's forward saves, parameters not counted."""
    mixed = plan.master_bytes == 4
    model = make_model(plan.shape, None, CPU).to(torch.float32 if plan.stream_bytes == 4 else torch.bfloat16).train()
    install_qat(model, plan.recipe.trained)
    if plan.lora_rank:
        install_lora(model, LoraConfig(rank=plan.lora_rank, rollout=plan.lora_rollout), plan.recipe)
    set_gradient_checkpointing(model, plan.gradient_checkpointing)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=mixed), model.trace_qat.cache_weights():
        final_hidden(model, torch.zeros(1, tokens, dtype=torch.int64))
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


class TestAdapters:
    """qwen3-1.7b at rank 16: what both sides hold, counted by hand and against what engine and trainer have."""

    def test_by_hand(self):
        found = sizes(plan := make_plan("qwen3-1.7b", lora_rank=16))
        linears, head = 28 * (2048 * 128 * 48 + 3 * 2048 * 6144), 151936 * 2048
        adapters = 28 * 16 * ((2048 + 2048) + 2 * (2048 + 1024) + (2048 + 2048) + 3 * (2048 + 6144))
        assert plan.trained_params == adapters
        assert found["frozen base"] == 0.5625 * linears + 2 * head
        assert found["adapters"] == found["gradients"] == found["AdamW moments"] / 2 == 4 * adapters
        assert found["weight copies, BF16"] == found["snapshot, a linear unpacked"] == 2 * 2048 * 2 * 6144
        assert not [name for name in found if name.startswith("snapshot, BF16") or "reference" in name]
        merged = sizes(dataclasses.replace(plan, lora_rollout="merged", reference="bf16"))
        assert merged["frozen base"] == 2 * (linears + head)
        assert merged["snapshot, packed linears"] == 0.5625 * linears
        assert not any("reference" in name for name in merged)

    @pytest.mark.parametrize("recipe", ["bf16", "w4a16kv4", "w4a16kv4-mxfp4"])
    def test_engine_and_policy(self, recipe):
        plan = make_plan(recipe=recipe, lora_rank=8)
        model = make_model(plan.shape, None, CPU)
        install_qat(model, plan.recipe.trained)
        install_lora(model, LoraConfig(rank=8), plan.recipe)
        engine = LocalEngine()
        engine.setup(model, NoTokenizer(), plan.recipe, dtype=torch.bfloat16)
        linears = [linear for layer in engine.decoder.layers for linear in layer.linears]
        assert sum(linear.a.nbytes + linear.b.nbytes for linear in linears) == kept_snapshot(plan)
        bases = [linear.base for linear in linears]
        held = sum(
            sum(t.nbytes for name, t in base.packed_tensors().items() if name != "outer_scale")
            if isinstance(base, PackedFP4Tensor)
            else base.nbytes
            for base in bases
        )
        assert held + model.get_input_embeddings().weight.nbytes == sizes(plan)["frozen base"]
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plan.trained_params

    def test_a_config_is_read(self, tmp_path):
        content = {"model": {"path": "builtin:tiny-qwen3", "lora": {"rollout": "merged"}}}
        (tmp_path / "lora.yaml").write_text(yaml.safe_dump(content))
        found = read_config(tmp_path / "lora.yaml")
        assert (found["lora_rank"], found["lora_rollout"]) == (16, "merged")
        with pytest.raises(ValueError, match="expected adapter or merged"):
            make_plan(lora_rank=4, lora_rollout="both")
        with pytest.raises(ValueError, match="fp8 keeps no packed form"):  # as `fit` says
            dataclasses.replace(make_plan(lora_rank=4), recipe=QuantRecipe(weights="fp8"))

    def test_a_step_costs_less(self):
        full, adapted = make_plan("qwen3-1.7b"), make_plan("qwen3-1.7b", lora_rank=16)
        assert train(adapted)["train"].slow < 0.8 * train(full)["train"].slow
        assert train(adapted)["optimizer"].slow < 0.02 * train(full)["optimizer"].slow
        before, after = (total(decode_parts(plan, plan.recipe, 64, 8192)) for plan in (full, adapted))
        assert after.fast > before.fast
        assert max(peaks(adapted).values()) < 0.75 * max(peaks(full).values())

    def test_the_table_of_sizes(self, monkeypatch, capsys, tmp_path):
        """A dash where full training does not fit and adapters do; more memory never holds fewer sequences."""
        batch = ["--prompts", "8", "--new_tokens", "1024", "--gradient_checkpointing", "--store", "host"]
        arguments = ["--lora_rank", "16", "--sizes", "24", "80", "--json", str(tmp_path / "sizes.json"), *batch]
        monkeypatch.setattr(sys, "argv", ["trace-fit", "estimate", *arguments])
        main()
        lines = [line for line in capsys.readouterr().out.splitlines() if "qwen3-8b" in line]
        assert len(lines) == 2
        assert [cell.strip() for cell in lines[0].split("│")[3:5]] == ["-", "-"]
        (rows,) = json.loads((tmp_path / "sizes.json").read_text())["recipes"].values()
        assert len(rows) == 8
        for row in rows:
            small, large = row["sizes"]
            assert small["sequences"] <= large["sequences"]
            assert small["fits"] <= large["fits"]
        assert rows[-1]["sizes"][1]["fits"]


class TestActivations:
    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, monkeypatch):
        use_kernels(monkeypatch)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    @pytest.mark.parametrize("recipe", ["bf16", "w4a16kv4", "w4a4kv4"])
    def test_a_layer_keeps_so_many_bytes_per_token(self, precision, recipe):
        plan = make_plan(recipe=recipe, precision=precision)
        assert self.per_layer(plan) == layer_bytes(plan)

    @pytest.mark.parametrize("rollout", ["adapter", "merged"])
    @pytest.mark.parametrize("recipe", ["bf16", "w4a16kv4", "w4a4kv4"])
    def test_with_adapters_it_keeps_less(self, recipe, rollout):
        plan = make_plan(recipe=recipe, lora_rank=8, lora_rollout=rollout)
        assert self.per_layer(plan) == layer_bytes(plan)

    @pytest.mark.parametrize(("precision", "width"), [("bf16-mixed", 4), ("bf16-true", 2)])
    def test_with_checkpointing_a_layer_keeps_its_input(self, precision, width):
        plan = make_plan(precision=precision, gradient_checkpointing=True)
        assert self.per_layer(plan) == width * plan.shape.hidden

    @staticmethod
    def per_layer(plan: Plan) -> float:
        def of(layers: int) -> float:
            part = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, layers=layers))
            return (kept_by_autograd(part, 16) - kept_by_autograd(part, 8)) / 8  # weights do not grow with tokens

        return of(2) - of(1)


class TestSpeed:
    # "Where a decode step's time goes" in docs/results/h200.md: 64 sequences of 8192 tokens, ms
    MEASURED = (
        ("qwen3-8b", "bf16", 23.05),
        ("qwen3-8b", "w4a16kv4", 12.30),
        ("qwen3-8b", "w4a4kv4", 12.48),
        ("qwen3-1.7b", "bf16", 15.55),
        ("qwen3-1.7b", "w4a16kv4", 7.55),
    )

    @pytest.mark.parametrize(("shape", "recipe", "ms"), MEASURED)
    def test_the_range_holds_the_published_step(self, shape, recipe, ms):
        plan = make_plan(shape, recipe)
        span = total(decode_parts(plan, plan.recipe, 64, 8192))
        assert span.fast <= ms * 1e-3
        assert ms * 1e-3 <= span.slow <= 1.3 * ms * 1e-3

    @pytest.mark.parametrize(
        ("shape", "rows", "context", "ratio"),
        [("qwen3-8b", (22, 78), 32768, 2.35), ("qwen3-0.6b", (16, 16), 2048, 1.17), ("qwen3-8b", (64, 64), 8192, 1.87)],
    )
    def test_the_range_holds_the_published_gain(self, shape, rows, context, ratio):
        plan = make_plan(shape)
        before, after = (
            total(decode_parts(plan, recipe, count, context)) * (1 / count)
            for recipe, count in zip((QuantRecipe(), plan.recipe), rows, strict=True)
        )
        low, high = before.over(after)
        assert low <= ratio <= high

    def test_training_operations(self):
        plan = make_plan("qwen3-8b", prompts=2, samples=2, prompt_length=100, new_tokens=300)
        linears, head = TestMemoryByHand.LINEARS, TestMemoryByHand.HEAD
        forward = 2 * linears * 400 + 2 * 36 * 4096 * 400**2
        operations = 4 * (3 * forward + 8 * head * 300)
        assert train(plan)["train"].fast == pytest.approx(operations / (0.5 * 785e12))
        again = dataclasses.replace(plan, gradient_checkpointing=True)
        extra = train(again)["train"].fast - train(plan)["train"].fast
        assert extra == pytest.approx(4 * forward / (0.5 * 785e12))

    def test_a_tail_only_widens(self):
        plan = make_plan("qwen3-8b", new_tokens=4096)
        short = dataclasses.replace(plan, mean_new_tokens=1000)
        assert phases(plan)["decode"].slow / phases(plan)["decode"].fast < 2
        longer = phases(dataclasses.replace(short, new_tokens=8192))["decode"]
        assert longer.slow > phases(short)["decode"].slow

    def test_speedups_of_equal_recipes_hold_one(self):
        plan = make_plan("qwen3-8b", "bf16")
        for low, high in speedups(plan, plan).values():
            assert low < 1 < high
        batch = {"prompt_length": 512, "new_tokens": 30000}  # K and V decide, and FP4 has more seats
        ratios = speedups(make_plan("qwen3-8b", "bf16", **batch), make_plan("qwen3-8b", **batch))
        assert ratios["rollout"][1] > ratios["rollout"][0] > 1.5
        assert 1 < ratios["step"][0] < ratios["rollout"][0]

    @pytest.mark.parametrize(("samples", "longer"), [(1, "rollout"), (64, "training")])
    def test_one_rollout_ahead_the_longer_side_decides_at_best(self, samples, longer):
        batch = {"prompts": 1, "samples": samples, "prompt_length": 512, "new_tokens": 2048}
        plan, ahead = make_plan("qwen3-1.7b", **batch), make_plan("qwen3-1.7b", max_version_diff=1, **batch)
        assert step(plan) == total(phases(plan))
        fast = {name: span.fast for name, span in phases(ahead).items()}
        sides = {"training": fast["train"] + fast["optimizer"], "rollout": fast["prefill"] + fast["decode"]}
        assert max(sides, key=sides.get) == longer
        assert step(ahead).fast == pytest.approx(fast["sync"] + sides[longer])
        assert step(ahead).slow == pytest.approx(total(phases(ahead)).slow)
        plain = make_plan("qwen3-1.7b", "bf16", max_version_diff=1, **batch)
        (low, high), turn = speedups(plain, ahead)["step"], speedups(plain, plan)["step"]
        assert low <= turn[0]
        assert high >= turn[1]

    def test_sums(self):
        assert total({"a": Span(1, 2), "b": Span(3, 5)}) == Span(4, 7)
        assert Span(4, 6).over(Span(2, 3)) == (4 / 3, 3)

    def test_all_seats_are_taken_where_they_fit(self):
        assert rows_side_by_side(make_plan(prompts=4, samples=4)) == 16
        assert rows_side_by_side(make_plan(prompts=4, samples=4, max_num_seqs=3)) == 3


class TestAdvice:
    def test_fits(self):
        plan = make_plan("qwen3-0.6b", prompts=8, samples=8, prompt_length=256, new_tokens=512)
        assert fits(plan)
        assert not any("does not fit" in text for text in advice(make_plan("qwen3-0.6b", "bf16"), plan))

    def test_the_first_change_is_enough(self):
        plan = make_plan("qwen3-4b", prompts=8, samples=8, prompt_length=256, new_tokens=1024)
        assert not fits(plan)
        changes = what_to_change(plan)
        assert changes == ["model.max_tokens_per_microbatch=1280"]
        assert any(changes[0] in text for text in advice(plan, plan))
        assert fits(dataclasses.replace(plan, max_tokens_per_microbatch=1280))

    def test_bf16_masters_are_the_last_resort(self):
        batch = {"prompts": 8, "samples": 8, "prompt_length": 256, "new_tokens": 1024}
        several = what_to_change(make_plan("qwen3-4b", card=CARDS["a100"], **batch))
        assert len(several) > 1
        assert not any("precision" in words for words in several)
        assert any("precision=bf16-true" in words for words in what_to_change(make_plan("qwen3-8b", **batch)))

    def test_small_models_are_launches(self):
        said = advice(make_plan(recipe="bf16"), make_plan())
        assert any("launches" in text for text in said)

    def test_a_model_that_cannot_fit(self):
        plan = make_plan("qwen3-8b", card=CARDS["rtx5090"])
        assert what_to_change(plan) == []
        assert any("no setting is enough" in text for text in advice(plan, plan))

    def test_fp4_gains_little_where_linears_decide(self):
        batch = {"prompts": 16, "samples": 16, "prompt_length": 128, "new_tokens": 256}
        said = advice(make_plan("qwen3-8b", "bf16", **batch), make_plan("qwen3-8b", "w4a4kv4", PARITY, **batch))
        assert any("gain little" in text for text in said)
        assert any("activations make nothing faster" in text for text in said)


class TestCards:
    def test_other_cards_reach_the_share_of_the_h200(self):
        assert CARDS["h100"].limits.matmul_rate == pytest.approx(785e12)
        assert CARDS["h100"].limits.bandwidth == pytest.approx(3.35e12 * 4.29 / 4.8)

    def test_own_card(self):
        card = find_card("mine", 24, 1.0, 100)
        assert (card.memory, card.limits.bandwidth, card.limits.matmul_rate) == (24e9, 1e12, 100e12)
        assert find_card("a100", memory_gb=40).memory == 40e9
        assert find_card("a100", memory_gb=40).limits == CARDS["a100"].limits

    def test_an_unknown_card_names_near_ones_and_the_flags(self):
        with pytest.raises(ValueError, match="did you mean h200 or h100") as caught:
            find_card("h300")
        assert "--memory_gb, --bandwidth_tbs, --bf16_tflops" in str(caught.value)
        with pytest.raises(ValueError, match="above 0"):
            find_card("h200", memory_gb=0)


class TestCommand:
    def run(self, monkeypatch, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["trace-fit", "estimate", *arguments])
        main()

    def test_tables_and_json(self, tmp_path, monkeypatch, capsys):
        path = tmp_path / "out" / "estimate.json"
        batch = ["--prompts", "16", "--samples", "8", "--new_tokens", "1024", "--mean_new_tokens", "600"]
        wanted = ["--shape", "qwen3-1.7b", "--recipe", "w4a16kv4", "w4a4kv4", "--card", "a100"]
        self.run(monkeypatch, *wanted, *batch, "--store", "host", "--json", str(path))
        printed = capsys.readouterr().out
        for text in ("PEAK in train", "Seconds per step", "Estimated, not measured", "data sheet", "host"):
            assert text in printed
        content = json.loads(path.read_text())
        plain, first, second = content["recipes"]
        assert (plain["recipe"], plain["speedup"]) == ("W16A16KV16", {})
        assert first["recipe"] == "W4A16KV4/nvfp4+parity"
        assert second["guidance_bytes_per_token"] == 32_592
        for column in (plain, first, second):
            on_card = sum(n for name, n in column["memory"].items() if column["side"].get(name) != "host")
            assert max(column["peaks"].values()) <= on_card
            assert column["step_seconds"] == pytest.approx(
                [sum(span[i] for span in column["seconds"].values()) for i in (0, 1)]
            )
        assert first["speedup"]["rollout"][0] > 0.8

    def test_a_shorter_record(self, monkeypatch, capsys):
        """A third of a bit and the parity of the scales; what it takes the trainer is told not to be counted."""
        self.run(monkeypatch, "--shape", "qwen3-1.7b", "--guidance", "syndrome", "--scales", "parity")
        printed = capsys.readouterr().out
        assert "2,912" in printed
        assert "trainer: search for bits" in printed
        assert "search for the bits (guidance.mode=syndrome) is not counted" in " ".join(printed.split())

    def test_bits_that_wait_for_recomputation(self):
        """A byte for eight elements of each guided site: K and V of 28 layers, 8 heads of 128."""
        plan = make_plan("qwen3-1.7b", guidance=GuidanceConfig(mode="syndrome"), gradient_checkpointing=True)
        assert sizes(plan)["bits found, kept"] == microbatch_tokens(plan) * 28 * 2 * 8 * 128 / 8
        wide = sizes(dataclasses.replace(plan, recipe=dataclasses.replace(FORMATS["w4a4kv4"], guidance=plan.guidance)))
        assert wide["bits found, kept"] == microbatch_tokens(plan) * 28 * 3 * 2048 / 8
        for other in (dataclasses.replace(plan, gradient_checkpointing=False), make_plan("qwen3-1.7b")):
            assert "bits found, kept" not in sizes(other)

    def test_a_config_is_read_and_options_win(self):
        config = str(ROOT / "configs" / "grpo_fp4_qwen3_0.6b.yaml")
        (plain, plan), _ = plans(["--config", config, "--shape", "qwen3-0.6b", "--samples", "4"])
        assert (plan.prompts, plan.samples, plan.prompt_length, plan.new_tokens) == (32, 4, 1024, 1024)
        assert plan.gradient_checkpointing
        assert plan.max_tokens_per_microbatch == 32768
        assert plan.recipe.label == "W4A16KV4/nvfp4+parity"
        assert plan.guided_sites.keys() == {(layer, site) for layer in range(28) for site in ("k", "v")}
        assert (plain.recipe, plain.samples) == (QuantRecipe(), 4)

    def test_a_conversation_takes_what_all_its_turns_may(self):
        assert read_config(ROOT / "configs" / "grpo_tools.yaml")["new_tokens"] == 32

    def test_a_model_from_its_directory(self):
        (_, plan), _ = plans(["--model.path", "builtin:tiny-qwen3", "--prompt_length", "16", "--new_tokens", "32"])
        assert plan.shape.hidden > 0
        assert plan.model == "builtin:tiny-qwen3"

    def test_config_with_engine_settings_and_devices(self, tmp_path):
        path = tmp_path / "config.yaml"
        engine = {"class_path": "LocalEngine", "init_args": {"memory_fraction": 0.3, "keep_snapshot": False}}
        rollout = {"engine": engine, "max_version_diff": 0}
        content = {"trainer": {"devices": 2}, "data": {"batch_size": 8}, "rollout": rollout}
        path.write_text(yaml.safe_dump(content | {"recipe": str(ROOT / "configs" / "recipes" / "blackwell.yaml")}))
        found = read_config(path)
        assert (found["gpus"], found["prompts"], found["memory_fraction"]) == (2, 16, 0.3)
        assert (found["keep_snapshot"], found["max_version_diff"]) == (False, 0)
        assert "reference" not in found
        loss = {"class_path": "GRPO", "init_args": {"beta": 0.1}}
        path.write_text(yaml.safe_dump(content | {"model": {"loss": loss}}))
        assert read_config(path)["reference"] == "bf16"
        path.write_text(yaml.safe_dump(content | {"model": {"loss": loss, "reference": {"dtype": "fp8"}}}))
        assert read_config(path)["reference"] == "fp8"
        assert found["recipe"].guided_sites == ("attn_in", "o_in", "mlp_in")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--shape", "qwen3-8"], "did you mean qwen3-8b"),
            (["--recipe", "w4a16kv"], "unknown format"),
            (["--card", "h10"], "h100"),
            (["--prompts", "0"], "--prompts 0"),
            (["--mean_new_tokens", "5000"], "exceeds --new_tokens 4096"),
            (["--new_tokens", "100000"], "exceed the context"),
            (["--precision", "32-true"], "bf16-mixed, bf16-true"),
            (["--memory_fraction", "2"], "memory_fraction"),
            (["--config", "nowhere.yaml"], "there is no file"),
            (["--recipe", "w4", "--guidance", "parity"], "nothing can be guided"),
        ],
    )
    def test_bad_input_says_what_is_wrong(self, arguments, message, monkeypatch, capsys):
        with pytest.raises(SystemExit) as caught:
            self.run(monkeypatch, *arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err

    def test_an_unknown_option_of_a_recipe(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text("recipe: {wieghts: nvfp4}\n")
        with pytest.raises(ValueError, match="wieghts"):
            read_config(path)
        path.write_text("- a list\n")
        with pytest.raises(ValueError, match="holds no settings"):
            read_config(path)
