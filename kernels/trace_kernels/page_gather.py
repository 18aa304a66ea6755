"""K or V of whole sequences out of their pages, dequantised, tokens one after another: what prefill attention reads.

A prompt that shares its beginning with others, or is prefilled in pieces, attends to tokens that lie quantised in
pages. The dense attention of torch wants them in one tensor. By indexing, torch would write the gathered codes, unpack
them to a byte each, and pass over FP32 values twice; here each byte is read once and each value written once.

    pages  [pages, H, P, W]  (kv_pages.py)      table [B, pages of a sequence]
    tokens of sequence b  ->  rows starts[b] ... starts[b] + seq_lens[b] - 1 of [total, H, D]

One program takes 32 tokens of one head of one sequence; the grid follows from shapes alone (the table's width), and the
programs beyond a sequence's end leave at once. Bytes moved per element: 9/16 in, 2 out (FP4 to BF16).

What was left out: handing codes to a prefill attention of our own. Prefill is bound by its matmuls.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.kv_pages import KVPages
from trace_kernels.quantize import get_format

_TOKENS = 32


@triton.jit
def _e4m3_value(byte):
    """FP32 values of E4M3 bytes (uint8): through FP16, whose exponent is 8 larger; subnormals come out right."""
    wide = byte.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _gather_kernel(
    DATA,
    SCALE,
    OUTER,
    TABLE,
    LENGTHS,
    STARTS,
    OUT,
    table_width,
    P: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    KIND: tl.constexpr,
):
    """KIND 0: values, 1: E4M3 bytes, 2: E2M1 under E4M3, 3: E2M1 under E8M0. A row: G groups of B elements, padded."""
    token = tl.program_id(0) * T + tl.arange(0, T)
    head, sequence = tl.program_id(1), tl.program_id(2)
    length = tl.load(LENGTHS + sequence)
    if tl.program_id(0) * T >= length:
        return
    inside = token < length
    page = tl.load(TABLE + sequence * table_width + token // P, mask=inside, other=0).to(tl.int64)
    slot = (page * H + head) * P + token % P
    g, b = tl.arange(0, G), tl.arange(0, B)
    element = g[:, None] * B + b[None, :]
    outer = 1.0
    if OUTER is not None:
        outer = tl.load(OUTER + head)
    if KIND < 2:
        data = tl.load(DATA + slot[:, None, None] * W + element[None], mask=inside[:, None, None] & (element < D)[None])
        value = _e4m3_value(data) * outer if KIND == 1 else data.to(tl.float32)
    else:
        pair = g[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
        packed = tl.load(DATA + slot[:, None, None] * W + pair[None], mask=inside[:, None, None] & (pair < W)[None])
        groups: tl.constexpr = W * 2 // B
        byte = tl.load(
            SCALE + slot[:, None] * groups + g[None, :], mask=inside[:, None] & (g < groups)[None, :], other=8
        )
        scale = fp4.e4m3_scale_value(byte.to(tl.int32)) if KIND == 2 else fp4.e8m0_scale_value(byte.to(tl.int32))
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), (T, G, B)).to(tl.int32)
        value = (fp4.e2m1_value(codes) * scale[:, :, None]) * outer
    row = tl.load(STARTS + sequence).to(tl.int64) + token
    out = OUT + (row[:, None, None] * H + head) * D + element[None]
    tl.store(out, value.to(OUT.dtype.element_ty), mask=inside[:, None, None] & (element < D)[None])


def gather_pages_reference(
    data: Tensor,
    scale: Tensor | None,
    outer: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    total: int,
    head_dim: int,
    fmt: str,
    dtype: torch.dtype,
) -> Tensor:
    """`gather_pages` in torch, by `KVPages.read`."""
    pages = KVPages(get_format(fmt), data, scale, outer, head_dim)
    out = torch.empty(total, data.shape[1], head_dim, dtype=dtype, device=data.device)
    for table, length, start in zip(page_table.long(), seq_lens.tolist(), starts.tolist(), strict=True):
        token = torch.arange(length, device=data.device)
        slots = table[token // pages.page_size] * pages.page_size + token % pages.page_size
        out[start : start + length] = pages.read(slots, dtype)
    return out


def gather_pages_triton(
    data: Tensor,
    scale: Tensor | None,
    outer: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    total: int,
    head_dim: int,
    fmt: str,
    dtype: torch.dtype,
) -> Tensor:
    """`gather_pages` by one kernel."""
    _, heads, page_size, width = data.shape
    sequences, table_width = page_table.shape
    out = torch.empty(total, heads, head_dim, dtype=dtype, device=data.device)
    block_size = {"nvfp4": 16, "mxfp4": 32}.get(fmt, 16)
    grid = (triton.cdiv(table_width * page_size, _TOKENS), heads, sequences)
    _gather_kernel[grid](
        data,
        scale,
        outer,
        page_table.contiguous(),
        seq_lens,
        starts,
        out,
        table_width,
        P=page_size,
        H=heads,
        D=head_dim,
        W=width,
        T=_TOKENS,
        G=triton.next_power_of_2(triton.cdiv(head_dim, block_size)),
        B=block_size,
        KIND=("none", "fp8", "nvfp4", "mxfp4").index(fmt),
    )
    return out


_GATHER = torch.library.custom_op(
    "trace_kernels::gather_pages",
    gather_pages_triton,
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor data, Tensor? scale, Tensor? outer, Tensor page_table, Tensor seq_lens, Tensor starts, "
    "SymInt total, int head_dim, str fmt, ScalarType dtype) -> Tensor",
)
_GATHER.register_kernel("cpu", gather_pages_reference)


@_GATHER.register_fake
def _(data: Tensor, *rest: Any) -> Tensor:
    *_, total, head_dim, _fmt, dtype = rest
    return data.new_empty(total, data.shape[1], head_dim, dtype=dtype)


def gather_pages(
    pages: KVPages, page_table_BW: Tensor, seq_lens_B: Tensor, starts_B: Tensor, total: int, dtype: torch.dtype
) -> Tensor:
    """Dequantised K or V of whole sequences, [total, H, D] in `dtype`.

    Args:
        pages: of one layer.
        page_table_BW: int32 [B, W], the pages of each sequence; entries beyond its end are not read.
        seq_lens_B: int32 or int64 [B], tokens per sequence, at most W times the page size.
        starts_B: int32 or int64 [B] or longer, the row of each sequence's first token.
        total: rows of the result; those of no sequence are left undefined.
        dtype: of the result.

    Raises:
        ValueError: if the three tensors do not speak of the same number of sequences.
    """
    sequences = page_table_BW.shape[0]
    if seq_lens_B.shape[0] != sequences or starts_B.shape[0] < sequences:
        shapes = [tuple(t.shape) for t in (page_table_BW, seq_lens_B, starts_B)]
        raise ValueError(f"page table, lengths and starts disagree about the number of sequences: {shapes}")
    name = "none" if pages.fmt is None else pages.fmt.name
    starts = starts_B[:sequences]
    tensors = (pages.data, pages.scale, pages.outer, page_table_BW, seq_lens_B, starts)
    return _GATHER(*tensors, total, pages.head_dim, name, dtype)
