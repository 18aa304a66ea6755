"""Decode attention: the kernels against attention row by row in FP64, and what must not change a row's bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import get_format
from trace_kernels.attention_fp4 import unpack
from trace_kernels.decode_attention import (
    SharedPrefix,
    decode_attention,
    decode_attention_reference,
    decode_attention_triton,
    supports,
)
from trace_kernels.kv_pages import KVPages
from trace_kernels.launch import INTERPRET

KINDS = [
    ("nvfp4", 128, 4), ("nvfp4", 64, 2), ("nvfp4", 64, 6), ("nvfp4", 96, 3), ("nvfp4", 256, 9),
    ("mxfp4", 128, 12), ("mxfp4", 64, 4), ("mxfp4", 96, 1), ("fp8", 128, 4), ("none", 128, 4), ("none", 96, 2),
]  # fmt: skip


@dataclass
class Batch:
    """Arguments of one call."""

    q: Tensor
    k: KVPages
    v: KVPages
    table: Tensor
    lens: Tensor
    window: int = 0
    max_len: int = 192
    chunk: int = 64
    prefix: SharedPrefix | None = None

    def flat(self) -> tuple[Any, ...]:
        k, v, shared = self.k, self.v, self.prefix
        rows, lens, longest = (
            (None, None, 0) if shared is None else (shared.group_rows_Rn, shared.prefix_lens_B, shared.max_prefix_len)
        )
        fmt = "none" if k.fmt is None else k.fmt.name
        scale = self.q.shape[-1] ** -0.5
        return (
            self.q, k.data, k.scale, k.outer, v.data, v.scale, v.outer, self.table, self.lens, rows, lens,
            fmt, scale, self.window, self.max_len, longest, self.chunk,
        )  # fmt: skip

    def kernels(self) -> Tensor:
        return decode_attention_triton(*self.flat())

    def reference(self) -> Tensor:
        return decode_attention_reference(*self.flat())

    def public(self) -> Tensor:
        return decode_attention(
            self.q, self.k, self.v, self.table, self.lens,
            softmax_scale=self.q.shape[-1] ** -0.5, window=self.window or None, max_len=self.max_len,
            chunk=self.chunk, prefix=self.prefix,
        )  # fmt: skip


def make_batch(
    fmt: str, dim: int, group: int, lens: list[int], *, kv_heads: int = 2, page: int = 32, device: str = "cpu",
    dtype: torch.dtype = torch.float32, **settings: Any,
) -> Batch:  # fmt: skip
    """Random pages, all of them filled, under a shuffled page table."""
    generator = torch.Generator().manual_seed(dim + group)
    per_row = max(1, -(-max(lens) // page))
    pages = len(lens) * per_row + 1
    both = []
    for gain in (1.0, 0.1):
        sizes = {"num_pages": pages, "page_size": page, "num_heads": kv_heads, "head_dim": dim}
        kv = KVPages.empty(get_format(fmt), **sizes, dtype=dtype, device=device)
        x = (torch.randn(pages * page, kv_heads, dim, generator=generator) * gain).to(device)
        slots = torch.arange(pages * page, device=device)
        if kv.fmt is None:
            kv.store_values(slots, x)
        else:
            kv.outer = kv.fmt.outer_from_amax(x.abs().amax((0, 2))[:, None])
            kv.store(slots, kv.fmt.quantize(x, kv.outer))
        both.append(kv)
    table = torch.randperm(pages, generator=generator)[: len(lens) * per_row].view(len(lens), per_row).int()
    q = 2 * torch.randn(len(lens), kv_heads * group, dim, generator=generator)
    settings = {"max_len": max(1, *lens)} | settings
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    return Batch(q.to(device, dtype), both[0], both[1], table.to(device), lengths, **settings)


def row_by_row(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Attention of each row over just its own tokens, in `dtype`."""
    out = torch.zeros_like(batch.q, dtype=dtype)
    page, kv_heads, dim = batch.k.page_size, batch.k.data.shape[1], batch.q.shape[-1]
    for b, length in enumerate(batch.lens.tolist()):
        first = max(0, length - batch.window) if batch.window else 0
        t = torch.arange(first, length, device=batch.q.device)
        slots = batch.table[b, t // page].long() * page + t % page
        keys, values = (pages.read(slots, torch.float32).to(dtype).transpose(0, 1) for pages in (batch.k, batch.v))
        q = batch.q[b].to(dtype).view(kv_heads, -1, dim)
        if length:
            out[b] = ((q @ keys.transpose(1, 2) * dim**-0.5).softmax(-1) @ values).flatten(0, 1)
    return out


def check(batch: Batch, low: torch.dtype = torch.float16) -> Tensor:
    """Kernels and reference against FP64; the kernels' result."""
    exact = row_by_row(batch, torch.float64)
    ours = batch.kernels()
    assert ours.dtype == batch.q.dtype
    assert_no_worse_than_torch(ours, row_by_row(batch, low), exact)
    assert_no_worse_than_torch(batch.reference(), row_by_row(batch, low), exact)
    return ours


@pytest.mark.parametrize(("fmt", "dim", "group"), KINDS)
def test_ragged_rows_over_several_chunks(fmt, dim, group):
    check(make_batch(fmt, dim, group, [70, 0, 129], kv_heads=1))


@pytest.mark.parametrize(("fmt", "dim"), [("nvfp4", 128), ("mxfp4", 64), ("none", 64)])
def test_one_chunk_is_written_without_a_merge(fmt, dim):
    batch = make_batch(fmt, dim, 2, [1, 0, 37, 64], chunk=64)
    ours = check(batch)
    assert ours[1].abs().max() == 0
    assert_bit_equal(replace(batch, max_len=65).kernels(), ours)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_a_row_has_the_same_bits_in_any_batch(fmt):
    batch = make_batch(fmt, 64, 2, [100, 33, 150], kv_heads=1)
    alone = Batch(batch.q[:1], batch.k, batch.v, batch.table[:1], batch.lens[:1], max_len=100)
    assert_bit_equal(batch.kernels()[:1], alone.kernels())


@pytest.mark.parametrize(("fmt", "dim"), [("nvfp4", 128), ("nvfp4", 64), ("none", 64)])
@pytest.mark.parametrize("window", [1, 65])
def test_window(fmt, dim, window):
    check(make_batch(fmt, dim, 2, [40, 190], kv_heads=1, window=window))


@pytest.mark.parametrize("page", [16, 64])
def test_page_sizes(page):
    check(make_batch("nvfp4", 128, 1, [90, 17], kv_heads=1, page=page))
    check(make_batch("none", 64, 1, [90, 17], kv_heads=1, page=page))


def shared_batch(fmt: str, dim: int, **settings: Any) -> Batch:
    """Rows 0, 2 and 3 share two pages, row 1 shares nothing; row 3 is inactive."""
    batch = make_batch(fmt, dim, 4, [100, 70, 150, 0], kv_heads=1, **settings)
    batch.table[2:, :2] = batch.table[0, :2]
    device = batch.q.device
    batch.prefix = SharedPrefix(
        torch.tensor([[0, 2, 3], [-1, -1, -1]], dtype=torch.int32, device=device),
        torch.tensor([64, 0, 64, 64], dtype=torch.int32, device=device),
        96,
    )
    return batch


@pytest.mark.parametrize(("fmt", "dim"), [("nvfp4", 128), ("mxfp4", 64), ("none", 64)])
def test_shared_prefix(fmt, dim):
    check(shared_batch(fmt, dim))


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_siblings_do_not_change_a_row(fmt):
    batch = shared_batch(fmt, 64)
    assert batch.prefix is not None
    own = torch.tensor([0, 0, 64, 0], dtype=torch.int32)
    alone = SharedPrefix(torch.tensor([[-1, 2, -1]], dtype=torch.int32), own, 96)
    assert_bit_equal(replace(batch, prefix=alone).kernels()[2], batch.kernels()[2])


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # numpy's, in the interpreter
def test_nan_query_stays_in_its_head():
    batch = make_batch("nvfp4", 64, 2, [20, 70], kv_heads=1)
    clean = batch.kernels()
    batch.q[1, 0, 3] = float("nan")
    ours = batch.kernels()
    assert ours[1, 0].isnan().all()
    ours[1, 0] = clean[1, 0]
    assert_bit_equal(ours, clean)


@pytest.mark.parametrize(("fmt", "dim"), [("nvfp4", 64), ("nvfp4", 96), ("none", 64)])
def test_what_lies_past_the_end_does_not_matter(fmt, dim):
    batch = make_batch(fmt, dim, 2, [20, 33], kv_heads=1)
    clean = batch.kernels()
    for pages in (batch.k, batch.v):
        for tensor in (pages.data, pages.scale):
            if tensor is not None:
                tensor[batch.table[0, 0].item(), :, 20:] = 127 if tensor.dtype == torch.uint8 else float("nan")
                tensor[batch.table[1, 1].item(), :, 1:] = 127 if tensor.dtype == torch.uint8 else float("nan")
    assert_bit_equal(batch.kernels(), clean)


def test_large_scores_do_not_overflow():
    batch = make_batch("nvfp4", 128, 1, [70], kv_heads=1)
    batch.q *= 1e4
    exact = row_by_row(batch, torch.float64)
    assert (batch.kernels() - exact).abs().max() < 1e-3


@triton.jit
def unpack_kernel(WORDS, SCALES, OUT, R: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr):
    at = tl.arange(0, R)[:, None] * 2 + tl.arange(0, 2)[None, :]
    values = unpack(tl.load(WORDS + at), tl.load(SCALES + at).to(tl.uint32), MX, ASM)
    for j in tl.static_range(8):
        tl.store(OUT + at * 8 + j, values[j].to(tl.float32))


def unpacked(fmt: str, asm: bool, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """All codes under all scale bytes that the format's kernel decodes exactly, and what they should be."""
    first, last = (0x08, 0x7E) if fmt == "nvfp4" else (112, 136)
    scales = torch.arange(256, device=device).clamp(first, last).to(torch.uint8)
    words = torch.tensor([0x76543210, 0xFEDCBA98 - 2**32], dtype=torch.int32, device=device).repeat(256, 1)
    out = torch.empty(256, 16, device=device)
    unpack_kernel[(1,)](words, scales[:, None].repeat(1, 2), out, R=256, MX=fmt == "mxfp4", ASM=asm)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    decoded = get_format(fmt).decode_scale(scales)[:, None]
    expected = torch.cat((values, -values)) * decoded / 256
    return out, expected


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_unpack_is_exact(fmt):
    assert_bit_equal(*unpacked(fmt, not INTERPRET, "cpu" if INTERPRET else "cuda"))


def test_supports():
    assert supports(128, 4, "nvfp4", 64) is None
    assert "head_dim 80" in str(supports(80, 4, "nvfp4", 64))
    assert "17 query heads" in str(supports(64, 17, "none", 64))
    assert "page_size 16" in str(supports(64, 1, "nvfp4", 16))
    assert supports(64, 1, "fp8", 16) is None
    assert "power of two" in str(supports(64, 1, "fp8", 48))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 48}, "chunk 48"),
        ({"max_len": 0}, "max_len 0"),
        ({"q": torch.zeros(2, 3, 64)}, "3 query heads"),
        ({"q": torch.zeros(2, 4, 128)}, "queries have 128 dims"),
        ({"lens": torch.zeros(3, dtype=torch.int32)}, r"lengths \(3,\)"),
        ({"lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be contiguous int32"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make_batch("nvfp4", 64, 2, [20, 33]), **change).public()


def test_window_and_prefix_exclude_each_other():
    with pytest.raises(ValueError, match="pass prefix=None"):
        replace(shared_batch("nvfp4", 64), window=8).public()


def test_registered_op():
    batch = shared_batch("mxfp4", 64)
    op = torch.ops.trace_kernels.decode_attention.default
    torch.library.opcheck(op, batch.flat(), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda b: b.public(), fullgraph=True, backend="eager")
    assert_bit_equal(compiled(batch), batch.reference())


GPU_KINDS = [
    ("nvfp4", 128, 4), ("nvfp4", 64, 4), ("nvfp4", 128, 16), ("nvfp4", 96, 3), ("nvfp4", 256, 2),
    ("mxfp4", 128, 8), ("fp8", 128, 4), ("none", 128, 4), ("none", 256, 2),
]  # fmt: skip


def gpu_batch(fmt: str, dim: int, group: int, **settings: Any) -> Batch:
    lens = [1, 0, 513, 4096, 2000, 3071, 64, 1025]
    common = {"kv_heads": 4, "page": 64, "chunk": 512, "device": "cuda", "dtype": torch.bfloat16}
    return make_batch(fmt, dim, group, lens, **(common | settings))


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "dim", "group"), GPU_KINDS)
def test_gpu_against_fp64(fmt, dim, group):
    batch = gpu_batch(fmt, dim, group)
    ours = check(batch, torch.bfloat16)
    assert_bit_equal(replace(batch, max_len=5000).kernels(), ours)
    alone = Batch(batch.q[4:5], batch.k, batch.v, batch.table[4:5], batch.lens[4:5], max_len=2000, chunk=512)
    assert_bit_equal(alone.kernels(), ours[4:5])


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "dtype"), [("nvfp4", torch.float16), ("none", torch.float16), ("none", torch.float32)])
def test_gpu_other_dtypes(fmt, dtype):
    check(gpu_batch(fmt, 64, 2, dtype=dtype), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["nvfp4", "none"])
def test_gpu_window(fmt):
    check(gpu_batch(fmt, 128, 4, window=700), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "dim"), [("nvfp4", 128), ("mxfp4", 64), ("none", 128)])
def test_gpu_shared_prefix(fmt, dim):
    batch = gpu_batch(fmt, dim, 4)
    batch.table[2:6, :8] = batch.table[3, :8]
    rows = torch.tensor([[2, 3, 4, 5], [-1, -1, -1, -1]], dtype=torch.int32, device="cuda")
    shared = torch.tensor([0, 0, 512, 512, 512, 512, 0, 0], dtype=torch.int32, device="cuda")
    batch.prefix = SharedPrefix(rows, shared, 1024)
    ours = check(batch, torch.bfloat16)
    alone = SharedPrefix(torch.where(rows == 4, rows, -1), shared * (batch.lens == 2000), 1024)
    assert_bit_equal(replace(batch, prefix=alone).kernels()[4], ours[4])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["nvfp4", "none"])
def test_gpu_compile_and_graph(fmt):
    batch = gpu_batch(fmt, 128, 4)
    eager = batch.public()
    assert_bit_equal(torch.compile(lambda b: b.public(), fullgraph=True)(batch), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.public()
    batch.lens.copy_(batch.lens.flip(0))
    graph.replay()
    assert_bit_equal(out, batch.public())


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_gpu_assembly_and_plain_arithmetic_agree(fmt):
    assert_bit_equal(unpacked(fmt, True, "cuda")[0], unpacked(fmt, False, "cuda")[0])
