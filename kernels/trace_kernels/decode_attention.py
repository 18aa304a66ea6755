"""Attention of one new token per sequence over paged K and V: most of the time of a long rollout.

    q [B, H, D]     one query per sequence, at position seq_lens - 1; its own K and V are already in the pages
    k, v            KVPages of H / G heads: FP4 (attention_fp4.py), or values and FP8 (attention_dense.py)
    page_table      int32 [B, W]: page_table[b, t // page_size] holds token t of row b
    out [B, H, D]   zeros where seq_lens is 0

What decides the design:

  * K and V are read once, at their 4.5 bits, by all query heads of a KV head; nothing is dequantised in memory.
  * The launch depends on shapes and on `max_len`, a bound that the caller knows, never on lengths in device memory: a
    CUDA graph can hold it. A program beyond its sequence exits at once.
  * Work is cut by a fixed number of tokens, not by the size of the batch. That balances ragged batches, fills the GPU
    at batch 1 as at batch 256, and makes a row's result the same bits in any batch, so that a rollout can be replayed.
  * Rows that share a prompt (`SharedPrefix`) read its pages once: a launch over the prefix with the heads of all of
    them as columns, a launch over each row's own tokens, one merge.

    prefix stage, groups x heads x chunks --+
                                            +-->  parts, lse  -->  merge  -->  out      (a single chunk: out directly)
    own stage, B x heads x chunks ----------+

What was left out: a persistent grid. Programs that exit are not free, so a `max_len` far beyond the longest sequence is
felt; capture graphs for a few bounds instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from trace_kernels.attention_dense import dense_kernel
from trace_kernels.attention_fp4 import fp4_kernel
from trace_kernels.attention_merge import merge
from trace_kernels.kv_pages import KVPages
from trace_kernels.launch import INTERPRET, words
from trace_kernels.quantize import get_format

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP = 16


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts that several rows of a batch share, page by page.

    Args:
        group_rows_Rn: int32 [R, n], the rows of each group; -1 for none.
        prefix_lens_B: int32 [B], how many first tokens of a row are shared: a multiple of the page size, 0 for rows in
            no group. Every active row with more must be in exactly one group, and the rows of a group agree.
        max_prefix_len: upper bound on `prefix_lens_B`.
    """

    group_rows_Rn: Tensor
    prefix_lens_B: Tensor
    max_prefix_len: int


@dataclass(frozen=True)
class Launch:
    """Tokens of a tile (cut to the page size), warps and pipeline stages; `registers` caps what a thread may use."""

    tokens: int
    warps: int
    stages: int
    registers: int | None = None


# (kind of pages, head dim) -> launch with the fewest columns (see _column_limits), launch with more
LAUNCHES: dict[tuple[str, int], tuple[Launch, Launch]] = {
    ("fp4", 64): (Launch(64, 1, 3), Launch(128, 1, 3)),
    ("fp4", 96): (Launch(32, 1, 3), Launch(32, 1, 3)),
    ("fp4", 128): (Launch(32, 1, 3), Launch(64, 1, 3)),
    ("fp4", 256): (Launch(32, 1, 2), Launch(32, 1, 2)),
    ("fp8", 64): (Launch(64, 4, 3), Launch(64, 4, 3)),
    ("fp8", 96): (Launch(64, 4, 3), Launch(64, 4, 3)),
    ("fp8", 128): (Launch(64, 4, 3), Launch(64, 4, 3)),
    ("fp8", 256): (Launch(64, 4, 2), Launch(64, 4, 2)),
    ("16 bit", 64): (Launch(64, 4, 3), Launch(64, 4, 3)),
    ("16 bit", 96): (Launch(64, 4, 3), Launch(64, 4, 3)),
    ("16 bit", 128): (Launch(64, 4, 3), Launch(64, 4, 3)),
    ("16 bit", 256): (Launch(32, 4, 3), Launch(32, 4, 3)),
    ("32 bit", 64): (Launch(32, 4, 2), Launch(32, 4, 2)),
    ("32 bit", 96): (Launch(32, 4, 2), Launch(32, 4, 2)),
    ("32 bit", 128): (Launch(32, 4, 2), Launch(32, 4, 2)),
    ("32 bit", 256): (Launch(16, 4, 2), Launch(16, 4, 2)),
}


def supports(head_dim: int, group: int, fmt: str, page_size: int) -> str | None:
    """Why the kernels cannot take these shapes, or None when they can.

    Args:
        head_dim: D.
        group: query heads per KV head.
        fmt: format of K and V: `none`, `nvfp4`, `mxfp4` or `fp8`.
        page_size: tokens of a page.
    """
    smallest = 32 if fmt in ("nvfp4", "mxfp4") and head_dim == 64 else 16
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {HEAD_DIMS}"
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads per KV head, more than {MAX_GROUP}"
    if not smallest <= page_size <= 256 or page_size & (page_size - 1):
        return f"page_size {page_size} is not a power of two in {smallest}..256"
    return None


def decode_attention(
    q_BHD: Tensor,
    k: KVPages,
    v: KVPages,
    page_table_BW: Tensor,
    seq_lens_B: Tensor,
    *,
    softmax_scale: float,
    window: int | None = None,
    max_len: int,
    chunk: int = 512,
    prefix: SharedPrefix | None = None,
) -> Tensor:
    """Attention of one query token per sequence over its pages.

    Args:
        q_BHD: queries at positions `seq_lens_B - 1`; with BF16, FP16 or FP32 pages, best of the same dtype.
        k: pages of K, H / G heads.
        v: pages of V, of the same format and shape.
        page_table_BW: int32, the page of each `page_size` tokens of a row; entries beyond its length are not read.
        seq_lens_B: int32, tokens of each row, the query's included; 0 for an inactive row.
        softmax_scale: factor on the scores.
        window: only the last `window` positions are seen; None for all.
        max_len: upper bound on `seq_lens_B`; it sets the size of the launch, not the result.
        chunk: tokens per program; the result depends on it by rounding only.
        prefix: which rows share their first pages.

    Returns:
        [B, H, D] in the dtype of `q_BHD`; zeros for rows of length 0.

    Raises:
        ValueError: for shapes that `supports` refuses, tensors of the wrong type or layout, a chunk that is no multiple
            of 128 (or of the page size, if smaller), or a window together with a shared prefix.
    """
    _check(q_BHD, k, v, page_table_BW, seq_lens_B, window=window, max_len=max_len, chunk=chunk, prefix=prefix)
    return _decode_attention(
        q_BHD, k.data, k.scale, k.outer, v.data, v.scale, v.outer, page_table_BW, seq_lens_B,
        None if prefix is None else prefix.group_rows_Rn, None if prefix is None else prefix.prefix_lens_B,
        "none" if k.fmt is None else k.fmt.name, softmax_scale, window or 0, max_len,
        0 if prefix is None else prefix.max_prefix_len, chunk,
    )  # fmt: skip


def _check(
    q: Tensor,
    k: KVPages,
    v: KVPages,
    table: Tensor,
    lens: Tensor,
    *,
    window: int | None,
    max_len: int,
    chunk: int,
    prefix: SharedPrefix | None,
) -> None:
    batch, heads, dim = q.shape
    kv_heads, page_size = k.data.shape[1:3]
    fmt = "none" if k.fmt is None else k.fmt.name
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be split over {kv_heads} KV heads")
    reason = supports(dim, heads // kv_heads, fmt, page_size)
    if k.fmt != v.fmt or k.data.shape != v.data.shape or k.data.dtype != v.data.dtype:
        reason = "K and V pages differ in format, shape or dtype"
    elif dim != k.head_dim:
        reason = f"queries have {dim} dims, the pages {k.head_dim}"
    elif table.shape[0] != batch or lens.shape != (batch,):
        reason = f"batch {batch}, but page table {tuple(table.shape)} and lengths {tuple(lens.shape)}"
    elif chunk <= 0 or chunk % min(page_size, 128):
        reason = f"chunk {chunk} is no multiple of {min(page_size, 128)}"
    elif max_len < 1:
        reason = f"max_len {max_len} leaves no token"
    if reason:
        raise ValueError(reason)
    _check_index(table, "page_table")
    _check_index(lens, "seq_lens")
    _check_prefix(prefix, batch, window)


def _check_prefix(prefix: SharedPrefix | None, batch: int, window: int | None) -> None:
    if prefix is None:
        return
    if window:
        raise ValueError("a shared prefix cannot be combined with a window; pass prefix=None for windowed layers")
    if prefix.prefix_lens_B.shape != (batch,) or prefix.group_rows_Rn.ndim != 2:
        raise ValueError(f"prefix_lens must be [{batch}] and group_rows [groups, rows of each]")
    _check_index(prefix.group_rows_Rn, "group_rows")
    _check_index(prefix.prefix_lens_B, "prefix_lens")


def _check_index(index: Tensor, name: str) -> None:
    if index.dtype != torch.int32 or not index.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32, not {index.dtype} with strides {index.stride()}")


def decode_attention_reference(
    q_BHD: Tensor,
    k_data: Tensor,
    k_scale: Tensor | None,
    k_outer: Tensor | None,
    v_data: Tensor,
    v_scale: Tensor | None,
    v_outer: Tensor | None,
    page_table_BW: Tensor,
    seq_lens_B: Tensor,
    group_rows_Rn: Tensor | None,
    prefix_lens_B: Tensor | None,
    fmt: str,
    softmax_scale: float,
    window: int,
    max_len: int,
    max_prefix_len: int,
    chunk: int,
) -> Tensor:
    """The same in plain torch, FP32. Shared prefixes and chunks change nothing here; `window` 0 is none."""
    batch, _, dim = q_BHD.shape
    kv_heads, page_size = k_data.shape[1:3]
    k, v = (
        KVPages(get_format(fmt), data, scale, outer, dim)
        for data, scale, outer in ((k_data, k_scale, k_outer), (v_data, v_scale, v_outer))
    )
    position = torch.arange(min(max_len, page_table_BW.shape[1] * page_size), device=q_BHD.device)
    visible_BL = position < seq_lens_B[:, None]
    if window:
        visible_BL &= position >= seq_lens_B[:, None] - window
    slots_BL = page_table_BW[:, position // page_size].long() * page_size + position % page_size
    slots_BL = torch.where(visible_BL, slots_BL, 0)
    keys = k.read(slots_BL, torch.float32)
    values = torch.where(visible_BL[..., None, None], v.read(slots_BL, torch.float32), 0.0)  # not 0 * NaN
    q = q_BHD.float().unflatten(1, (kv_heads, -1))
    scores = torch.einsum("bkgd,blkd->bkgl", q, keys) * softmax_scale
    weights = scores.masked_fill(~visible_BL[:, None, None], -math.inf).softmax(-1)
    out = torch.einsum("bkgl,blkd->bkgd", weights, values).flatten(1, 2)
    return torch.where(seq_lens_B.view(batch, 1, 1) > 0, out, 0.0).to(q_BHD.dtype)


def decode_attention_triton(
    q_BHD: Tensor,
    k_data: Tensor,
    k_scale: Tensor | None,
    k_outer: Tensor | None,
    v_data: Tensor,
    v_scale: Tensor | None,
    v_outer: Tensor | None,
    page_table_BW: Tensor,
    seq_lens_B: Tensor,
    group_rows_Rn: Tensor | None,
    prefix_lens_B: Tensor | None,
    fmt: str,
    softmax_scale: float,
    window: int,
    max_len: int,
    max_prefix_len: int,
    chunk: int,
) -> Tensor:
    """The same by the kernels: one or two launches of stage one, and a merge unless there is only one chunk."""
    (batch, heads, dim), kv_heads = q_BHD.shape, k_data.shape[1]
    out = torch.empty_like(q_BHD, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    shared = group_rows_Rn is not None and max_prefix_len > 0
    prefix_lens_B = prefix_lens_B if shared else None
    prefix_slots = triton.cdiv(max_prefix_len, chunk) if shared else 0
    own_slots = triton.cdiv(max_len, chunk)
    slots = prefix_slots + own_slots
    parts = lse = None
    if slots > 1:
        parts = torch.empty(slots, batch, heads, dim, dtype=torch.float32, device=q_BHD.device)
        lse = torch.empty(slots, batch, heads, dtype=torch.float32, device=q_BHD.device)
    kind, kernel, pages = _pages(fmt, k_data, k_scale, k_outer, v_data, v_scale, v_outer)
    arguments = pages | {
        "Q": q_BHD.contiguous(), "OUT": out, "PARTS": parts, "LSE": lse, "factor": softmax_scale * math.log2(math.e),
        "TABLE": page_table_BW, "SEQ_LENS": seq_lens_B, "PREFIX_LENS": prefix_lens_B, "batch": batch,
        "kv_heads": kv_heads, "table_width": page_table_BW.shape[1], "D": dim, "GROUP": heads // kv_heads,
        "P": k_data.shape[2], "CHUNK": chunk, "WINDOW": window,
    }  # fmt: skip
    if shared:
        assert group_rows_Rn is not None
        groups, n = group_rows_Rn.shape
        _stage_one(kernel, arguments, kind, units=groups, rows=group_rows_Rn, n=n, chunks=prefix_slots, first_slot=0)
    _stage_one(kernel, arguments, kind, units=batch, rows=None, n=1, chunks=own_slots, first_slot=prefix_slots)
    if parts is not None and lse is not None:
        merge(parts, lse, seq_lens_B, prefix_lens_B, out, prefix_slots=prefix_slots, chunk=chunk, window=window)
    return out


def _pages(
    fmt: str,
    k_data: Tensor,
    k_scale: Tensor | None,
    k_outer: Tensor | None,
    v_data: Tensor,
    v_scale: Tensor | None,
    v_outer: Tensor | None,
) -> tuple[str, Any, dict[str, Any]]:
    """Kind of launch, kernel, and the arguments that depend on the format."""
    outers = {"K_OUTER": k_outer, "V_OUTER": v_outer}
    if fmt in ("nvfp4", "mxfp4"):
        data = {"K": words(k_data), "K_SCALE": k_scale, "V": words(v_data), "V_SCALE": v_scale}
        return "fp4", fp4_kernel, data | outers | {"MX": fmt == "mxfp4", "ASM": not INTERPRET}
    kind = "fp8" if fmt == "fp8" else {2: "16 bit", 4: "32 bit"}[k_data.element_size()]
    return kind, dense_kernel, {"K": k_data, "V": v_data, "FP8": fmt == "fp8"} | outers


def _stage_one(
    kernel: Any,
    arguments: dict[str, Any],
    kind: str,
    *,
    units: int,
    rows: Tensor | None,
    n: int,
    chunks: int,
    first_slot: int,
) -> None:
    """One launch: `units` rows of the batch or prompt groups of `n`, times blocks of heads, KV heads and chunks."""
    columns, dim = n * arguments["GROUP"], arguments["D"]
    smallest, largest = _column_limits(kind, dim)
    block = min(largest, max(smallest, triton.next_power_of_2(columns)))
    blocks = triton.cdiv(columns, block)
    launch = LAUNCHES[kind, dim][block > smallest]
    kernel[(units * blocks * arguments["kv_heads"], chunks)](
        **arguments, ROWS=rows, n=n, blocks=blocks, first_slot=first_slot, HEADS=block,
        BN=min(launch.tokens, arguments["P"]),
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, enable_fp_fusion=True,
    )  # fmt: skip


def _column_limits(kind: str, dim: int) -> tuple[int, int]:
    """Fewest and most query heads of one program. FP4: more than 16 columns (8 at D = 256) spill registers."""
    if kind != "fp4":
        return 16, 32
    halves = 2 if dim == 64 else 1
    return 8 // halves, (8 if dim == 256 else 16) // halves


_decode_attention = torch.library.custom_op(
    "trace_kernels::decode_attention", decode_attention_reference, mutates_args=(), device_types="cpu"
)
_decode_attention.register_kernel("cuda")(decode_attention_triton)


@_decode_attention.register_fake
def _(q_BHD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q_BHD, memory_format=torch.contiguous_format)
