"""The record of the rollout's rounding, and what following it does to the trainer's (TRACE, arXiv 2610.07767)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from tiny import Scorer, make_engine, make_model, make_policy, make_prompts, perturbed, rollout_logprobs, sampling
from trace_kernels import MXFP4, NVFP4, Quantized, get_format, pack_bits, unpack_bits, unpack_codes
from trace_kernels import formats as F4
from trace_kernels.round_values import Guide, guided_codes
from trace_kernels.syndromes import encode
from trace_lightning.models.policy import final_hidden
from trace_lightning.probe.agreement import full_record, restrict
from trace_lightning.quantization.guidance import AUDIT_SUMS, GuidanceRecord, GuidanceRows, MismatchCounts, SiteTable
from trace_lightning.quantization.record_budget import check_budget
from trace_lightning.quantization.record_layout import SiteShape
from trace_lightning.quantization.recorder import GuidanceRecorder
from trace_lightning.quantization.rounding import NEAREST, GuidedRounding
from trace_lightning.recipe import SITES, GuidanceConfig, QuantRecipe
from trace_lightning.rollout import engine as engines

CPU = torch.device("cpu")
PROMPTS = make_prompts(5, 17, 31)


def recipe_of(fmt: Any = "nvfp4", **guidance: Any) -> QuantRecipe:
    config = GuidanceConfig(**({"mode": "full", "sites": list(SITES)} | guidance))
    return QuantRecipe(weights=fmt, activations=fmt, kv_cache=fmt, guidance=config)


def record_of(
    config: GuidanceConfig, passes: list[Quantized], audited: list[list[bool]] | None = None
) -> GuidanceRecord:
    """The record of one linear site of layer 0 over some forward passes."""
    fmt = MXFP4() if passes[0].outer is None else NVFP4()
    recorder = GuidanceRecorder(config, {(0, "attn_in"): SiteShape(fmt, passes[0].width)}, CPU)
    for i, q in enumerate(passes):
        picked = torch.tensor(audited[i]) if audited else torch.zeros(len(q.codes), dtype=torch.bool)
        _, views = recorder.begin(picked, CPU)
        views.add(0, "attn_in", q)
        recorder.end()
    return recorder.finish(policy_version=7)


class TestRecord:
    @pytest.mark.parametrize("mode", ["parity", "full", "syndrome"])
    @pytest.mark.parametrize("scales", ["whole", "parity"])
    @pytest.mark.parametrize("fmt", [NVFP4(), MXFP4()])
    def test_rows_hold_what_was_added(self, fmt: Any, scales: Any, mode: Any) -> None:
        passes = [fmt.quantize(torch.randn(n, 80)) for n in (3, 1, 5)]
        record = record_of(GuidanceConfig(mode=mode, scales=scales), passes)
        assert (record.num_rows, record.policy_version) == (9, 7)
        table = record.tables[0, "attn_in"]
        codes, scale = (torch.cat([getattr(q, name) for q in passes]) for name in ("codes", "scale"))
        if mode == "full":
            assert_bit_equal(unpack_codes(table.codes), codes)
        elif mode == "syndrome":
            assert_bit_equal(table.codes, encode(pack_bits(codes & 1), codes.shape[1]))
        else:
            assert_bit_equal(unpack_bits(table.codes, codes.shape[1]), codes & 1)
        if scales == "whole":
            assert_bit_equal(table.scale, scale)
        else:
            assert_bit_equal(unpack_bits(table.scale, scale.shape[1]), scale & 1)
        if fmt.has_outer:
            assert table.outer is not None
            assert_bit_equal(table.outer, torch.cat([q.outer for q in passes]).squeeze(-1))

    @pytest.mark.parametrize("word", [{"mode": "syndromes"}, {"scales": "bits"}, {"store": "cpu"}], ids=str)
    def test_unknown_words_are_named(self, word: Any) -> None:
        """A config file's are refused by its types; in Python they would have been taken for a default."""
        with pytest.raises(ValueError, match=rf"guidance\.{next(iter(word))}=.*choose one of"):
            GuidanceConfig(**word)

    def test_a_search_is_not_left_unwatched(self) -> None:
        with pytest.raises(ValueError, match=r"audit_sequences=0 would hide"):
            GuidanceConfig(mode="syndrome", audit_sequences=0)

    def test_audited_rows_keep_full_codes(self) -> None:
        passes = [NVFP4().quantize(torch.randn(n, 32)) for n in (3, 2)]
        record = record_of(GuidanceConfig(mode="parity"), passes, [[True, False, True], [False, True]])
        assert record.audit_of_row.tolist() == [0, -1, 1, -1, 2]
        audit = record.tables[0, "attn_in"].audit
        assert audit is not None
        assert_bit_equal(unpack_codes(audit), torch.cat([q.codes for q in passes])[[0, 2, 4]])

    def test_recorder_is_empty_after_finish(self) -> None:
        recorder = GuidanceRecorder(GuidanceConfig(mode="full"), {(0, "attn_in"): SiteShape(NVFP4(), 32)}, CPU)
        for _ in range(2):
            rows, views = recorder.begin(torch.zeros(2, dtype=torch.bool), CPU)
            assert rows.tolist() == [0, 1]
            views.add(0, "attn_in", NVFP4().quantize(torch.randn(2, 32)))
            recorder.end()
            assert recorder.finish(0).num_rows == 2

    def test_foreign_record_is_refused(self) -> None:
        record = record_of(GuidanceConfig(mode="full"), [NVFP4().quantize(torch.randn(4, 32))])
        with pytest.raises(ValueError, match="row 4, but the record of policy version 7 has 4 rows"):
            GuidanceRows.from_rows(record, torch.tensor([[0, 4], [1, -1]]), CPU)

    @pytest.mark.parametrize(
        ("guidance", "expected"),
        [
            # A linear site costs K / 8 parity bits (or K / 2 codes), K / 16 scale bytes, and 4 bytes of outer scale.
            ({"sites": ["attn_in"], "mode": "parity"}, 2 * (8 + 4 + 4)),
            ({"sites": ["attn_in"], "mode": "full"}, 2 * (32 + 4 + 4)),
            ({"sites": ["attn_in"], "mode": "full", "scales": "parity"}, 2 * (32 + 1 + 4)),
            ({"sites": ["o_in"], "mode": "parity"}, 2 * (16 + 8 + 4)),
            ({"sites": ["down_in"], "mode": "parity", "layers": "last:1"}, 12 + 6 + 4),
            # K and V: 2 heads of 32, whose outer scales come from the weights and cost nothing.
            ({"sites": ["k", "v"], "mode": "parity"}, 2 * 2 * 2 * (4 + 2)),
            ({"sites": None, "mode": "parity"}, 2 * (16 + 28 + 16)),
            # 64 bits have 22 + 6 checks; those of K and V go over both heads.
            ({"sites": ["attn_in", "k"], "mode": "syndrome", "scales": "parity"}, 2 * ((4 + 1 + 4) + (4 + 2))),
        ],
    )
    @pytest.mark.parametrize("lengths", [(5, 17, 31), (2,)])  # two rows must not be taken for two heads
    def test_bytes_per_token(self, guidance: Any, expected: float, lengths: tuple[int, ...]) -> None:
        recipe = recipe_of(**guidance)
        engine = make_engine(make_model("qwen3"), recipe)
        generation = engine.generate(make_prompts(*lengths), sampling(max_new_tokens=1), record_guidance=True)
        assert generation.guidance is not None
        assert generation.guidance.bytes_per_token == expected


class TestRowsOfARollout:
    @pytest.mark.parametrize("max_num_seqs", [2, 64])
    def test_every_fed_token_has_its_row_and_groups_share_the_prompts(self, max_num_seqs: int) -> None:
        recipe = recipe_of()
        engine = make_engine(make_model("qwen3"), recipe, max_num_seqs=max_num_seqs)
        generation = engine.generate(PROMPTS, sampling(), num_samples=3, record_guidance=True)
        assert generation.guidance is not None
        fresh: list[int] = []
        for i, prompt in enumerate(PROMPTS):
            group, length = generation.completions[3 * i : 3 * i + 3], len(prompt.token_ids)
            rows = [completion.guidance_rows for completion in group]
            assert all(
                r is not None and len(r) == length + len(c.token_ids) - 1 for r, c in zip(rows, group, strict=True)
            )
            assert all(torch.equal(r[:length], rows[0][:length]) for r in rows)  # type: ignore[index]
            fresh += rows[0][:length].tolist() + torch.cat([r[length:] for r in rows]).tolist()  # type: ignore[index]
        assert sorted(fresh) == list(range(generation.guidance.num_rows)), "each token was fed once"

    def test_only_the_first_sample_of_the_first_prompts_is_audited(self) -> None:
        engine = make_engine(make_model("qwen3"), recipe_of(audit_sequences=2))
        generation = engine.generate(PROMPTS, sampling(), num_samples=2, record_guidance=True)
        audited = generation.guidance.audit_of_row >= 0  # type: ignore[union-attr]
        shares = [audited[c.guidance_rows].double().mean().item() for c in generation.completions]  # type: ignore[index]
        assert shares[0] == shares[2] == 1
        assert 0 < shares[1] < 1, "its prompt is shared with the audited sample"
        assert shares[4] == shares[5] == 0

    @pytest.mark.parametrize(("layers", "expected"), [("all", {0, 1}), ("last_half", {1}), ("last:1", {1})])
    def test_layers(self, layers: str, expected: set[int]) -> None:
        engine = make_engine(make_model("qwen3"), recipe_of(layers=layers))
        assert engine.guidance_keys == {(layer, site) for layer in expected for site in SITES}

    @pytest.mark.parametrize(
        ("exclude", "sites", "layer_0"),
        [
            ([], None, {"attn_in", "o_in", "mlp_in"}),
            (["[qkv]_proj"], None, {"o_in", "mlp_in", "k", "v"}),
            (["up_proj", "gate_proj"], None, {"attn_in", "o_in", "down_in"}),
            ([r"1\.mlp"], None, {"attn_in", "o_in", "mlp_in"}),
            (["[qkv]_proj"], ["o_in", "k"], {"o_in", "k"}),
        ],
        ids=["all", "qkv", "gate-up", "another-layer", "named"],
    )
    def test_what_excluded_linears_feed_is_guided_by_default(self, exclude, sites, layer_0, caplog) -> None:
        engines._warn_once.cache_clear()
        guidance = GuidanceConfig(mode="parity", sites=sites)
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", exclude=exclude, guidance=guidance)
        engine = make_engine(make_model("qwen3"), recipe)
        assert {site for layer, site in engine.guidance_keys if layer == 0} == layer_0
        assert ("guidance.sites leaves out v, fed by linears" in caplog.text) == (sites is not None)

    @pytest.mark.parametrize("layers", ["all", "last_half"])
    @pytest.mark.parametrize("kept", [{"exclude": [r"2\.self_attn\.[qkv]"]}, {"bf16_layers": ["last:1"]}, {}], ids=str)
    def test_a_part_of_a_full_record_is_of_the_same_sites(self, kept, layers) -> None:
        guidance = GuidanceConfig(mode="parity", layers=layers)
        recipe = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4", guidance=guidance, **kept)
        policy = make_policy("qwen3", recipe, num_hidden_layers=4)
        everything = make_engine(policy, full_record(recipe, 2)).generate(PROMPTS, sampling(), record_guidance=True)
        part = restrict(everything.guidance, guidance, policy.trace_qat.layout)
        assert part.tables.keys() == make_engine(policy, recipe).guidance_keys

    def test_a_record_beyond_its_budget_is_refused_before_drawing(self) -> None:
        engine = make_engine(make_model("qwen3"), recipe_of(budget_gb=1e-5))
        with pytest.raises(ValueError, match=r"bytes per token.*budget_gb=1e-05 is 0.0 GB.*guidance.store=host"):
            engine.generate(PROMPTS, sampling(), record_guidance=True)
        engine.generate(PROMPTS, sampling())
        with pytest.raises(ValueError, match="budget_gb=0"):
            recipe_of(budget_gb=0)

    def test_memory_that_torch_holds_unused_is_in_the_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a training step a GPU has little free by its own count, the record of the rollout before among it."""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 10_000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7_000)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4_000)
        config, gpu = GuidanceConfig(mode="parity"), torch.device("cuda")
        check_budget(config, row_bytes=10, most_tokens=400, store=gpu)
        with pytest.raises(ValueError, match="what is free on the GPU"):
            check_budget(config, row_bytes=10, most_tokens=401, store=gpu)

    def test_nothing_to_guide_is_refused(self) -> None:
        recipe = QuantRecipe(
            weights="nvfp4", activations="nvfp4", guidance=GuidanceConfig(mode="full", sites=["mlp_in"])
        )
        with pytest.raises(ValueError, match="quantises nothing there"):
            make_engine(make_model("gpt2"), recipe)

    def test_recording_changes_no_token(self) -> None:
        engine = make_engine(make_model("qwen3"), recipe_of())
        with_record, without = (engine.generate(PROMPTS, sampling(), record_guidance=on) for on in (True, False))
        assert without.guidance is None
        assert [c.logprobs for c in with_record.completions] == [c.logprobs for c in without.completions]


class TestGuidedValues:
    def test_padding_and_unrecorded_sites_round_to_nearest(self) -> None:
        fmt, x = NVFP4(), torch.randn(6, 48)
        record = record_of(GuidanceConfig(mode="full"), [fmt.quantize(x + 0.2 * torch.randn(6, 48))])
        rounding = GuidedRounding(GuidanceRows.from_rows(record, torch.tensor([[0, -1, 2], [-1, 4, -1]]), CPU))
        values, nearest = rounding.values(0, "attn_in", x, fmt), NEAREST.values(0, "attn_in", x, fmt)
        assert_bit_equal(values[[1, 3, 5]], nearest[[1, 3, 5]])
        assert all(not torch.equal(values[i], nearest[i]) for i in (0, 2, 4))
        assert_bit_equal(rounding.values(1, "attn_in", x, fmt), nearest)

    def test_micro_batch_of_padding_alone(self) -> None:
        fmt, x = NVFP4(), torch.randn(4, 48)
        record = record_of(GuidanceConfig(mode="parity", scales="parity"), [fmt.quantize(x)], [[True] * 4])
        rounding = GuidedRounding(GuidanceRows.from_rows(record, torch.full((2, 2), -1), CPU))
        assert_bit_equal(rounding.values(0, "attn_in", x, fmt), NEAREST.values(0, "attn_in", x, fmt))
        assert rounding.rows.mismatch.compute() == {}

    def test_rows_are_looked_up_in_any_order(self) -> None:
        fmt, x = NVFP4(), torch.randn(6, 48)
        record = record_of(GuidanceConfig(mode="full"), [fmt.quantize(x)])
        order = torch.tensor([5, 0, 0, 3])
        rounding = GuidedRounding(GuidanceRows.from_rows(record, order.unsqueeze(0), CPU))
        recorded = fmt.dequantize(fmt.quantize(x))
        assert_bit_equal(rounding.values(0, "attn_in", x[order], fmt), recorded[order])

    def test_mismatch_by_hand(self) -> None:
        """Two rows of 16; the trainer's scale is the rollout's, so codes can be read off the values."""
        fmt = NVFP4()
        rollout, trainer = (torch.full((2, 16), 6.0) for _ in range(2))
        rollout[0, :3] = torch.tensor([1.0, 2.0, 4.0])  # codes 2, 4, 6
        trainer[0, :3] = torch.tensor([1.3, 2.6, 1.6])  # brackets {1, 1.5}, {2, 3}, {1.5, 2}
        record = record_of(GuidanceConfig(mode="full"), [fmt.quantize(rollout)], [[True, True]])
        rows = GuidanceRows.from_rows(record, torch.tensor([[0, 1]]), CPU)
        values = GuidedRounding(rows).values(0, "attn_in", trainer, fmt)
        assert values[0, :3] == pytest.approx(torch.tensor([1.0, 2.0, 2.0]))
        # nearest gave 1.5, 3, 1.5: three of 32 wrong; guided gave 1, 2, 2: one wrong, by two codes
        assert rows.mismatch.compute() == {"before": 3 / 32, "after": 1 / 32, "after_off_by_one": 0.0}
        sums = dict(zip(AUDIT_SUMS, rows.mismatch.sums[0, "attn_in"].tolist(), strict=True))
        # off by one: 1.5 for 1 and 3 for 2 (codes 3 for 2, 5 for 4), while 1.5 for 4 is three codes away
        assert sums == {
            "elements": 32,
            "before": 3,
            "before_off_by_one": 2,
            "after": 1,
            "after_off_by_one": 0,
            "tokens": 2,
            "gap_before": 0.5**2 + 1**2 + 2.5**2,
            "gap_nearest": 0.5**2 + 1**2 + 2.5**2,
            "gap_after": 2**2,
            "rollout": 29 * 36 + 1 + 4 + 16,
        }

    def test_own_scale_and_the_rollouts_scale_are_told_apart(self) -> None:
        """The rollout's block reaches 12, the trainer's 6: the same value 1 has another code under each scale."""
        fmt = MXFP4()
        rollout, trainer = torch.full((1, 32), 1.0), torch.full((1, 32), 1.0)
        rollout[0, 0], trainer[0, 0] = 12.0, 6.0
        record = record_of(GuidanceConfig(mode="full"), [fmt.quantize(rollout)], [[True]])
        rows = GuidanceRows.from_rows(record, torch.tensor([[0]]), CPU)
        GuidedRounding(rows).values(0, "attn_in", trainer, fmt)
        sums = dict(zip(AUDIT_SUMS, rows.mismatch.sums[0, "attn_in"].tolist(), strict=True))
        # own scale 1: codes 6 -> index 7, 1 -> index 2; the rollout's scale 2: 12 -> 7, 1 -> index 1. Values agree but
        # for the first.
        assert (sums["before"], sums["before_off_by_one"], sums["after"]) == (31, 31, 1)
        assert (sums["gap_before"], sums["gap_nearest"]) == (36, 36)

    def test_scales_of_which_only_the_parity_is_known_give_no_values(self) -> None:
        fmt, x = NVFP4(), torch.randn(3, 32)
        record = record_of(GuidanceConfig(mode="full", scales="parity"), [fmt.quantize(x)], [[True] * 3])
        rows = GuidanceRows.from_rows(record, torch.tensor([[0, 1, 2]]), CPU)
        GuidedRounding(rows).values(0, "attn_in", x + 0.1, fmt)
        sums = dict(zip(AUDIT_SUMS, rows.mismatch.sums[0, "attn_in"].tolist(), strict=True))
        assert sums["elements"] == 96
        assert sums["before"] > 0
        assert sums["tokens"] == sums["gap_before"] == sums["rollout"] == 0

    def test_an_audited_row_counts_once_however_many_samples_share_it(self) -> None:
        fmt, x = NVFP4(), torch.randn(4, 32)
        record = record_of(GuidanceConfig(mode="full"), [fmt.quantize(x)], [[True, True, False, True]])
        rows = GuidanceRows.from_rows(record, torch.tensor([[3, 0, 2, -1], [0, 3, 1, 0]]), CPU)
        assert rows.row[rows.audit_tokens].tolist() == [3, 0, 1]
        assert rows.audit_entries.tolist() == [2, 0, 1]
        GuidedRounding(rows).values(0, "attn_in", x[[3, 0, 2, 2, 0, 3, 1, 0]], fmt)
        elements, _, _, after, *_ = rows.mismatch.sums[0, "attn_in"].tolist()
        assert (elements, after) == (3 * 32, 0)

    @pytest.mark.parametrize("mode", ["parity", "syndrome"])
    @pytest.mark.parametrize("store", ["device", "host"])
    def test_nothing_waits_for_the_device(self, store: str, mode: Any) -> None:
        """Tensors without data are the device: numbers, indices and copies that come from there raise."""
        fmt, x, meta = NVFP4(), torch.randn(4, 32), torch.device("meta")
        record = record_of(GuidanceConfig(mode=mode), [fmt.quantize(x)], [[True, True, False, True]])
        if store == "device":
            table = record.tables[0, "attn_in"]
            record.tables[0, "attn_in"] = SiteTable(*(part.to(meta) for part in table.tensors()))
        rows = GuidanceRows.from_rows(record, torch.tensor([[3, 0, -1], [0, 1, -1]]), meta)
        assert (rows.gathered is None) == (store == "device")
        values = GuidedRounding(rows).values(0, "attn_in", torch.empty(6, 32, device=meta), fmt)
        assert values.shape == (6, 32)
        assert rows.mismatch.sums[0, "attn_in"].shape == (10,)

    def test_mismatch_counts_add_up(self) -> None:
        counts, other = MismatchCounts(), MismatchCounts()
        assert counts.compute() == {}
        first = torch.tensor([10.0, 4, 4, 2, 1, 1, 9, 4, 1, 16], dtype=torch.float64)
        second = torch.tensor([30.0, *[0] * 9], dtype=torch.float64)
        counts.add((0, "k"), first)
        other.add((0, "k"), second)
        other.add((3, "o_in"), second)
        counts.merge(other)
        counts.merge(other)
        assert counts.compute() == {"before": 4 / 130, "after": 2 / 130, "after_off_by_one": 1 / 130}
        stacked = counts.stack([(0, "k"), (1, "k"), (3, "o_in")], CPU)
        assert_bit_equal(stacked, torch.stack([first + 2 * second, torch.zeros(10).double(), 2 * second]))
        assert_bit_equal(first[:1], torch.tensor([10.0]).double())  # what was added is not written to


class Measuring(GuidedRounding):
    """Rounds like its base class, and compares at every site with the rollout's codes and with nearest rounding."""

    def __init__(self, rows: GuidanceRows) -> None:
        super().__init__(rows)
        self.distance = torch.zeros(2, dtype=torch.float64)  # D_act guided, D_act nearest at the rollout's scale
        self.worse = self.bracketed = self.unequal_in_bracket = 0

    def values(self, layer: int, site: str, x: Tensor, fmt: Any, outer: Tensor | None = None) -> Tensor:
        result = super().values(layer, site, x, fmt, outer)
        table = self.rows.table(layer, site)
        assert table is not None
        index = (self.rows.row >= 0).nonzero().squeeze(-1)
        rows, row_outer = self.rows.row[index], table.outer
        if row_outer is not None:
            row_outer = (row_outer if site in ("k", "v") else row_outer[rows]).unsqueeze(-1)
        scale, codes, width = table.scale[rows], unpack_codes(table.audit[self.rows.audit_entries]), x.shape[-1]  # type: ignore[index]
        z = fmt.normalize(x[index], scale, row_outer).flatten(-2)
        rollout, nearest = (fmt.dequantize(Quantized(c, scale, row_outer, width)) for c in (codes, F4.e2m1_encode(z)))
        guided_gap, nearest_gap = ((v - rollout).abs() for v in (result[index], nearest))
        self.distance += torch.stack((guided_gap.double().sum(), nearest_gap.double().sum()))
        self.worse += int((guided_gap > nearest_gap + 1e-6 * rollout.abs()).sum())
        lower = F4.e2m1_bracket(z)
        inside = ((F4.with_sign(lower, z < 0) == codes) | (F4.with_sign(lower + 1, z < 0) == codes))[..., :width]
        self.bracketed += int(inside.sum())
        self.unequal_in_bracket += int((result[index] != rollout)[inside].sum())
        return result


class BothModes(GuidedRounding):
    """Rounds by full codes, and compares with what their parity bits alone would give."""

    def __init__(self, rows: GuidanceRows) -> None:
        super().__init__(rows)
        self.inside: dict[tuple[int, str], tuple[int, int]] = {}  # codes in the trainer's bracket, unequal ones

    def values(self, layer: int, site: str, x: Tensor, fmt: Any, outer: Tensor | None = None) -> Tensor:
        guide = self.rows.guide(layer, site)
        assert guide is not None
        tokens = (guide.row >= 0).nonzero().squeeze(-1)
        guide = guide.followed(tokens)
        self.compare(layer, site, x[tokens], fmt, guide)
        return super().values(layer, site, x, fmt, outer)

    def compare(self, layer: int, site: str, x: Tensor, fmt: Any, guide: Guide) -> None:
        q = guided_codes(x, guide, fmt)
        rolled = unpack_codes(guide.codes)
        assert q.scale is not None
        parity = fmt.round_parity(x, q.scale, q.outer, rolled & 1)
        z = fmt.normalize(x, q.scale, q.outer).flatten(-2)
        lower = F4.e2m1_bracket(z)
        inside = (F4.with_sign(lower, z < 0) == rolled) | (F4.with_sign(lower + 1, z < 0) == rolled)
        self.inside[layer, site] = int(inside.sum()), int((parity.codes != q.codes)[inside].sum())


class TestOnATrajectory:
    """A trainer whose weights are slightly off, along a real rollout, at every site of every layer."""

    @staticmethod
    def rolled_out(fmt: Any, mode: str) -> tuple[Any, Scorer, Tensor]:
        recipe = recipe_of(fmt, mode=mode, audit_sequences=len(PROMPTS))
        policy = make_policy("qwen3", recipe)
        generation = make_engine(policy, recipe).generate(PROMPTS, sampling(), record_guidance=True)
        return policy, Scorer(PROMPTS, generation, 1), rollout_logprobs(generation)

    @pytest.mark.parametrize("mode", ["full", "parity"])
    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    @torch.no_grad()
    def test_guidance_is_never_farther_than_nearest(self, fmt: str, mode: str) -> None:
        policy, scorer, _ = self.rolled_out(fmt, mode)
        measuring = Measuring(scorer.guidance())
        final_hidden(perturbed(policy, 3e-3), scorer.token_ids(), measuring)
        guided, nearest = measuring.distance.tolist()
        assert 0 <= guided < nearest
        assert measuring.bracketed > 10_000
        assert measuring.unequal_in_bracket == 0, "inside the bracket both modes give the rollout's code"
        if mode == "full":
            assert measuring.worse == 0

    @pytest.mark.parametrize("mode", ["full", "parity", "syndrome"])
    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    def test_it_brings_codes_and_logprobs_closer(self, fmt: str, mode: str) -> None:
        policy, scorer, rolled = self.rolled_out(fmt, mode)
        trainer = perturbed(policy, 1e-4)
        rounding = GuidedRounding(scorer.guidance())
        guided = (scorer.logprobs(trainer, 0.8, rounding) - rolled).abs().mean()
        nearest = (scorer.logprobs(trainer, 0.8) - rolled).abs().mean()
        mismatch = rounding.rows.mismatch.compute()
        assert guided < nearest / 3
        assert mismatch["after"] < mismatch["before"]

    @pytest.mark.parametrize("mode", ["parity", "syndrome"])
    def test_same_weights_mean_no_mismatch(self, mode: str) -> None:
        policy, scorer, _ = self.rolled_out("nvfp4", mode)
        rounding = GuidedRounding(scorer.guidance())
        scorer.logprobs(policy, 0.8, rounding)
        assert rounding.rows.mismatch.compute()["after"] == 0
        for key, sums in rounding.rows.mismatch.sums.items():
            assert sums[AUDIT_SUMS.index("tokens")] == len(rounding.rows.audit_tokens), key
            assert sums[AUDIT_SUMS.index("gap_after")] == 0, key

    @pytest.mark.parametrize("mode", ["full", "parity"])
    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    def test_d_act_at_every_site(self, fmt: str, mode: str) -> None:
        """Against nearest rounding on the same scales: never larger with full codes, and not on the whole with parity,
        which may pick the farther code only where the rollout's left the trainer's bracket."""
        policy, scorer, _ = self.rolled_out(fmt, mode)
        rounding = GuidedRounding(scorer.guidance())
        scorer.logprobs(perturbed(policy, 3e-3), 0.8, rounding)
        table = {key: dict(zip(AUDIT_SUMS, s.tolist(), strict=True)) for key, s in rounding.rows.mismatch.sums.items()}
        assert set(table) == {(layer, site) for layer in (0, 1) for site in SITES}
        for key, sums in table.items():
            assert sums["gap_after"] <= sums["gap_nearest"] * (1 + 1e-6), key
            assert sums["gap_nearest"] > 0, key
            assert sums["after"] <= sums["before"], key

    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    @torch.no_grad()
    def test_parity_equals_full_inside_the_bracket_at_every_site(self, fmt: str) -> None:
        policy, scorer, _ = self.rolled_out(fmt, "full")
        both = BothModes(scorer.guidance())
        final_hidden(perturbed(policy, 3e-3), scorer.token_ids(), both)
        assert set(both.inside) == {(layer, site) for layer in (0, 1) for site in SITES}
        for key, (inside, unequal) in both.inside.items():
            assert inside > 1000, key
            assert unequal == 0, key


def test_guidance_of_fp8_is_refused_by_the_recipe() -> None:
    assert get_format("fp8").guidable is False  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="nothing can be guided"):
        recipe_of("fp8", sites=None)
    with pytest.raises(ValueError, match="is not FP4"):
        recipe_of("fp8")
