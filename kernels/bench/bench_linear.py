"""FP4 linear against cuBLAS in BF16, and the engine's choice of the two over the batch size.

    python kernels/bench/bench_linear.py [--json PATH] [--sweep]

All times come from CUDA graphs over enough copies of the weights to miss the L2 cache. `--sweep` times tiles, stages
and splits instead, and prints the five fastest per shape and batch as JSON lines: material for `linear.TILES`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
from collections.abc import Callable, Iterator

import torch
import triton
from timing import Report, copy_bandwidth, graph_time
from torch import Tensor

from trace_kernels import get_format, linear, pack_codes
from trace_kernels.crossover import _seconds, crossover_batch
from trace_kernels.launch import num_multiprocessors
from trace_kernels.linear import Tile

TARGETS = ((24576, 4096), (4096, 12288), (6144, 4096))  # rows, width
OTHERS = ((2560, 9728), (19456, 2560), (12288, 2048), (2048, 6144), (4096, 2048), (2048, 2048))
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512)
MUST = {8: 1.6, 16: 1.4}


class Layer:
    """One weight in FP4 and in BF16, each often enough that going round misses the L2 cache."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        block_format = get_format("nvfp4")
        w = torch.randn(rows, width, device="cuda") * 0.02
        q = block_format.quantize(w, block_format.outer_from_amax(w.abs().amax().view(1, 1)))
        self.outer = q.outer
        self.packed = linear._copies(pack_codes(q.codes), q.scale)
        self.dense = linear._copies(block_format.dequantize(q, torch.bfloat16))

    def activations(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.width, device="cuda", dtype=torch.bfloat16)

    def fp4_calls(self, xp: Tensor, tile: Tile | None = None, splits: int = 0) -> list[Callable[[], Tensor]]:
        run = functools.partial(linear.launch, tile, splits) if tile else linear.fp4_linear_triton
        settings = {"in_features": self.width, "fmt": "nvfp4"}
        return [functools.partial(run, xp, *pair, self.outer, None, **settings) for pair in self.packed]

    def bf16_calls(self, x: Tensor) -> list[Callable[[], Tensor]]:
        return [functools.partial(torch.nn.functional.linear, x, w) for (w,) in self.dense]

    def seconds(self, tokens: int) -> tuple[float, float, float]:
        """Per call: FP4, FP4 with the consumer's reading of its parts, BF16."""
        x = self.activations(tokens)
        fp4 = _per_call(self.fp4_calls(linear.permute_activations(x)))
        bf16 = _per_call(self.bf16_calls(x))
        splits = _plan(tokens, self)[1]
        return fp4, fp4 + (4 * splits - 2) * tokens * self.rows / copy_bandwidth(), bf16


def _per_call(calls: list[Callable[[], Tensor]]) -> float:
    return graph_time(lambda: [call() for call in calls], rep=15) / len(calls)


def _plan(tokens: int, layer: Layer) -> tuple[Tile, int]:
    return linear.launch_plan(tokens, layer.rows, layer.width, layer.outer.device)


def check(layer: Layer, tokens: int) -> None:
    """The kernel's result, in memory that held NaN before, is no worse than cuBLAS's."""
    x = layer.activations(tokens)
    xp = linear.permute_activations(x)
    poison = torch.full((_plan(tokens, layer)[1], tokens, layer.rows), float("nan"), device="cuda")
    del poison
    ours = layer.fp4_calls(xp)[0]().sum(0).bfloat16()
    exact = x.double() @ layer.dense[0][0].double().T
    errors = [float((y.double() - exact).abs().max()) for y in (ours, layer.bf16_calls(x)[0]())]
    assert errors[0] <= 1.25 * errors[1], (
        f"M={tokens} {layer.rows}x{layer.width}: error {errors[0]}, cuBLAS {errors[1]}"
    )


def compare(report: Report) -> None:
    """The rows of the report: the FP4 kernel alone, then the engine's choice."""
    for rows, width in (*TARGETS, *OTHERS):
        layer, shape = Layer(rows, width), f"{rows}x{width}"
        for tokens in (3, 8, 16, 40):
            check(layer, tokens)
        chosen = crossover_batch(*layer.packed[0], layer.outer, layer.dense[0][0], fmt="nvfp4", in_features=width)
        ratios = {}
        for tokens in BATCHES:
            if tokens > chosen and tokens not in MUST:
                continue  # the engine runs cuBLAS there: the ratio is 1
            fp4, with_parts, bf16 = layer.seconds(tokens)
            ratios[tokens] = bf16 / with_parts
            if tokens in MUST and (rows, width) in TARGETS:
                name = f"fp4 linear vs cuBLAS {shape} M={tokens}"
                report.add(name, bf16 / fp4, "x", must=MUST[tokens], aim=2.5)
                share = sum(tensor.nbytes for tensor in layer.packed[0]) / fp4 / copy_bandwidth()
                report.add(f"fp4 linear share of copy bandwidth {shape} M={tokens}", share, "")
        report.add(f"fp4 linear crossover {shape}", chosen, "tokens")
        worst = min([1.0, *(ratio for tokens, ratio in ratios.items() if tokens <= chosen)])
        report.add(f"engine linear vs BF16 worst over M=1..512 {shape}", worst, "x", must=0.95, aim=1.0)


def tiles(columns: int) -> Iterator[Tile]:
    """Tiles worth timing: 64 to 256 weights per thread and step, stages that fit into shared memory."""
    for rows in (16, 32, 64, 128):
        for words in (16, 32, 64):
            for warps in (1, 2, 4):
                if not 64 <= rows * words // (4 * warps) <= 256 or rows < 16 * warps:
                    continue
                for stages in (2, 3, 4):
                    if stages * words * (rows * 4.5 + columns * 16) <= 110_000:  # two programs per multiprocessor
                        yield Tile(rows, words, warps, stages, 1)


def compile_tile(job: tuple[int, Tile]) -> None:
    """Fill Triton's disk cache with one kernel; runs in a process of its own."""
    columns, tile = job
    qdata = torch.zeros(256, 1024, dtype=torch.uint8, device="cuda")
    scale = torch.full((256, 128), 0x38, dtype=torch.uint8, device="cuda")
    xp = torch.zeros(16, 8, columns, 16, dtype=torch.bfloat16, device="cuda")
    linear.launch(tile, 1, xp, qdata, scale, torch.ones(1, 1, device="cuda"), None, in_features=2048, fmt="nvfp4")


def split_counts(layer: Layer, tile: Tile, tokens: int) -> Iterator[int]:
    """Splits that give every multiprocessor something to do and every split two steps."""
    multiprocessors = num_multiprocessors(torch.device("cuda", 0))
    programs = triton.cdiv(layer.rows, tile.rows)
    steps = triton.cdiv(layer.width, 8 * tile.words)
    for splits in (1, 2, 3, 4, 6, 8, 12, 16):
        busy = 1.5 <= programs * splits * tile.warps / multiprocessors <= 40
        if busy and (splits == 1 or 2 * splits <= steps) and splits * 28 * tokens <= max(layer.width, 28 * tokens):
            yield splits


def sweep() -> None:
    """Print the five fastest launches per shape and batch."""
    jobs = [(columns, tile) for columns in (8, 16, 32, 64) for tile in tiles(columns)]
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, jobs))
    for rows, width in (*TARGETS, *OTHERS):
        layer = Layer(rows, width)
        for tokens in (8, 16, 32, 64):
            x = layer.activations(tokens)
            xp = linear.permute_activations(x)
            bf16 = _seconds(layer.bf16_calls(x))
            timed = []
            for tile in tiles(tokens):
                for splits in split_counts(layer, tile, tokens):
                    extra = (4 * splits - 2) * tokens * rows / copy_bandwidth()
                    timed.append((_seconds(layer.fp4_calls(xp, tile, splits)), extra, tile, splits))
            best = [
                {
                    "rows": tile.rows, "words": tile.words, "warps": tile.warps, "stages": tile.stages,
                    "splits": splits, "us": round(seconds * 1e6, 2), "ratio": round(bf16 / seconds, 3),
                    "ratio_with_parts": round(bf16 / (seconds + extra), 3),
                }
                for seconds, extra, tile, splits in sorted(timed, key=lambda entry: entry[0] + entry[1])[:5]
            ]  # fmt: skip
            line = {
                "shape": [rows, width],
                "M": tokens,
                "bf16_us": round(bf16 * 1e6, 2),
                "tried": len(timed),
                "best": best,
            }
            print(json.dumps(line), flush=True)


def main() -> None:
    """Sweep, or compare and write the report."""
    report = Report("FP4 linear against cuBLAS")
    torch.manual_seed(0)
    if report.arguments.sweep:
        sweep()
        return
    compare(report)
    report.save()


if __name__ == "__main__":
    main()
