"""The small kernels of a decoder layer at 64 tokens of an 8B model, against torch and against a copy of the same bytes.

    python kernels/bench/bench_fused.py [--json PATH] [--sweep]

"vs torch" is the time of the unfused operators (the reference, in a CUDA graph) over ours, larger is better; "share of
copy" is the time of a device copy that moves the same bytes over ours. At this size everything lies in L2 and time is
latency, so the copy is the honest bound, not the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import Report, graph_time
from torch import Tensor

from trace_kernels import MXFP4, NVFP4, BlockFormat
from trace_kernels import gated_activation as activation_module
from trace_kernels import rows as rows_module
from trace_kernels.gated_activation import gated_activation_reference, gated_activation_triton
from trace_kernels.kv_append import kv_append_reference, kv_append_triton
from trace_kernels.kv_pages import KVPages
from trace_kernels.norm import add_rms_norm_reference, add_rms_norm_triton
from trace_kernels.rows import format_words, round_rows_reference, round_rows_triton

M, C, I = 64, 4096, 12288  # noqa: E741
HEADS, KV_HEADS, D, PAGE = 32, 8, 128, 64
FORMATS: dict[str, BlockFormat | None] = {
    "none": None,
    "nvfp4": NVFP4(),
    "four_over_six": NVFP4(four_over_six=True),
    "mxfp4": MXFP4(),
}
BF16 = torch.bfloat16
RECORDLESS = (None, None, None, None)


def mostly_equal(ours: Tensor, expected: Tensor) -> None:
    """Reordered sums move a value over a rounding boundary now and then; a wrong kernel moves most of them."""
    assert ours.shape == expected.shape
    assert ours.isfinite().all()
    different = (ours != expected).float().mean().item()
    assert different < 0.01, f"{100 * different:.2f} % of the values differ"


def copy_time(num_bytes: int) -> float:
    """Seconds for a copy that reads and writes `num_bytes` together."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return graph_time(lambda: target.copy_(source))


def measure(
    report: Report, name: str, ours: Callable[[], Any], torchs: Callable[[], Any], num_bytes: int, check: bool = True
) -> None:
    """Compare the results, then add the three rows of one kernel."""
    if check:
        torch.empty(2**26, device="cuda").fill_(float("nan"))  # what an unwritten output will hold
        mostly_equal(ours(), torchs())
    seconds = graph_time(ours)
    report.add(f"{name} time", 1e6 * seconds, "us")
    report.add(f"{name} vs torch", graph_time(torchs) / seconds, "x")
    report.add(f"{name} share of copy", copy_time(num_bytes) / seconds, "")


def bench_norm(report: Report, name: str, splits: int) -> None:
    """`add_rms_norm` on FP32 residuals."""
    residual = torch.randn(M, C, device="cuda")
    parts = torch.randn(splits, M, C, device="cuda")
    gain = torch.ones(C, device="cuda")
    words = format_words(FORMATS[name])

    def call(function: Callable[..., Tensor], stream: Tensor) -> Tensor:
        return function(stream, parts, gain, 1e-6, BF16, *words, name != "none", *RECORDLESS)

    mostly_equal(call(add_rms_norm_triton, residual.clone()), call(add_rms_norm_reference, residual.clone()))
    ours, torchs = (lambda f=f: call(f, residual) for f in (add_rms_norm_triton, add_rms_norm_reference))
    parts.zero_()  # the stream is changed at each replay and must not run away
    measure(report, f"norm {name} S={splits}", ours, torchs, M * C * (4 * splits + 4 + 4 + 2), check=False)


def bench_activation(report: Report, name: str, splits: int) -> None:
    """`gated_activation` with SiLU."""
    parts = torch.randn(splits, M, 2 * I, device="cuda")
    words = format_words(FORMATS[name])

    def call(function: Callable[..., Tensor]) -> Tensor:
        return function(parts, "silu", BF16, *words, name != "none", *RECORDLESS)

    ours, torchs = (lambda f=f: call(f) for f in (gated_activation_triton, gated_activation_reference))
    measure(report, f"activation {name} S={splits}", ours, torchs, M * I * (8 * splits + 2))


def bench_round(report: Report, name: str) -> None:
    """`round_rows` of attention's output."""
    x = torch.randn(M, C, device="cuda", dtype=BF16)
    words = format_words(FORMATS[name])

    def call(function: Callable[..., Tensor]) -> Tensor:
        return function(x, BF16, *words, True, *RECORDLESS)

    ours, torchs = (lambda f=f: call(f) for f in (round_rows_triton, round_rows_reference))
    measure(report, f"round {name}", ours, torchs, M * C * 4)


def bench_append(report: Report, name: str, splits: int, rotated: bool) -> None:
    """`kv_append` with QK-norm; torch's scatter cannot be captured with inactive rows, so without that ratio."""
    fmt, device = FORMATS[name], torch.device("cuda")
    width = (HEADS + 2 * KV_HEADS) * D
    parts = torch.randn(splits, M, width, device=device)
    gains = [torch.ones(D, device=device) for _ in range(2)]
    cos, sin = (f(torch.randn(M, D // 2, device=device).repeat(1, 2)) for f in (torch.cos, torch.sin))
    slots = torch.randperm(64 * PAGE, device=device)[:M]
    make = {"num_pages": 64, "page_size": PAGE, "num_heads": KV_HEADS, "head_dim": D, "dtype": BF16, "device": device}
    ours_k, ours_v, torch_k, torch_v = (KVPages.empty(fmt, **make) for _ in range(4))

    def call(function: Callable[..., Tensor], k: KVPages, v: KVPages) -> Tensor:
        pages = (k.data, k.scale, k.outer, v.data, v.scale, v.outer)
        return function(parts, *gains, 1e-6, cos, sin, slots, *pages, HEADS, BF16, rotated, *format_words(fmt))

    queries = [call(kv_append_triton, ours_k, ours_v), call(kv_append_reference, torch_k, torch_v)]
    torch.testing.assert_close(queries[0], queries[1], rtol=1e-5, atol=1e-4 if not rotated else 2e-2)
    for mine, theirs in ((ours_k, torch_k), (ours_v, torch_v)):
        mostly_equal(mine.read(slots, torch.float32), theirs.read(slots, torch.float32))
    seconds = graph_time(lambda: call(kv_append_triton, ours_k, ours_v))
    label = f"append {name} S={splits}{' hadamard' if rotated else ''}"
    report.add(f"{label} time", 1e6 * seconds, "us")
    moved = M * (4 * splits * width + 4 * HEADS * D + 8 * D) + M * 2 * KV_HEADS * D // 2
    report.add(f"{label} share of copy", copy_time(moved) / seconds, "")


def sweep(report: Report) -> None:
    """Elements that one program of the 2-D grids takes."""
    for chunk in (512, 1024, 2048, 4096):
        rows_module.CHUNK = activation_module.CHUNK = chunk
        for name in FORMATS:
            bench_activation(report, f"{name}", 1)
        print(f"above: chunk {chunk}", flush=True)


def main() -> None:
    """Run all benchmarks, or with --sweep the chunk sizes."""
    report = Report(__doc__ or "")
    torch.manual_seed(0)
    if report.arguments.sweep:
        sweep(report)
    else:
        for name in FORMATS:
            for splits in (1, 4):
                bench_norm(report, name, splits)
                bench_activation(report, name, splits)
            bench_append(report, name, 4, rotated=False)
            if name != "none":
                bench_round(report, name)
        bench_append(report, "nvfp4", 4, rotated=True)
    report.save()


if __name__ == "__main__":
    main()
