"""The benchmark on a CPU: its arithmetic, what it refuses, and that what it times is what the engine does."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from trace_lightning.bench.machine import device_seconds
from trace_lightning.bench.measure import DecodeResult, Rate, measure_decode, random_prompts
from trace_lightning.bench.parts import PARTS, Kernel, StepParts, split_step
from trace_lightning.bench.report import json_rows, tables, title
from trace_lightning.bench.roofline import (
    FORMATS,
    Limits,
    decode_cost,
    find_format,
    kv_bytes,
    prefill_operations,
    sequences_that_fit,
    snapshot_bytes,
)
from trace_lightning.bench.runner import BenchOptions, BenchResult, FormatResult, check_options
from trace_lightning.bench.shapes import SHAPES, ModelShape, NoTokenizer, make_model
from trace_lightning.bench.workload import DecodeWorkload, fill_randomly
from trace_lightning.cli import main
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.types import SamplingParams

CPU = torch.device("cpu")
H200 = Limits(bandwidth=4.3e12, matmul_rate=790e12)
GPU_MEMORY = 0.9 * 139 * 2**30
ROW_KEYS = ["name", "value", "unit", "must", "aim", "ok", "command"]


class TestRoofline:
    # batch x context: BF16 in ms, then how many times faster W4A16KV4, KV4 and W4 are; worked out by hand
    ROWS = (
        ("qwen3-0.6b", 16, 2048, 1.15, 3.06, 2.20, 1.15),
        ("qwen3-1.7b", 64, 8192, 14.78, 3.43, 3.12, 1.03),
        ("qwen3-4b", 256, 2048, 20.59, 2.69, 2.69, 1.00),
        ("qwen3-8b", 16, 32768, 21.50, 3.44, 2.51, 1.12),
        ("qwen3-8b", 64, 8192, 21.50, 3.32, 2.51, 1.11),
    )

    @pytest.mark.parametrize(("name", "batch", "context", "bf16", "w4kv4", "kv4", "w4"), ROWS)
    def test_steps(self, name, batch, context, bf16, w4kv4, kv4, w4):
        def seconds(fmt: str) -> float:
            return decode_cost(SHAPES[name], find_format(fmt), batch=batch, context=context).seconds(H200)

        assert seconds("bf16") * 1e3 == pytest.approx(bf16, abs=0.006)
        for fmt, ratio in (("w4a16kv4", w4kv4), ("kv4", kv4), ("w4", w4)):
            assert seconds("bf16") / seconds(fmt) == pytest.approx(ratio, abs=0.006)

    def test_sizes(self):
        shape = SHAPES["qwen3-8b"]
        assert (round(shape.linear_params / 1e6), round(shape.head_params / 1e6)) == (6946, 622)
        assert [kv_bytes(shape, FORMATS[name]) for name in ("bf16", "kv8", "kv4", "kv4-mxfp4")] == [
            147456,
            73728,
            41472,
            39168,
        ]

    @pytest.mark.parametrize(("fmt", "weights", "fit"), [("bf16", 2.0, 98), ("w4a16kv4", 0.5625, 380)])
    def test_sequences_that_fit(self, fmt, weights, fit):
        shape = SHAPES["qwen3-8b"]
        free = GPU_MEMORY - weights * shape.linear_params - 2 * shape.head_params
        assert sequences_that_fit(free, kv_bytes(shape, FORMATS[fmt]), 8192) == fit

    def test_a_shared_prompt_is_read_once_per_group(self):
        shape, recipe = SHAPES["qwen3-0.6b"], FORMATS["bf16"]
        alone = decode_cost(shape, recipe, batch=16, context=3072)
        shared = decode_cost(shape, recipe, batch=16, context=3072, shared=1024, samples=16)
        assert alone.attention.bytes / shared.attention.bytes == pytest.approx(16 * 3072 / (1024 + 16 * 2048))
        assert alone.attention.operations == shared.attention.operations

    def test_prefill(self):
        shape = dataclasses.replace(SHAPES["tiny"], layers=1)
        linears = 2 * 10 * (128 * 64 * 12 + 3 * 128 * 256)
        attention = 4 * 4 * 64 * 10 * 10 / 2
        assert prefill_operations(shape, 3, 10) == 3 * (linears + attention + 2 * 512 * 128)

    def test_shape_counts_the_parameters_of_the_model(self):
        shape = SHAPES["tiny"]
        model = make_model(shape, None, CPU)
        norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
        assert sum(p.numel() for p in model.parameters()) - norms == shape.params
        assert ModelShape.of(model.config) == shape
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

    @pytest.mark.parametrize("fmt", ["bf16", "w4", "w4-mxfp4"])
    def test_snapshot_bytes(self, fmt):
        engine, shape = make_engine(fmt), SHAPES["tiny"]
        linears = [linear for layer in engine.decoder.layers for linear in layer.linears]
        held = sum(linear.weight.nbytes for linear in linears) + engine.decoder.embedding.nbytes
        for linear in linears:
            if linear.packed is not None:
                held += linear.packed.qdata.nbytes + linear.packed.scale.nbytes
        assert engine.decoder.head is engine.decoder.embedding
        assert snapshot_bytes(shape, FORMATS[fmt]) == held


def make_engine(fmt: str, dtype: torch.dtype = torch.bfloat16) -> LocalEngine:
    policy = make_model(SHAPES["tiny"], None, CPU).to(dtype)
    engine = LocalEngine(max_num_seqs=4, page_size=16)
    engine.setup(policy, NoTokenizer(), FORMATS[fmt], dtype=dtype)
    engine.load_weights(policy.named_parameters(), version=0)
    return engine


class TestWorkload:
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_random_pages_are_finite(self, fmt):
        workload = self.seated(fmt, context=40, steps=8)
        for pages in workload.kv.layers[1]:
            fill_randomly(pages)
            values = pages.read(torch.arange(64), torch.float32)
            assert values.isfinite().all()
            assert values.std() > 0

    @staticmethod
    def seated(fmt: str, **sizes: Any) -> DecodeWorkload:
        return DecodeWorkload(make_engine(fmt), SHAPES["tiny"].vocab, **({"batch": 4} | sizes))

    def test_ends_at_the_context_and_rewinds(self):
        workload = self.seated("w4a16kv4", context=70, steps=8)
        state = workload.state
        assert state.position[:4].tolist() == [60] * 4
        assert workload.wall_seconds() > 0
        assert state.position[:4].tolist() == [70] * 4
        workload.rewind()
        assert state.position[:4].tolist() == [62] * 4
        assert len(workload.step_seconds()) == 8
        assert state.position[:4].tolist() == [70] * 4
        assert workload.mean_context == sum(range(63, 71)) / 8

    def test_pages_are_shared_within_a_group_only(self):
        workload = self.seated("kv4", context=70, steps=8, samples=2, shared=40)
        tables = [set(row[:4].tolist()) for row in workload.state.page_table[:4]]
        assert [len(tables[0] & tables[i]) for i in range(4)] == [4, 2, 0, 0]
        assert [len(tables[3] & tables[i]) for i in range(4)] == [0, 0, 2, 4]
        assert workload.state.count[:4].tolist() == [21] * 4
        workload.wall_seconds()

    def test_draws_what_the_engine_draws(self):
        """With K and V of a real prompt in its pages, the seated run goes on as `generate` did."""
        engine = make_engine("kv4", torch.float32)
        prompts = random_prompts(2, 30, 512)
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=11, ignore_eos=True)).completions
        workload = DecodeWorkload(engine, 512, batch=2, context=40, steps=8)
        for row, completion in enumerate(completions):
            self._copy_cache(engine, workload, row, prompts[row].token_ids)
            workload.state.token[row] = completion.token_ids[0]
        workload.wall_seconds()
        drawn = workload.state.tokens[:2, 1:11].tolist()
        assert drawn == [completion.token_ids[1:] for completion in completions]

    @staticmethod
    def _copy_cache(engine: LocalEngine, workload: DecodeWorkload, row: int, token_ids: list[int]) -> None:
        """Bytes of a prompt's K and V, from the engine's cache after a prefill of it alone, to the workload's pages."""
        prompt = random_prompts(1, 1, 512)[0]
        engine.generate(
            [dataclasses.replace(prompt, token_ids=token_ids)], SamplingParams(max_new_tokens=1, ignore_eos=True)
        )
        assert engine._workspace.kv is not None
        target = workload.state.page_table[row, :2].long()
        for ours, theirs in zip(workload.kv.layers, engine._workspace.kv.layers, strict=True):
            for pages, source in zip(ours, theirs, strict=True):
                pages.data[target] = source.data[:2]
                if pages.scale is not None:
                    pages.scale[target] = source.scale[:2]

    def test_result_has_no_number_that_a_cpu_cannot_give(self):
        result = measure_decode(make_engine("w4a4kv4"), SHAPES["tiny"], None, batch=2, context=40, steps=8)
        assert result.tokens_per_s == 2 / result.wall
        assert (result.roofline, result.bandwidth_share, result.attention_share, result.parts, result.gaps) == (
            None,
        ) * 5

    def test_device_seconds_are_one_per_call(self):
        calls: list[int] = []
        assert len(device_seconds(lambda: calls.append(1), CPU, 3)) == len(calls) == 3


STEP = [
    ("index_kernel", 1.0),
    ("add_rms_norm_kernel", 2.0),
    ("_fp4_linear", 4.0),
    ("kv_append_kernel", 8.0),
    ("fp4_kernel", 16.0),
    ("merge_kernel", 32.0),
    ("nvjet_tst_128x64", 64.0),
    ("elementwise_kernel", 128.0),
    ("add_rms_norm_kernel", 256.0),
    ("nvjet_tst_256x128", 512.0),
    ("splitKreduce_kernel", 1024.0),
    ("sample_kernel", 2048.0),
]


def test_kernels_are_assigned_by_place_and_name():
    parts = split_step([Kernel(*pair) for pair in STEP], layers=1)
    assert parts.seconds == {
        "attention": 48.0,
        "linears": 68.0,
        "norms": 266.0,
        "lm_head": 1536.0,
        "sampling": 2048.0,
        "other": 129.0,
    }
    assert (parts.kernels, parts.kernels_per_layer) == (12, 7.0)


def on_a_gpu() -> BenchResult:
    """A result with everything in it that a GPU would have given."""
    options = BenchOptions(shape="qwen3-8b", formats=("bf16", "kv4"), context=(8192,), device=CPU)
    result = BenchResult(options=options, shape=SHAPES["qwen3-8b"], limits=H200, baselines={"generate": rate(10.0)})
    for name, wall in (("bf16", 0.025), ("kv4", 0.010)):
        decode = DecodeResult(
            batch=64,
            context=8192,
            wall=wall,
            device=wall - 0.001,
            cache_bytes=77_000_000_000,
            ideal_bytes=9e10,
            roofline=wall / 1.25,
            bandwidth_share=0.85,
            attention_share=0.9,
            parts=StepParts(dict.fromkeys(PARTS, 0.001), 330, 8.5),
        )
        parts = {"sync": rate(0.1, 0.5), "prefill": rate(0.5, 0.7), "generate": rate(1.0)}
        entry = FormatResult(name=name, label=name, decode=[decode], fits={8192: 98}, peak_bytes=10**11, **parts)
        result.formats.append(entry)
    return result


def rate(seconds: float, share: float | None = None) -> Rate:
    return Rate(seconds=seconds, amount=2048.0, share=share)


class TestReport:
    def test_tables_of_a_gpu(self):
        console = Console(file=io.StringIO(), width=200)
        for table in tables(on_a_gpu()):
            console.print(table)
        text = console.file.getvalue()
        for wanted in ("6400", "2.50", "8.00", "85%", "90%", "98", "8.5", "330", "host", "lm_head", "0.100", "100.0"):
            assert wanted in text
        assert "4.30 TB/s" in title(on_a_gpu())

    def test_rows_are_ratios_to_the_first_format_and_to_the_roofline(self):
        rows = json_rows(on_a_gpu(), "trace-fit bench")
        values = {row["name"]: row["value"] for row in rows}
        assert all(list(row) == ROW_KEYS for row in rows)
        assert values["qwen3-8b kv4 64x8192 decode, against bf16"] == pytest.approx(2.5)
        assert values["qwen3-8b kv4 64x8192 roofline"] == pytest.approx(0.8)
        assert values["qwen3-8b kv4 64x8192 host"] == pytest.approx(1.0)
        assert values["qwen3-8b kv4 generate, against transformers generate"] == pytest.approx(10.0)


class TestOptions:
    @pytest.mark.parametrize(
        ("wrong", "wanted"),
        [
            ({"shape": "qwen3-8"}, ["'qwen3-8'", "qwen3-8b", "tiny"]),
            ({"formats": ("bf16", "w4a16kv")}, ["'w4a16kv'", "did you mean", "w4a16kv4", "kv8"]),
            ({"baselines": ("vllm",)}, ["'vllm'", "generate_batch"]),
            ({"context": (18,)}, ["18 tokens", "--context"]),
            ({"context": (5000,)}, ["5000 tokens", "4096"]),
            ({"batch": (0,)}, ["--batch 0"]),
            ({"samples": 3}, ["groups of 3", "multiple"]),
            ({"shared": 30}, ["--shared 30", "--samples"]),
            ({"samples": 4, "shared": 60}, ["--shared 60", "46 tokens"]),
            ({"path": "nowhere/at/all"}, ["nowhere/at/all"]),
        ],
    )
    def test_refused(self, wrong, wanted):
        fine = {"shape": "tiny", "batch": (4,), "context": (64,), "new_tokens": 16, "device": CPU}
        with pytest.raises(ValueError, match=r"\w") as refused:
            check_options(BenchOptions(**(fine | wrong)), free_bytes=10**10)
        for text in wanted:
            assert text in str(refused.value)

    def test_other_families_are_refused(self):
        from transformers import GPT2Config

        with pytest.raises(ValueError, match="gpt2"):
            ModelShape.of(GPT2Config())

    def test_too_little_memory_says_how_many_fit(self):
        options = BenchOptions(
            shape="qwen3-8b", formats=("w4a16kv4",), batch=(500,), context=(8192,), device=torch.device("cuda")
        )
        free, shape = 140_000_000_000, SHAPES["qwen3-8b"]
        weights = 4 * shape.params + 0.5625 * shape.linear_params + 2**31
        fits = math.floor((free - weights) / (41472 * 8192))
        with pytest.raises(ValueError, match=f"500 sequences of 8192 tokens in w4a16kv4 .*: {fits} such sequences fit"):
            check_options(options, free)
        check_options(dataclasses.replace(options, batch=(fits,)), free)

    def test_fill_gives_every_format_the_same_bytes(self):
        options = BenchOptions(shape="qwen3-8b", fill=True, samples=2, device=CPU)
        shape = SHAPES["qwen3-8b"]
        assert [options.batch_of(fmt, 64, shape) for fmt in ("bf16", "kv8", "kv4", "kv4-mxfp4")] == [64, 128, 226, 240]


def test_the_command_prints_tables_and_writes_json(tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "new" / "bench.json"
    arguments = ["--device", "cpu", "--formats", "bf16", "w4a4kv4-mxfp4", "--batch", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["trace-fit", "bench", *arguments, "--prompts", "2"])
    main()
    printed = capsys.readouterr().out
    for text in ("tiny", "on a CPU", "x bf16", "w4a4kv4-mxfp4", "transformers generate", "sync s"):
        assert text in printed
    assert "TB/s" not in printed
    content = json.loads(path.read_text())
    assert set(content) == {"title", "device", "versions", "rows", "record"}
    names = {row["name"] for row in content["rows"]}
    assert {"tiny bf16 2x64 decode", "tiny w4a4kv4-mxfp4 sync"} <= names
    assert not any("bandwidth" in name or "kernels" in name for name in names)
    assert all(
        list(row) == ROW_KEYS and row["value"] > 0 and row["command"].startswith("trace-fit") for row in content["rows"]
    )
    assert [entry["label"] for entry in content["record"]["formats"]] == ["W16A16KV16", "W4A4KV4/mxfp4"]


def test_bad_input_ends_with_one_message(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace-fit", "bench", "--device", "cpu", "--formats", "w4a16kv5"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "w4a16kv4" in capsys.readouterr().err
