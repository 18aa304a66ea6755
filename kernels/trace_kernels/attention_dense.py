"""Stage one of decode attention over pages of BF16, FP16, FP32 or FP8: the path without FP4, and its honest rival.

Bandwidth is the only limit here (a BF16 element may cost 13.8 instructions at full speed), so the kernel is the plain
one: query heads of one KV head fill the rows of the product with K, padded to 16, and tokens its columns; K and V are
read once, in place, from the same pages and through the same tables as the FP4 kernel. FP8 bytes become FP16 in
registers, which is exact, and meet a query and probabilities in FP16; FP32 multiplies in full precision.

    scores [M, BN] = q [M, D] . K [BN, D]^T      acc [M, D] += p [M, BN] . V [BN, D]      M = query heads, padded to 16

Bytes moved: D elements per token, head, and K or V. Tokens past the end may hold NaN from an earlier owner of the page:
their scores are replaced and their V rows are read as zeros, since 0 * NaN would not be 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trace_kernels.attention_merge import leading_row, program_columns, store_columns, token_span


@triton.jit
def dense_kernel(
    Q, K, K_OUTER, V, V_OUTER, TABLE, SEQ_LENS, PREFIX_LENS, ROWS, OUT, PARTS, LSE,
    factor, batch, kv_heads, table_width, n, blocks, first_slot,
    D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program: BN tokens at a time of one chunk, one KV head, HEADS query heads. `factor`: softmax_scale log2(e).

    Absent tensors are None: outer scales (but for FP8), PREFIX_LENS, ROWS (the own stage), PARTS and LSE (one slot).
    """
    unit, kv_head, chunk = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads, tl.program_id(1)
    DP: tl.constexpr = triton.next_power_of_2(D)
    dtype: tl.constexpr = tl.float16 if FP8 else K.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    token, dim = tl.arange(0, BN), tl.arange(0, DP)
    row, head, active = program_columns(tl.arange(0, HEADS), unit, SEQ_LENS, ROWS, n, blocks, GROUP, HEADS)
    lead = leading_row(row, active, unit, blocks, ROWS)
    if lead < 0:
        return
    first, stop = token_span(lead, chunk, SEQ_LENS, PREFIX_LENS, CHUNK, WINDOW, ROWS is not None)
    if PARTS is not None and first >= stop:  # without parts, an empty row still has to be written
        return

    at = Q + ((row * kv_heads + kv_head) * GROUP + head)[:, None] * D + dim[None, :]
    q = tl.load(at, mask=active[:, None] & (dim < D)[None, :], other=0.0).to(dtype)
    scale = factor if K_OUTER is None else tl.load(K_OUTER + kv_head) * factor
    acc = tl.zeros((HEADS, DP), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    peak = tl.full((HEADS,), -float("inf"), tl.float32)

    begin = first // BN * BN
    pages = TABLE + lead * table_width
    page = tl.load(pages + begin // P)
    offset = token[:, None] * D + dim[None, :]
    for t in range(begin, stop, BN):
        place = ((page.to(tl.int64) * kv_heads + kv_head) * P + t % P) * D
        page = tl.load(pages + tl.minimum(t + BN, stop - 1) // P)  # ahead of its use
        visible = t + token < stop
        if WINDOW > 0:
            visible = visible & (t + token >= first)
        at_k = K + place + offset
        k = tl.load(at_k) if DP == D else tl.load(at_k, mask=(dim < D)[None, :], other=0)
        v = tl.load(V + place + offset, mask=visible[:, None] & (dim < D)[None, :], other=0)
        if FP8:
            k = k.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            v = v.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        score = tl.where(visible[None, :], score, -float("inf"))
        highest = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - highest[:, None])
        decay = tl.exp2(peak - highest)
        total = total * decay + tl.sum(p, 1)
        peak = highest
        acc = tl.dot(p.to(dtype), v, acc * decay[:, None], input_precision=precision)

    outer = 1.0 if V_OUTER is None else tl.load(V_OUTER + kv_head)
    total = tl.where(total == 0.0, 1.0, total)  # an empty row
    store_columns(
        acc * (outer / total)[:, None], peak + tl.log2(total), row, kv_head * GROUP + head, active, first_slot + chunk,
        OUT, PARTS, LSE, batch, kv_heads * GROUP, D,
    )  # fmt: skip
