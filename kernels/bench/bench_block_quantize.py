"""Weight sync and row quantisation against the copy bandwidth of the same GPU.

    python kernels/bench/bench_block_quantize.py [--json PATH] [--sweep]

The weights are the linears of four layers of the 8B shape: 1.5 GB in BF16, far beyond the L2 cache. Bytes are those
that must move: masters twice for NVFP4 (amax, then codes), once for MXFP4; codes, scales and the dense copy once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timing import Report, copy_bandwidth, graph_time
from torch import Tensor

from trace_kernels import block_quantize
from trace_kernels.block_quantize import quantize_rows, requantize_, requantize_reference
from trace_kernels.quantize import get_format

LAYERS = 4
GROUPS = [
    ((4096, 1024, 1024), 4096),
    ((4096,), 4096),
    ((12288, 12288), 4096),
    ((4096,), 12288),
]  # qkv, o, gate_up, down
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def results(rows: int, width: int, name: str, dense: bool) -> list[Any]:
    """Poisoned results of one group."""
    fmt = get_format(name)
    assert fmt is not None
    columns = width // 2, width // fmt.block_size
    qdata, scale = (torch.full((rows, n), 0xA5, dtype=torch.uint8, device="cuda") for n in columns)
    outer = torch.full((1, 1), -1.0, device="cuda") if fmt.has_outer else None
    copy = torch.full((rows, width), -7.0, dtype=torch.bfloat16, device="cuda") if dense else None
    return [qdata, scale, outer, copy]


def layers(dtype: torch.dtype) -> list[list[Tensor]]:
    """Masters of all groups, layer by layer."""
    return [
        [torch.randn(n, width, device="cuda", dtype=dtype) * 0.02 for n in rows]
        for _ in range(LAYERS)
        for rows, width in GROUPS
    ]


def check(masters: list[list[Tensor]], name: str, six: bool) -> None:
    """The four groups of the first layer, byte for byte."""
    for parts in masters[: len(GROUPS)]:
        rows, width = sum(len(part) for part in parts), parts[0].shape[1]
        ours, expected = (results(rows, width, name, True) for _ in range(2))
        requantize_(parts, *ours, name, six)
        requantize_reference(parts, *expected, name, six)
        for left, right in zip(ours, expected, strict=True):
            assert left is None or torch.equal(left, right), f"{name}: results differ"


def sync_share(masters: list[list[Tensor]], name: str, *, six: bool = False, dense: bool = True) -> float:
    """Bytes per second of a sync of all layers, as a share of the copy bandwidth."""
    targets = [results(sum(len(p) for p in parts), parts[0].shape[1], name, dense) for parts in masters]

    def sync() -> None:
        for parts, target in zip(masters, targets, strict=True):
            requantize_(parts, *target, name, six)

    reads = 1 if name == "mxfp4" else 2
    moved = reads * sum(part.nbytes for parts in masters for part in parts)
    moved += sum(tensor.nbytes for target in targets for tensor in target if tensor is not None)
    return moved / graph_time(sync) / copy_bandwidth()


def sweep(masters: list[list[Tensor]]) -> None:
    """Blocks per program and warps of the quantising kernel."""
    launch = block_quantize._launch
    for tile in (128, 256, 512, 1024):
        for num_warps in (2, 4, 8):
            block_quantize._launch = partial(launch, tile=tile, num_warps=num_warps)
            print(f"tile {tile:5} warps {num_warps}: {sync_share(masters, 'nvfp4'):.3f} of copy bandwidth", flush=True)
    block_quantize._launch = launch


def rows_report(report: Report) -> None:
    """Rows as a prefill or a trainer quantises them: 16,384 tokens of width 4096, four tensors in turn."""
    tensors = [torch.randn(16_384, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    small = tensors[0][:64]
    amax_seconds = graph_time(lambda: [small.abs().amax(-1) for _ in range(20)])
    for name in ("nvfp4", "mxfp4"):
        fmt = get_format(name)
        assert fmt is not None
        out = [quantize_rows(x, fmt) for x in tensors]
        moved = sum(x.nbytes + o.qdata.nbytes + o.scale.nbytes for x, o in zip(tensors, out, strict=True))
        seconds = graph_time(lambda fmt=fmt: [quantize_rows(x, fmt) for x in tensors])
        report.add(
            f"quantise 16k x 4096 rows to {name}, share of copy bandwidth", moved / seconds / copy_bandwidth(), ""
        )
        seconds = graph_time(lambda fmt=fmt: [quantize_rows(small, fmt) for _ in range(20)])
        report.add(f"quantise 64 x 4096 rows to {name}, speed against torch's amax", amax_seconds / seconds, "x")


def main() -> None:
    """Check, then measure."""
    torch.manual_seed(0)
    report = Report(__doc__.splitlines()[0])
    masters = layers(torch.bfloat16)
    for name, six in (("nvfp4", False), ("nvfp4", True), ("mxfp4", False)):
        check(masters, name, six)
    if report.arguments.sweep:
        sweep(masters)
    share = sync_share(masters, "nvfp4")
    report.add("weight sync bytes/s share of copy bandwidth (8B shape, bf16 masters)", share, "", must=0.40, aim=0.70)
    report.add("  without the dense copy", sync_share(masters, "nvfp4", dense=False), "")
    report.add("  four over six", sync_share(masters, "nvfp4", six=True), "")
    report.add("  mxfp4", sync_share(masters, "mxfp4"), "")
    del masters
    report.add("  nvfp4, fp32 masters", sync_share(layers(torch.float32), "nvfp4"), "")
    rows_report(report)
    report.save()


if __name__ == "__main__":
    main()
