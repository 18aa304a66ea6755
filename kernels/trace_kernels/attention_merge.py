"""What the stages of decode attention share: which tokens and heads a program has, where its result goes, the merge.

A sequence is cut into chunks of a fixed number of tokens, so the work of a program never depends on the batch, and a
row's result is the same bits whoever else is in it. A program attends to one chunk under one KV head:

    own stage       unit = a row of the batch (and a block of its G heads); tokens from the end of the shared prefix on
    prefix stage    unit = a prompt group and a block of its n x G query heads; tokens of the prefix

    row of 5 chunks   |  prefix 0  |  prefix 1 |    own 0   |    own 1   | own 2 |
    slots             0            1     ...   prefix_slots, ...                        S slots in all

    parts FP32 [S, B, H, D]   softmax-weighted mean of V over the chunk
    lse   FP32 [S, B, H]      log2 of the sum of 2 ** score over the chunk

The second kernel reads just the slots that a row has and weighs them by 2 ** (lse - largest lse), in order. With a
single slot stage one writes the result itself; the merge of one part multiplies by one, so both give the same bits.
Bytes moved: 4 D per query head and chunk, written and read, against 2 x 0.5625 D x chunk for NVFP4 K and V: 3 % each
way at group 4 and chunks of 512.

What was left out: a last-program-merges counter, which saves a launch but needs a zeroed counter per row and layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def program_columns(column, unit, SEQ_LENS, ROWS, n, blocks, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Row of the batch, query head within the group, and whether there is one, for `column` in 0..HEADS-1."""
    query = unit % blocks * HEADS + column
    if ROWS is None:
        row, head, active = column * 0 + unit // blocks, query, query < GROUP
    else:
        member = query // GROUP
        row = tl.load(ROWS + unit // blocks * n + member, mask=member < n, other=-1)
        head, active = query % GROUP, tl.load(SEQ_LENS + row, mask=row >= 0, other=0) > 0
    return row, head, active


@triton.jit
def leading_row(row, active, unit, blocks, ROWS):
    """The row whose page table a program follows; -1 where no row of a prompt group is left."""
    return unit // blocks if ROWS is None else tl.max(tl.where(active, row, -1), 0)


@triton.jit
def token_span(row, chunk, SEQ_LENS, PREFIX_LENS, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """First token and end of a chunk of `row`; empty where first >= end."""
    if SHARED:
        end = tl.load(PREFIX_LENS + row)
        first = chunk * CHUNK
    else:
        end = tl.load(SEQ_LENS + row)
        first = chunk * CHUNK
        if PREFIX_LENS is not None:
            first += tl.load(PREFIX_LENS + row)
    stop = tl.minimum(first + CHUNK, end)
    if WINDOW > 0:
        first = tl.maximum(first, end - WINDOW)
    return first, stop


@triton.jit
def store_columns(value, lse, row, head, active, slot, OUT, PARTS, LSE, batch, heads, D: tl.constexpr):
    """Store `value` [columns, D padded to a power of two]: the result itself, or one part and its log-sum-exp."""
    d = tl.arange(0, value.shape[1])
    mask = active[:, None] & (d < D)[None, :]
    if PARTS is None:
        place = (row * heads + head).to(tl.int64) * D
        tl.store(OUT + place[:, None] + d[None, :], value.to(OUT.dtype.element_ty), mask=mask)
    else:
        place = slot.to(tl.int64) * (batch * heads) + row * heads + head
        tl.store(PARTS + place[:, None] * D + d[None, :], value, mask=mask)
        tl.store(LSE + place, lse, mask=active)


@triton.jit
def merge_kernel(
    PARTS, LSE, SEQ_LENS, PREFIX_LENS, OUT, batch, heads, prefix_slots,
    D: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program: one query head of one row. SLOTS parts are read at a time."""
    row, head = tl.program_id(1), tl.program_id(0)
    end = tl.load(SEQ_LENS + row)
    prefix = 0
    if PREFIX_LENS is not None:
        prefix = tl.minimum(tl.load(PREFIX_LENS + row), end)
    skipped = 0
    if WINDOW > 0:
        skipped = tl.maximum(end - WINDOW, 0) // CHUNK
    prefix_count = (prefix + CHUNK - 1) // CHUNK
    count = prefix_count + (end - prefix + CHUNK - 1) // CHUNK
    d: tl.constexpr = triton.next_power_of_2(D)
    dim = tl.arange(0, d)
    acc = tl.zeros((d,), tl.float32)
    total = tl.zeros((1,), tl.float32)
    peak = tl.full((1,), -float("inf"), tl.float32)
    for i in range(skipped, count, SLOTS):
        index = i + tl.arange(0, SLOTS)
        valid = index < count
        slot = tl.where(index < prefix_count, index, index - prefix_count + prefix_slots)
        place = slot.to(tl.int64) * (batch * heads) + row * heads + head
        lse = tl.load(LSE + place, mask=valid, other=-float("inf"))
        part = tl.load(PARTS + place[:, None] * D + dim[None, :], mask=valid[:, None] & (dim < D)[None, :], other=0.0)
        highest = tl.maximum(peak, tl.max(lse, 0, keep_dims=True))
        weight = tl.exp2(lse - highest)
        decay = tl.exp2(peak - highest)
        total = total * decay + tl.sum(weight, 0, keep_dims=True)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        peak = highest
    value = acc / tl.where(count > skipped, total, 1.0)
    place = (row * heads + head).to(tl.int64) * D
    tl.store(OUT + place + dim, value.to(OUT.dtype.element_ty), mask=dim < D)


def merge(
    parts_SBHD: Tensor,
    lse_SBH: Tensor,
    seq_lens_B: Tensor,
    prefix_lens_B: Tensor | None,
    out_BHD: Tensor,
    *,
    prefix_slots: int,
    chunk: int,
    window: int,
) -> None:
    """Launch the merge of all rows into `out_BHD`; rows of length 0 become zeros. `window` 0 means none."""
    _, batch, heads, dim = parts_SBHD.shape
    assert lse_SBH.dtype == parts_SBHD.dtype == torch.float32
    merge_kernel[(heads, batch)](
        parts_SBHD, lse_SBH, seq_lens_B, prefix_lens_B, out_BHD, batch, heads, prefix_slots,
        D=dim, CHUNK=chunk, WINDOW=window, SLOTS=8, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
