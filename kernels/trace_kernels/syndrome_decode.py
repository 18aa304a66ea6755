"""The rollout's parity bits from their syndrome: the cheapest flips of the trainer's own bits that explain it.

    own bits, costs    of nearest rounding on the record's scales; a flip moves a code to the other end of its bracket,
                       and costs the distance of the value to the bracket's middle times the root of its block scale
    target checks      syndrome of the own bits, exclusive-or the record's: what the flips must add up to
    flips              of least total cost with these checks, exactly, by Viterbi's algorithm

Over a distance d the odds of a flip fall about like exp(-d / noise) (measured), so costs that are distances in units of
the noise add up to a log-likelihood. The noise lies between constant in units of the block scale and constant without
it, hence the root; a common factor of a row does not matter.

State: what the six open checks add up to, 64 of them. A period of three elements has eight sets of flips; each column
has its last bit set, so from 32 states on only odd sets lead there and below only even ones, four each:

    s' <- (2 s' + t) ^ X[e]     t the target of the check that closes, X[e] the columns of the flips e

A program takes some rows, and walks them forth and back once. Decisions (two bits per state and period) lie in scratch
memory in between.

What was left out: shortcuts where all checks agree. Most rows have a flip somewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels import fp4
from trace_kernels.formats import E2M1_VALUES, e2m1_bracket, pack_bits, unpack_bits
from trace_kernels.quantize import BlockFormat, _E2M1Format, get_format
from trace_kernels.round_values import TILE, Guide, block_offsets, guided_scale, outer_scales, place_blocks
from trace_kernels.syndromes import COLUMNS, MEMORY, encode

STATES = 1 << MEMORY
EVEN, ODD = (0, 3, 5, 6), (1, 2, 4, 7)  # sets of flips, bit j for element j of a period
ROWS = 16  # of a program
SCRATCH_BYTES = 2**29


def _columns_of(flips: int) -> int:
    """Exclusive-or of the columns of a set of flips."""
    total = 0
    for j in range(3):
        total ^= COLUMNS[j] if flips >> j & 1 else 0
    return total


def own_bits_reference(
    x: Tensor,
    row: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    fmt: str,
    per_token: bool,
    scale_bits: bool,
) -> tuple[Tensor, Tensor]:
    """`own_bits` in torch; a guide is its fields."""
    block_format = get_format(fmt)
    assert isinstance(block_format, _E2M1Format)
    scale = scale[row]
    wide = None if outer is None else (outer[row] if per_token else outer).unsqueeze(-1)
    if scale_bits:
        scale = block_format.scale_from_parity(x, wide, unpack_bits(scale, -(-x.shape[-1] // block_format.block_size)))
    z = block_format.normalize(x, scale, wide)
    near, grid = e2m1_bracket(z), torch.tensor(E2M1_VALUES, device=z.device)
    beyond = z.abs() - ((grid[1:] + grid[:-1]) / 2)[near.long()]
    weight = (block_format.decode_scale(scale) * (1.0 if wide is None else wide)).sqrt().unsqueeze(-1)
    cost = torch.nan_to_num(beyond.abs() * weight, nan=0.0, posinf=0.0)
    return pack_bits(((near & 1) ^ (beyond > 0)).flatten(1)), cost.flatten(1).contiguous()


@triton.jit(do_not_specialize_on_alignment=["SCALE", "OUTER"])
def _own_bits_kernel(
    X,
    ROW,
    SCALE,
    OUTER,
    BITS,
    COST,
    stride_scale,
    stride_outer,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    OUTER_PER_HEAD: tl.constexpr,
):
    """Grid (tokens). Elements as [G, B / 8, 8]."""
    BLOCKS: tl.constexpr = HEADS * ((D + B - 1) // B)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ROW + token)
    X += token * (HEADS * D)
    SCALE += row * stride_scale
    if OUTER is not None and not OUTER_PER_HEAD:
        OUTER += row * stride_outer
    for start in range(0, BLOCKS, G):
        g, head, first = place_blocks(start, D, B, G)
        inside_G = g < BLOCKS
        whole = inside_G[:, None, None]
        p = tl.arange(0, B // 8)
        lane = p[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        inside = whole & (first[:, None, None] + lane < D)
        x = tl.load(X + block_offsets(g, head, first, D, B)[:, None, None] + lane, mask=inside, other=0.0)
        x = x.to(tl.float32)
        amax_bits_G = tl.max(tl.max(fp4.abs_bits(x), 2), 1)
        outer_G = outer_scales(OUTER, head, inside_G, stride_outer, OUTER_PER_HEAD)
        scale_G = guided_scale(SCALE, g, head, amax_bits_G, outer_G, inside_G, D, B, SCALE_BITS)
        inverse_G = tl.math.div_rn(tl.full((G,), 1.0, tl.float32), outer_G)
        z = x * tl.math.div_rn(inverse_G, scale_G)[:, None, None]
        near = fp4.e2m1_bracket(z)
        beyond = tl.abs(z) - (fp4.e2m1_value(near) + fp4.e2m1_value(near + 1)) * 0.5
        cost = tl.abs(beyond) * tl.sqrt_rn(scale_G * outer_G)[:, None, None]
        cost = tl.where(fp4.abs_bits(cost) < 0x7F800000, cost, 0.0)
        bit = (near & 1) ^ (beyond > 0).to(tl.int32)
        packed = tl.sum(bit << tl.arange(0, 8)[None, None, :], 2)
        at_bits = BITS + token * (BLOCKS * (B // 8)) + g[:, None] * (B // 8) + p[None, :]
        tl.store(at_bits, packed.to(tl.uint8), mask=inside_G[:, None])
        tl.store(COST + token * (BLOCKS * B) + g[:, None, None] * B + lane, cost, mask=whole)


def own_bits_triton(
    x: Tensor,
    row: Tensor,
    scale: Tensor,
    outer: Tensor | None,
    fmt: str,
    per_token: bool,
    scale_bits: bool,
) -> tuple[Tensor, Tensor]:
    """Triton twin of `own_bits_reference`."""
    x = x.contiguous()
    assert scale[:1].is_contiguous(), "dense within a row"
    heads, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    block_size = 16 if fmt == "nvfp4" else 32
    blocks = heads * triton.cdiv(width, block_size)
    bits = torch.empty(len(x), blocks * block_size // 8, dtype=torch.uint8, device=x.device)
    cost = torch.empty(len(x), blocks * block_size, dtype=torch.float32, device=x.device)
    if len(x):
        _own_bits_kernel[(len(x),)](
            *(x, row, scale, outer, bits, cost, scale.stride(0), 0 if outer is None else outer.stride(0)),
            D=width,
            HEADS=heads,
            B=block_size,
            G=min(triton.next_power_of_2(blocks), TILE // block_size),
            SCALE_BITS=scale_bits,
            OUTER_PER_HEAD=not per_token,
            enable_fp_fusion=False,
        )
    return bits, cost


_OWN = torch.library.custom_op("trace_kernels::own_bits", own_bits_reference, mutates_args=(), device_types="cpu")
_OWN.register_kernel("cuda")(own_bits_triton)


@_OWN.register_fake
def _(x: Tensor, row: Tensor, scale: Tensor, outer: Any, fmt: str, *_: Any) -> tuple[Tensor, Tensor]:
    block_size = 16 if fmt == "nvfp4" else 32
    width = math.prod(x.shape[1:-1]) * -(-x.shape[-1] // block_size) * block_size
    return x.new_empty(len(x), width // 8, dtype=torch.uint8), x.new_empty(len(x), width, dtype=torch.float32)


def cheapest_flips_reference(cost: Tensor, target: Tensor) -> Tensor:
    """`cheapest_flips` in torch."""
    (rows, width), periods = cost.shape, -(-cost.shape[1] // 3)
    t = unpack_bits(target, periods + MEMORY).int()
    padded = torch.nn.functional.pad(cost, (0, 3 * periods - width), value=torch.inf).view(rows, periods, 3)
    state = torch.arange(STATES, device=cost.device)
    odd = state >= STATES // 2
    sets = [torch.where(odd, o, e) for e, o in zip(EVEN, ODD, strict=True)]
    jumps = [torch.where(odd, _columns_of(o), _columns_of(e)) for e, o in zip(EVEN, ODD, strict=True)]
    best = cost.new_full((rows, STATES), torch.inf)
    best[:, 0] = 0
    decisions = torch.empty(periods, rows, STATES, dtype=torch.uint8, device=cost.device)
    for p in range(periods):
        c0, c1, c2 = padded[:, p].unsqueeze(-1).unbind(1)
        ways = ((torch.zeros_like(c0), c0 + c1, c0 + c2, c1 + c2), (c0, c1, c2, (c0 + c1) + c2))
        closing = 2 * state + t[:, p : p + 1]
        found = torch.zeros(rows, STATES, dtype=torch.uint8, device=cost.device)
        cheapest: Tensor | None = None
        for k, jump in enumerate(jumps):
            other = best.gather(1, (closing ^ jump) & (STATES - 1)) + torch.where(odd, ways[1][k], ways[0][k])
            if cheapest is None:
                cheapest = other
                continue
            found = torch.where(other < cheapest, k, found)
            cheapest = torch.minimum(other, cheapest)
        assert cheapest is not None
        best, decisions[p] = cheapest, found.to(torch.uint8)
    at = (t[:, periods:] << torch.arange(MEMORY, device=cost.device)).sum(1)
    flips = torch.empty(rows, periods, dtype=torch.uint8, device=cost.device)
    for p in reversed(range(periods)):
        way = decisions[p].gather(1, at.unsqueeze(1)).squeeze(1).long()
        flips[:, p] = torch.stack(sets)[way, at].to(torch.uint8)
        at = ((2 * at + t[:, p]) ^ torch.stack(jumps)[way, at]) & (STATES - 1)
    return flips


@triton.jit
def _of(which, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """One of four constants."""
    low, high = tl.where(which == 0, a, b), tl.where(which == 2, c, d)
    return tl.where(which < 2, low, high)


@triton.jit
def _check_bit(TARGET, base_R, c, inside_R):
    """Target bits int32 [R] of check `c`."""
    return (tl.load(TARGET + base_R + c // 8, mask=inside_R, other=0).to(tl.int32) >> (c % 8)) & 1


@triton.jit
def _flips_kernel(
    COST,
    TARGET,
    FLIPS,
    DECISIONS,
    rows,
    target_bytes,
    K: tl.constexpr,
    R: tl.constexpr,
    EVEN_X: tl.constexpr,
    ODD_X: tl.constexpr,
    EVEN_SETS: tl.constexpr,
    ODD_SETS: tl.constexpr,
):
    """Grid (groups of R rows). DECISIONS int32 [groups, periods, R, 4]: two bits per state, 16 states a word."""
    P: tl.constexpr = (K + 2) // 3
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    inside_R = row_R < rows
    base_R = row_R.to(tl.int64) * target_bytes
    DECISIONS += tl.program_id(0).to(tl.int64) * (P * R * 4)
    state = tl.arange(0, 64)[None, :]
    odd = state >= 32
    inf = float("inf")
    best = tl.where((state + tl.zeros((R, 64), tl.int32)) == 0, 0.0, inf)
    word_at = tl.arange(0, R)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for p in range(P):
        at_R = row_R.to(tl.int64) * K + p * 3
        c0 = tl.load(COST + at_R, mask=inside_R, other=0.0)[:, None]
        c1 = tl.load(COST + at_R + 1, mask=inside_R & (p * 3 + 1 < K), other=inf)[:, None]
        c2 = tl.load(COST + at_R + 2, mask=inside_R & (p * 3 + 2 < K), other=inf)[:, None]
        closing = 2 * state + _check_bit(TARGET, base_R, p, inside_R)[:, None]
        cheapest = tl.gather(best, (closing ^ tl.where(odd, ODD_X[0], EVEN_X[0])) & 63, 1) + tl.where(odd, c0, 0.0)
        found = tl.zeros((R, 64), tl.int32)
        other = tl.gather(best, (closing ^ tl.where(odd, ODD_X[1], EVEN_X[1])) & 63, 1) + tl.where(odd, c1, c0 + c1)
        found = tl.where(other < cheapest, 1, found)
        cheapest = tl.minimum(other, cheapest)
        other = tl.gather(best, (closing ^ tl.where(odd, ODD_X[2], EVEN_X[2])) & 63, 1) + tl.where(odd, c2, c0 + c2)
        found = tl.where(other < cheapest, 2, found)
        cheapest = tl.minimum(other, cheapest)
        other = tl.gather(best, (closing ^ tl.where(odd, ODD_X[3], EVEN_X[3])) & 63, 1) + tl.where(
            odd, (c0 + c1) + c2, c1 + c2
        )
        found = tl.where(other < cheapest, 3, found)
        best = tl.minimum(other, cheapest)
        words = tl.sum(tl.reshape(found, (R, 4, 16)) << (2 * tl.arange(0, 16)[None, None, :]), 2)
        tl.store(DECISIONS + p * (R * 4) + word_at, words)

    tl.debug_barrier()
    at = tl.zeros((R,), tl.int32)
    for i in tl.static_range(6):
        at |= _check_bit(TARGET, base_R, P + i, inside_R) << i
    for q in range(P):
        p = P - 1 - q
        word = tl.load(DECISIONS + p * (R * 4) + tl.arange(0, R) * 4 + at // 16)
        k = (word >> (2 * (at % 16))) & 3
        is_odd = at >= 32
        even_set = _of(k, EVEN_SETS[0], EVEN_SETS[1], EVEN_SETS[2], EVEN_SETS[3])
        odd_set = _of(k, ODD_SETS[0], ODD_SETS[1], ODD_SETS[2], ODD_SETS[3])
        even_x = _of(k, EVEN_X[0], EVEN_X[1], EVEN_X[2], EVEN_X[3])
        odd_x = _of(k, ODD_X[0], ODD_X[1], ODD_X[2], ODD_X[3])
        tl.store(FLIPS + row_R.to(tl.int64) * P + p, tl.where(is_odd, odd_set, even_set).to(tl.uint8), mask=inside_R)
        closing_R = 2 * at + _check_bit(TARGET, base_R, p, inside_R)
        at = (closing_R ^ tl.where(is_odd, odd_x, even_x)) & 63


def cheapest_flips_triton(cost: Tensor, target: Tensor) -> Tensor:
    """Triton twin of `cheapest_flips_reference`; in groups of rows whose decisions fit the scratch memory."""
    (rows, width), periods = cost.shape, -(-cost.shape[1] // 3)
    flips = torch.empty(rows, periods, dtype=torch.uint8, device=cost.device)
    most = max(1, SCRATCH_BYTES // (periods * ROWS * 16)) * ROWS
    constants = {name: tuple(_columns_of(flip) for flip in sets) for name, sets in (("EVEN_X", EVEN), ("ODD_X", ODD))}
    for begin in range(0, rows, most):
        part = slice(begin, min(begin + most, rows))
        count = part.stop - begin
        groups = triton.cdiv(count, ROWS)
        decisions = torch.empty(groups, periods, ROWS, 4, dtype=torch.int32, device=cost.device)
        _flips_kernel[(groups,)](
            *(cost[part], target[part], flips[part], decisions, count, target.shape[1]),
            K=width,
            R=ROWS,
            **constants,
            EVEN_SETS=EVEN,
            ODD_SETS=ODD,
        )
    return flips


_FLIPS = torch.library.custom_op(
    "trace_kernels::cheapest_flips", cheapest_flips_reference, mutates_args=(), device_types="cpu"
)
_FLIPS.register_kernel("cuda")(cheapest_flips_triton)
_FLIPS.register_fake(lambda cost, target: cost.new_empty(len(cost), -(-cost.shape[1] // 3), dtype=torch.uint8))


def cheapest_flips(cost: Tensor, target: Tensor) -> Tensor:
    """Flips of least total cost with given checks: uint8 [M, ceil(K / 3)], bit j of an entry for element j of a period.

    Args:
        cost: FP32 [M, K] contiguous, at least 0.
        target: checks uint8 [M, `syndrome_bytes(K)`] contiguous, as `encode` packs them.
    """
    return _FLIPS(cost, target)


@triton.jit
def _flip_bits_kernel(BITS, FLIPS, P: tl.constexpr, BYTES: tl.constexpr, T: tl.constexpr):
    """Grid (rows, tiles of T bytes). BITS are flipped in place; entry p of FLIPS is for elements 3p to 3p + 2."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * T + tl.arange(0, T)
    element = b[:, None] * 8 + tl.arange(0, 8)[None, :]
    sets = tl.load(FLIPS + row * P + element // 3, mask=(b < BYTES)[:, None], other=0).to(tl.int32)
    packed = tl.sum(((sets >> (element % 3)) & 1) << tl.arange(0, 8)[None, :], 1)
    bits = tl.load(BITS + row * BYTES + b, mask=b < BYTES, other=0).to(tl.int32)
    tl.store(BITS + row * BYTES + b, (bits ^ packed).to(tl.uint8), mask=b < BYTES)


def flip_bits_reference(bits: Tensor, flips: Tensor) -> None:
    """`flip_bits_` in torch."""
    single = (flips.unsqueeze(-1) >> torch.arange(3, dtype=torch.uint8, device=flips.device)) & 1
    bits ^= pack_bits(single.flatten(1)[:, : 8 * bits.shape[1]])


def flip_bits_triton(bits: Tensor, flips: Tensor) -> None:
    """Triton twin of `flip_bits_reference`."""
    if len(bits):
        tile = min(triton.next_power_of_2(bits.shape[1]), 128)
        grid = (len(bits), triton.cdiv(bits.shape[1], tile))
        _flip_bits_kernel[grid](bits, flips, P=flips.shape[1], BYTES=bits.shape[1], T=tile)


_FLIP_BITS = torch.library.custom_op(
    "trace_kernels::flip_bits_", flip_bits_reference, mutates_args=("bits",), device_types="cpu"
)
_FLIP_BITS.register_kernel("cuda")(flip_bits_triton)
_FLIP_BITS.register_fake(lambda bits, flips: None)


def decode_guide(x: Tensor, guide: Guide, fmt: BlockFormat) -> Guide:
    """The guide of one bit per element that a guide of syndromes stands for: a row for each token of `x`.

    Nothing waits for the device. Tokens that follow no row are decoded as if they followed the first, and still follow
    none.

    Args:
        x: [N, (H,) D], the trainer's input at a site.
        guide: `codes` holds the syndromes uint8 [R, `syndrome_bytes(H Dp)`] of rows over all heads.
        fmt: NVFP4 or MXFP4.
    """
    if not len(guide.codes) or not len(x):
        bytes_per_head = -(-x.shape[-1] // fmt.block_size) * fmt.block_size // 8
        return replace(guide, codes=guide.codes.new_zeros(0, *x.shape[1:-1], bytes_per_head), syndrome=False)
    row = guide.row.clamp(min=0)
    bits, cost = _OWN(x, row, guide.scale, guide.outer, fmt.name, guide.per_token, guide.scale_bits)
    target = encode(bits, cost.shape[1]) ^ guide.codes[row]
    _FLIP_BITS(bits, cheapest_flips(cost, target))
    place = torch.where(guide.row < 0, guide.row, torch.arange(len(row), device=row.device))
    outer = guide.outer[row] if guide.outer is not None and guide.per_token else guide.outer
    codes = bits.view(len(x), *x.shape[1:-1], -1)
    return replace(guide, row=place, scale=guide.scale[row], codes=codes, outer=outer, syndrome=False)
