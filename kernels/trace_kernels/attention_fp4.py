"""Stage one of decode attention over FP4 pages: the kernel that the speed of a rollout hangs on.

At 4.3 TB/s an H200 delivers FP4 elements so fast that a kernel may spend 3.9 instructions on each, unpacking, both
products and softmax together. Everything here follows from that number:

  * Codes are read as 32-bit words, eight per word: nibble j of word w is element 8w + j. Both products are sums over j
    of products over words, so a nibble never has to move to the place of its element; the query and the result are
    permuted instead, once per program.
  * A code becomes the FP16 bits `s000eem0 00000000` (value x 2**-14) by shifts and masks, two words at a time. Its
    block scale becomes FP16 bits worth 2**6 times the scale; the product is exact, value x 2**-8. The scale is
    multiplied in the same piece of assembly: afterwards, the compiler would send 16-bit tiles through shared memory.
  * Scores are transposed, [tokens, columns]: tokens fill the 16 rows of a matrix instruction and the query heads its
    8 columns, where `q k^T` would pad 2 or 4 heads to 16 rows.
  * One warp per program, since the product with V has just 16 rows for any number of warps. Programs give parallelism.
  * Shared memory is the second limit: four warps share it. Two details of `load_tile` halve its traffic. Loaded as
    [rows, words], V would be stored transposed, 4 bytes at a time with 8-way bank conflicts, because its consumer is a
    transposed operand; a dimension of size one hides that from the compiler, and both tiles arrive by 16-byte copies.
    And the four lanes that read one word of V hold every fourth row; swapping bits 0 and 2 of the row number puts two
    of them on odd rows, the other half of the banks. K is fetched in the swapped order, V is read in it.

A row of a tile is 16 words (32 for D = 256). With D = 64 it is two tokens; the columns are doubled, one half has the
query in words 0..7 and sees the even tokens, the other has it in words 8..15 and sees the odd ones. Each half keeps its
own softmax and they are merged at the end. With D = 96 a row is 12 words, read as 16 under a mask.

    words   |w0 w1 ... w7|w8 ... w15|      D = 64:  even token | odd token       even columns | q | 0 |
    scales  |s0 s0 s1 s1 ...        |                                            odd columns  | 0 | q |

Scales: E4M3 bytes must be normal codes (ours are), `s * 128 + 0x3800`. E8M0 bytes are clamped to 107..136, block scales
2**-20 ... 2**9, `(s - 106) << 10`; values below 2**-16 lose bits. Neither has a NaN: 0x7F decodes to 480. A NaN in the
cache is therefore seen in the step that makes it, when the query comes from the same hidden state; a NaN in the query
gives NaN in the output of its head and nowhere else. Tokens past the end are finite whatever bytes are there, so only
their scores are masked.

Bytes moved: D/2 + D/16 per token, head, and K or V, once; no page is read twice within a row.
What was left out: skipping the rescaling of the accumulators when no maximum moved (3 % of the instructions).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trace_kernels.attention_merge import leading_row, program_columns, store_columns, token_span


def _unpack_assembly(scale: str) -> str:
    """Words A, B ($8, $9) with their scales ($10, $11) to eight registers: register j = nibbles j of A and B."""
    lines = [
        ".reg .b32 l, h, s, m, sc;",
        "prmt.b32 sc, $10, $11, 0x5410;",
        scale,
        "prmt.b32 l, $8, $9, 0x5410;",
        "prmt.b32 h, $8, $9, 0x7632;",
    ]
    for j in range(8):
        half, k = "lh"[j // 4], j % 4
        sign = half if k == 3 else "s"
        lines.append(f"shr.u32 m, {half}, 3;" if k == 3 else f"shl.b32 s, {half}, {12 - 4 * k};")
        lines.append("" if k == 3 else f"shl.b32 m, {half}, {9 - 4 * k};")
        lines.append("and.b32 m, m, 0x0E000E00;")
        lines.append(f"lop3.b32 s, {sign}, 0x80008000, m, 0xEA;")
        lines.append(f"mul.f16x2 ${j}, s, sc;")
    return "{\n" + "\n".join(lines) + "\n}"


# Two scale bytes in the halves of `sc` to FP16 bits. A multiply-add cannot carry between the halves of the sum.
UNPACK_NVFP4 = tl.constexpr(_unpack_assembly("mad.lo.u32 sc, sc, 128, 0x38003800;"))
UNPACK_MXFP4 = tl.constexpr(
    _unpack_assembly(
        "mov.b32 s, 0x006B006B; max.u16x2 sc, sc, s; mov.b32 s, 0x00880088; min.u16x2 sc, sc, s;"
        "mad.lo.u32 sc, sc, 1024, 0x57FE5800;"
    )
)


@triton.jit
def _nibble(words, scale, J: tl.constexpr):
    code = words >> (4 * J)
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * scale


@triton.jit
def unpack(words, scales, MX: tl.constexpr, ASM: tl.constexpr):
    """Words int32 and scale bytes uint32 of one shape to eight FP16 tensors, values x 2**-8."""
    if ASM:
        code: tl.constexpr = UNPACK_MXFP4 if MX else UNPACK_NVFP4
        return tl.inline_asm_elementwise(
            code, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words, scales],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    bits = (tl.minimum(tl.maximum(scales, 107), 136) - 106) << 10 if MX else scales * 128 + 0x3800
    f = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    return (
        _nibble(words, f, 0), _nibble(words, f, 1), _nibble(words, f, 2), _nibble(words, f, 3),
        _nibble(words, f, 4), _nibble(words, f, 5), _nibble(words, f, 6), _nibble(words, f, 7),
    )  # fmt: skip


@triton.jit
def tile_rows(R: tl.constexpr):
    """Which row of memory each row of a tile is: bits 0 and 2 swapped, 0 4 2 6 1 5 3 7 8 ..."""
    row = tl.arange(0, R)
    return (row & ~5) | ((row & 1) << 2) | ((row >> 2) & 1)


@triton.jit
def load_tile(
    DATA, SCALE, place, R: tl.constexpr, WORDS: tl.constexpr, BLOCKS: tl.constexpr,
    VALUES: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Eight FP16 tensors [R, W] of the R rows from row `place` (int64) on; rows of WORDS words and BLOCKS scales."""
    W: tl.constexpr = triton.next_power_of_2(WORDS)
    G: tl.constexpr = triton.next_power_of_2(BLOCKS)
    row = tl.arange(0, R) if VALUES else tile_rows(R)
    word, block = tl.arange(0, W), tl.arange(0, G)
    at = DATA + place * WORDS + (row[:, None, None] * WORDS + word)  # [R, 1, W]
    words = tl.load(at) if W == WORDS else tl.load(at, mask=word < WORDS, other=0)
    if VALUES:
        words = tl.permute(tl.reshape(words, (R // 8, 2, 2, 2, W)), (0, 3, 2, 1, 4))
    words = tl.reshape(words, (R, W))
    scale_at = SCALE + place * BLOCKS + (tile_rows(R)[:, None] * BLOCKS + block[None, :])
    scales = tl.load(scale_at) if G == BLOCKS else tl.load(scale_at, mask=(block < BLOCKS)[None, :], other=0)
    scales = tl.reshape(tl.broadcast_to(scales.to(tl.uint32)[:, :, None], (R, G, W // G)), (R, W))
    return unpack(words, scales, MX, ASM)


@triton.jit
def _load_query(at, mask, factor, J: tl.constexpr):
    return (tl.load(at + J, mask=mask, other=0.0).to(tl.float32) * factor).to(tl.float16)


@triton.jit
def _load_queries(at, mask, factor):
    """Eight FP16 tensors [words, columns]: element j of each word."""
    return (
        _load_query(at, mask, factor, 0), _load_query(at, mask, factor, 1),
        _load_query(at, mask, factor, 2), _load_query(at, mask, factor, 3),
        _load_query(at, mask, factor, 4), _load_query(at, mask, factor, 5),
        _load_query(at, mask, factor, 6), _load_query(at, mask, factor, 7),
    )  # fmt: skip


@triton.jit
def _scores(k, q, R: tl.constexpr, C: tl.constexpr):
    score = tl.zeros((R, C), tl.float32)
    for j in tl.static_range(8):
        score = tl.dot(k[j], q[j], score)
    return score


@triton.jit
def _add_values(acc, v, p, decay):
    return (
        tl.dot(tl.trans(v[0]), p, acc[0] * decay), tl.dot(tl.trans(v[1]), p, acc[1] * decay),
        tl.dot(tl.trans(v[2]), p, acc[2] * decay), tl.dot(tl.trans(v[3]), p, acc[3] * decay),
        tl.dot(tl.trans(v[4]), p, acc[4] * decay), tl.dot(tl.trans(v[5]), p, acc[5] * decay),
        tl.dot(tl.trans(v[6]), p, acc[6] * decay), tl.dot(tl.trans(v[7]), p, acc[7] * decay),
    )  # fmt: skip


@triton.jit
def _join(acc):
    """Eight tensors [W, C] to one [C, W, 8]."""
    even = tl.join(tl.join(acc[0], acc[4]), tl.join(acc[2], acc[6]))
    odd = tl.join(tl.join(acc[1], acc[5]), tl.join(acc[3], acc[7]))
    joined = tl.reshape(tl.join(even, odd), (acc[0].shape[0], acc[0].shape[1], 8))
    return tl.permute(joined, (1, 0, 2))


@triton.jit
def _merge_halves(value, total, peak, unit, C: tl.constexpr, W: tl.constexpr):
    """Columns [even tokens | odd tokens] of `value` [C, W, 8] to C / 2 columns over the words of their own half."""
    H: tl.constexpr = C // 2
    peak_2 = tl.reshape(peak, (2, H))
    highest = tl.max(peak_2, 0)
    weight = tl.exp2((peak_2 - highest[None, :]) * unit)
    total = tl.sum(tl.reshape(total, (2, H)) * weight, 0)
    half = tl.arange(0, 2)
    own = half[:, None, None, None, None] == half[None, None, :, None, None]
    value = tl.reshape(value, (2, H, 2, W // 2, 8)) * weight[:, :, None, None, None]
    return tl.sum(tl.sum(tl.where(own, value, 0.0), 2), 0), total, highest


@triton.jit
def fp4_kernel(
    Q, K, K_SCALE, K_OUTER, V, V_SCALE, V_OUTER, TABLE, SEQ_LENS, PREFIX_LENS, ROWS, OUT, PARTS, LSE,
    factor, batch, kv_heads, table_width, n, blocks, first_slot,
    D: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One program: BN tokens at a time of one chunk, one KV head, HEADS query heads. `factor`: softmax_scale log2(e).

    Absent tensors are None: outer scales (MXFP4), PREFIX_LENS, ROWS (the own stage), PARTS and LSE (one slot in all).
    """
    T: tl.constexpr = 2 if D == 64 else 1
    C: tl.constexpr = HEADS * T
    R: tl.constexpr = BN // T
    WORDS: tl.constexpr = D * T // 8
    W: tl.constexpr = triton.next_power_of_2(WORDS)
    BLOCKS: tl.constexpr = D * T // (32 if MX else 16)
    unit, kv_head, chunk = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads, tl.program_id(1)
    column, word, token = tl.arange(0, C), tl.arange(0, W), tile_rows(R) * T
    row, head, active = program_columns(column % HEADS, unit, SEQ_LENS, ROWS, n, blocks, GROUP, HEADS)
    lead = leading_row(row, active, unit, blocks, ROWS)
    if lead < 0:
        return
    first, stop = token_span(lead, chunk, SEQ_LENS, PREFIX_LENS, CHUNK, WINDOW, ROWS is not None)
    if PARTS is not None and first >= stop:  # without parts, an empty row still has to be written
        return

    half = column // HEADS
    at = Q + ((row * kv_heads + kv_head) * GROUP + head)[None, :] * D + (word * 8)[:, None] - (half * D)[None, :]
    mask = active[None, :] & (word < WORDS)[:, None] & ((word * T // W)[:, None] == half[None, :])
    q = _load_queries(at, mask, factor)
    scale = 256.0 if K_OUTER is None else tl.load(K_OUTER + kv_head) * 256.0
    zero = tl.zeros((W, C), tl.float32)
    acc = (zero, zero, zero, zero, zero, zero, zero, zero)
    total = tl.zeros((C,), tl.float32)
    peak = tl.full((C,), -1e9, tl.float32)  # below any score: FP16 queries and values of at most 10.5

    begin = first // BN * BN
    pages = TABLE + lead * table_width
    page = tl.load(pages + begin // P)
    for t in range(begin, stop, BN):
        place = (page.to(tl.int64) * kv_heads + kv_head) * (P // T) + t % P // T
        page = tl.load(pages + tl.minimum(t + BN, stop - 1) // P)  # ahead of its use
        k = load_tile(K, K_SCALE, place, R, WORDS, BLOCKS, False, MX, ASM)
        v = load_tile(V, V_SCALE, place, R, WORDS, BLOCKS, True, MX, ASM)
        score = _scores(k, q, R, C)
        position = t + token[:, None] + half[None, :]
        visible = position < stop
        if WINDOW > 0:
            visible = visible & (position >= first)
        score = tl.where(visible, score, -float("inf"))
        highest = tl.maximum(peak, tl.max(score, 0))
        p = tl.exp2(score * scale - (highest * scale)[None, :])
        decay = tl.exp2((peak - highest) * scale)
        total = total * decay + tl.sum(p, 0)
        peak = highest
        acc = _add_values(acc, v, p.to(tl.float16), decay[None, :])

    value = _join(acc)
    if T == 2:
        value, total, peak = _merge_halves(value, total, peak, scale, C, W)
    outer = 256.0 if V_OUTER is None else tl.load(V_OUTER + kv_head) * 256.0
    total = tl.where(total == 0.0, 1.0, total)  # an empty row
    value = tl.reshape(value, (HEADS, W * 8 // T)) * (outer / total)[:, None]
    row, head, active = program_columns(tl.arange(0, HEADS), unit, SEQ_LENS, ROWS, n, blocks, GROUP, HEADS)
    store_columns(
        value, peak * scale + tl.log2(total), row, kv_head * GROUP + head, active, first_slot + chunk,
        OUT, PARTS, LSE, batch, kv_heads * GROUP, D,
    )  # fmt: skip
