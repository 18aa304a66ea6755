"""Decode attention on a GPU: the FP4 kernel against its BF16 twin over the same pages, and the twin against the memory.

Times are medians of CUDA-graph replays of the whole op, merge included; K and V exceed the L2 cache by far. Codes are
random, block scales are random bytes in 0x18..0x30, page tables are shuffled. Before anything is timed, every kernel is
compared with the torch reference, with NaN in the memory that its outputs will get.

    python kernels/bench/bench_decode_attention.py [--json rows.json] [--sweep]

`--sweep` walks the launch parameters one after another, from the entries of `LAUNCHES`, and prints each time; nothing
is kept, so a better entry has to be written there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from timing import Report, copy_bandwidth, graph_time
from torch import Tensor
from triton.runtime.errors import OutOfResources

from trace_kernels import decode_attention as op
from trace_kernels.decode_attention import SharedPrefix, decode_attention, decode_attention_reference
from trace_kernels.kv_pages import KVPages
from trace_kernels.quantize import get_format

PAGE = 128
KV_HEADS = 8
SHAPES = {"64x8k": (64, 8192), "16x32k": (16, 32768), "256x2k": (256, 2048)}
SWEPT = {
    "nvfp4": {"tokens": (32, 64, 128), "stages": (2, 3, 4), "warps": (1, 2), "registers": (None, 96, 128, 168)},
    "none": {"tokens": (32, 64, 128), "stages": (2, 3, 4), "warps": (2, 4, 8), "registers": (None, 128)},
}
CHUNKS = (256, 512, 1024, 2048)


@dataclass
class Problem:
    """One call: `batch` rows of `length` tokens."""

    q: Tensor
    k: KVPages
    v: KVPages
    table: Tensor
    lens: Tensor
    length: int
    chunk: int = 512
    prefix: SharedPrefix | None = None

    def run(self) -> Tensor:
        """The op."""
        return decode_attention(
            self.q, self.k, self.v, self.table, self.lens,
            softmax_scale=self.q.shape[-1] ** -0.5, max_len=self.length, chunk=self.chunk, prefix=self.prefix,
        )  # fmt: skip

    def reference(self) -> Tensor:
        """The same in plain torch and FP32."""
        k, v = self.k, self.v
        fmt = "none" if k.fmt is None else k.fmt.name
        return decode_attention_reference(
            self.q.float(), k.data, k.scale, k.outer, v.data, v.scale, v.outer, self.table, self.lens, None, None,
            fmt, self.q.shape[-1] ** -0.5, 0, self.length, 0, self.chunk,
        )  # fmt: skip


def random_pages(fmt: str, pages: int, dim: int) -> KVPages:
    """Random K or V of about unit size."""
    sizes = {"num_pages": pages, "page_size": PAGE, "num_heads": KV_HEADS, "head_dim": dim}
    kv = KVPages.empty(get_format(fmt), **sizes, dtype=torch.bfloat16, device="cuda")
    if fmt == "none":
        kv.data.normal_()
        return kv
    low, high = (0x18, 0x30) if fmt == "nvfp4" else (120, 128)
    kv.data.random_(0, 256)
    if kv.scale is None:  # FP8: no NaN, and nothing above 2
        kv.data.bitwise_and_(0xBF)
    else:
        kv.scale.random_(low, high + 1)
    return kv


def problem(fmt: str, batch: int, length: int, dim: int, group: int) -> Problem:
    """`batch` rows of `length` tokens under a shuffled page table."""
    per_row = math.ceil(length / PAGE)
    table = torch.randperm(batch * per_row, device="cuda").int().view(batch, per_row)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, KV_HEADS * group, dim, dtype=torch.bfloat16, device="cuda")
    k, v = (random_pages(fmt, batch * per_row, dim) for _ in range(2))
    return Problem(q, k, v, table, lens, length)


def share(unshared: Problem, n: int, prefix: int) -> Problem:
    """The same rows, in groups of `n` that share the pages of their first `prefix` tokens."""
    batch = len(unshared.lens)
    table = unshared.table.clone()
    pages = prefix // PAGE
    table[:, :pages] = table[::n, :pages].repeat_interleave(n, 0)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda").view(-1, n)
    lens = torch.full((batch,), prefix, dtype=torch.int32, device="cuda")
    return replace(unshared, table=table, prefix=SharedPrefix(rows, lens, prefix))


def check(fmt: str, dim: int, group: int) -> None:
    """Compare with the reference, ragged and shared, over memory full of NaN."""
    case = problem(fmt, 8, 2048, dim, group)
    case.lens.copy_(torch.tensor([1, 0, 2048, 1500, 513, 512, 64, 2000], device="cuda"))
    poison = [torch.full((slots, *case.q.shape), float("nan"), device="cuda") for slots in (1, 4, 5)]
    del poison
    errors = []
    for one in (case, share(replace(case, lens=case.lens.clamp_min(1024)), 4, 512)):
        error = one.run().float() - one.reference()
        errors.append((error.norm() / one.reference().norm()).item())
    assert max(errors) < 1e-2, f"{fmt} D {dim} group {group}: relative errors {errors}"
    print(f"checked {fmt} D {dim} group {group}: relative error {max(errors):.1e}", flush=True)


def seconds(fmt: str, shape: str, dim: int = 128, group: int = 4) -> tuple[float, int]:
    """Time of one call, and the bytes of K and V that it reads."""
    batch, length = SHAPES[shape]
    case = problem(fmt, batch, length, dim, group)
    return graph_time(case.run), case.k.nbytes + case.v.nbytes


def against_bf16(report: Report, shape: str, dim: int, group: int, name: str, must: float, aim: float) -> None:
    """Add the rows of one shape."""
    (bf16, bf16_bytes), (fp4, fp4_bytes) = (seconds(fmt, shape, dim, group) for fmt in ("none", "nvfp4"))
    report.add(f"fp4 attention vs bf16 {name}", bf16 / fp4, "x", must=must, aim=aim)
    report.add(f"  fp4 {name}, bytes of K and V", fp4_bytes / fp4 / 1e12, "TB/s")
    report.add(f"  fp4 {name} share of copy bandwidth", fp4_bytes / fp4 / copy_bandwidth(), "")
    report.add(f"  bf16 {name} share of copy bandwidth", bf16_bytes / bf16 / copy_bandwidth(), "")


def shared_prefix(report: Report) -> None:
    """16 rows per prompt, 2k tokens of prompt and 2k of their own."""
    unshared = problem("nvfp4", 256, 4096, 128, 4)
    shared = share(unshared, 16, 2048)
    ratio = graph_time(unshared.run) / graph_time(shared.run)
    report.add("shared prefix 2k x 16, 256 seq, 2k own vs unshared", ratio, "x", must=1.3, aim=1.45)


def sweep(fmt: str, dim: int, group: int) -> None:
    """Walk launch parameters and chunks one after another, keeping the best of each."""
    kind = "fp4" if fmt == "nvfp4" else "16 bit"
    case = problem(fmt, 64, 8192, dim, group)
    best = op.LAUNCHES[kind, dim][0]
    print(f"{fmt} D {dim} group {group}", flush=True)
    for name, values in SWEPT[fmt].items():
        found = []
        for value in values:
            launch = replace(best, **{name: value})
            op.LAUNCHES[kind, dim] = (launch, launch)
            found.append((timed(case), launch))
            print(f"  {found[-1][0] * 1e6:8.1f} us  {launch}", flush=True)
        best = min(found, key=lambda pair: pair[0])[1]
    op.LAUNCHES[kind, dim] = (best, best)
    for chunk in CHUNKS:
        print(f"  {timed(replace(case, chunk=chunk)) * 1e6:8.1f} us  chunk {chunk}", flush=True)


def timed(case: Problem) -> float:
    """Seconds; infinite where the GPU has not the shared memory for it."""
    try:
        return graph_time(case.run, rep=20)
    except OutOfResources:
        return math.inf


def main() -> None:
    """All rows, or the sweeps."""
    report = Report(__doc__.splitlines()[0])
    torch.manual_seed(0)
    for fmt, dim, group in (("nvfp4", 128, 4), ("nvfp4", 64, 2), ("mxfp4", 128, 4), ("none", 128, 4), ("fp8", 128, 4)):
        check(fmt, dim, group)
    if report.arguments.sweep:
        for dim, group in ((128, 4), (64, 4)):
            for fmt in SWEPT:
                sweep(fmt, dim, group)
        return
    bf16, moved = seconds("none", "64x8k")
    share_of_copy = moved / bf16 / copy_bandwidth()
    report.add("bf16 attention 64x8k share of copy bandwidth", share_of_copy, "", must=0.90, aim=0.97)
    for shape in SHAPES:
        against_bf16(report, shape, 128, 4, shape, 2.2, 3.0)
    for group in (2, 4):
        against_bf16(report, "64x8k", 64, group, f"D64 group {group} 64x8k", 1.8, 2.6)
    shared_prefix(report)
    report.save()


if __name__ == "__main__":
    main()
