"""The cheapest flips of a row of bits that have given checks (`syndromes.py`), exactly, by Viterbi's algorithm.

State: what the six open checks add up to, 64 of them. A period of three elements has eight sets of flips; each column
has its last bit set, so from 32 states on only odd sets lead there and below only even ones, four each:

    s' <- (2 s' + t) ^ X[e]     t the target of the check that closes, X[e] the columns of the flips e

The reference does that. In the kernel a row is a thread and a state a register, and registers cannot be chosen by a t
that differs from row to row. So states are counted from those (`base`) of one answer that is known: flip the first
element of a period where the check that closes fails otherwise. What is searched is the difference from that answer,

    u' <- 2 u' ^ X[e]           u = s ^ base; where the known answer flips, even and odd sets swap their costs

the same for all rows. A thread walks its row forth and back once. Decisions (two bits per state and period) lie in
scratch memory in between.

What was left out: shortcuts where all checks agree, for most rows have a flip somewhere; and a row over several
threads, which exchange states at every step: that took four times the instructions per row, a sixth of them shuffles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.formats import unpack_bits
from trace_kernels.launch import INTERPRET
from trace_kernels.syndromes import COLUMNS, MEMORY

STATES = 1 << MEMORY
EVEN, ODD = (0, 3, 5, 6), (1, 2, 4, 7)  # sets of flips, bit j for element j of a period
ROWS = 32  # of a program: one per thread of a warp
AHEAD = tl.constexpr(8)  # periods whose decisions are read at once on the way back
SCRATCH_BYTES = 2**29


def _columns_of(flips: int) -> int:
    """Exclusive-or of the columns of a set of flips."""
    total = 0
    for j in range(3):
        total ^= COLUMNS[j] if flips >> j & 1 else 0
    return total


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
def _check_bit(TARGET, c, inside_R):
    """Target bits int32 [R] of check `c`."""
    return (tl.load(TARGET + (c >> 3), mask=inside_R, other=0).to(tl.int32) >> (c & 7)) & 1


@triton.jit
def _costs(COST, p, inside_R, K: tl.constexpr):
    """FP32 [R] of the three elements of period `p`; what lies beyond the row is never flipped."""
    c0 = tl.load(COST + p * 3, mask=inside_R & (p * 3 < K), other=0.0)
    c1 = tl.load(COST + p * 3 + 1, mask=inside_R & (p * 3 + 1 < K), other=float("inf"))
    c2 = tl.load(COST + p * 3 + 2, mask=inside_R & (p * 3 + 2 < K), other=float("inf"))
    return c0, c1, c2


@triton.jit
def _decisions(DECISIONS, TARGET, p, inside_R, R: tl.constexpr):
    """Whether there is a period `p`, its four words, and the target bit of the check that it closes."""
    at, there = DECISIONS + p * 4 * R, inside_R & (tl.full((R,), p, tl.int32) >= 0)
    even_ones, even_twos = tl.load(at, mask=there, other=0), tl.load(at + R, mask=there, other=0)
    odd_ones, odd_twos = tl.load(at + 2 * R, mask=there, other=0), tl.load(at + 3 * R, mask=there, other=0)
    return there, even_ones, even_twos, odd_ones, odd_twos, _check_bit(TARGET, p, there)


# The least of four, and which, without predicates: signs of differences are bits, and a funnel shift takes one in.
_LEAST = tl.constexpr("""{
.reg .f32 low, high, one, other, two;
.reg .b32 first, second, third;
min.f32 low, $5, $6;
min.f32 high, $7, $8;
sub.f32 one, $6, $5;
sub.f32 other, $8, $7;
sub.f32 two, high, low;
min.f32 $0, low, high;
mov.b32 first, one;
mov.b32 second, other;
mov.b32 third, two;
lop3.b32 first, third, second, first, 0xCA;
shf.l.wrap.b32 $1, first, $3, 1;
shf.l.wrap.b32 $2, third, $4, 1;
}""")


@triton.jit
def _least(a, b, c, d, ones, twos, ASM: tl.constexpr):
    """Least of four FP32 [R], the first such; its index, two bits, is shifted into `ones` and `twos`, int32 [R]."""
    if ASM:  # of the lines below LLVM makes twice the instructions
        return tl.inline_asm_elementwise(
            _LEAST, "=&r,=&r,=&r,r,r,r,r,r,r", [ones, twos, a, b, c, d],
            dtype=(tl.float32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    low, high = tl.minimum(a, b), tl.minimum(c, d)
    two = high < low
    one = tl.where(two, d < c, b < a)
    return tl.minimum(low, high), 2 * ones + one.to(tl.int32), 2 * twos + two.to(tl.int32)


@triton.jit
def _walk_back(FLIPS, DECISIONS, TARGET, state, base, inside_R, P: tl.constexpr, R: tl.constexpr, X: tl.constexpr):
    """From the last state and base, int32 [R], to the first: the set of flips that led to each goes to FLIPS."""
    for group in range((P + AHEAD - 1) // AHEAD):
        read = ()
        for i in tl.static_range(AHEAD):
            p = P - 1 - group * AHEAD - i
            read += (_decisions(DECISIONS, TARGET, p, inside_R, R),)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            p = P - 1 - group * AHEAD - i
            there, even_ones, even_twos, odd_ones, odd_twos, t = read[i]  # type: ignore[var-annotated, misc]
            is_odd = state >> 5
            one = (tl.where(is_odd != 0, odd_ones, even_ones) >> (~state & 31)) & 1
            two = (tl.where(is_odd != 0, odd_twos, even_twos) >> (~state & 31)) & 1
            zero = one ^ two ^ is_odd  # number k of the even sets flips element 1 if k & 1, element 2 if k & 2
            known = base >> 5
            tl.store(FLIPS + p, ((zero ^ known) | (one << 1) | (two << 2)).to(tl.uint8), mask=there)
            state = (2 * state ^ (zero * X[0]) ^ (one * X[1]) ^ (two * X[2])) & 63
            base = (2 * base ^ (known * X[0]) ^ t) & 63


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
    X: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid (groups of R rows). X are the columns. DECISIONS int32 [groups, periods, 4, R].

    Which of four sets led to a state: bit 0 and bit 1 of its number in two words for states 0 to 31 (state 0 has the
    highest bit), and in two more for states 32 to 63.
    """
    P: tl.constexpr = (K + 2) // 3
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    inside_R = row_R < rows
    COST += row_R.to(tl.int64) * K
    TARGET += row_R.to(tl.int64) * target_bytes
    FLIPS += row_R.to(tl.int64) * P
    DECISIONS += tl.program_id(0).to(tl.int64) * (P * 4 * R) + tl.arange(0, R)

    best = (tl.zeros((R,), tl.float32),)
    for _ in tl.static_range(63):
        best += (tl.full((R,), float("inf"), tl.float32),)  # type: ignore[assignment]
    base = tl.zeros((R,), tl.int32)
    c0, c1, c2 = _costs(COST, 0, inside_R, K)
    next_costs = _costs(COST, 1, inside_R, K)
    t, next_t = _check_bit(TARGET, 0, inside_R), _check_bit(TARGET, 1, inside_R)
    for p in range(P):
        costs_after = _costs(COST, p + 2, inside_R, K)  # two steps early, for memory is slow
        t_after = _check_bit(TARGET, p + 2, inside_R)
        known = (base ^ t) & 1
        base = (base ^ t ^ (known * X[0])) >> 1
        swap = known != 0
        e1, e2, e3 = c0 + c1, c0 + c2, c1 + c2
        o3 = e1 + c2
        even = (tl.where(swap, c0, 0.0), tl.where(swap, c1, e1), tl.where(swap, c2, e2), tl.where(swap, o3, e3))
        odd = (tl.where(swap, 0.0, c0), tl.where(swap, e1, c1), tl.where(swap, e2, c2), tl.where(swap, e3, o3))
        following = ()
        for half in tl.static_range(2):
            ways = odd if half else even
            ones, twos = tl.zeros((R,), tl.int32), tl.zeros((R,), tl.int32)
            for j in tl.static_range(32):
                least, ones, twos = _least(
                    best[(2 * j ^ half * X[0]) & 63] + ways[0],
                    best[(2 * j ^ half * X[0] ^ X[0] ^ X[1]) & 63] + ways[1],
                    best[(2 * j ^ half * X[0] ^ X[0] ^ X[2]) & 63] + ways[2],
                    best[(2 * j ^ half * X[0] ^ X[1] ^ X[2]) & 63] + ways[3],
                    ones,
                    twos,
                    ASM,
                )
                following += (least,)  # type: ignore[assignment]
            tl.store(DECISIONS + (p * 4 + 2 * half) * R, ones)
            tl.store(DECISIONS + (p * 4 + 2 * half + 1) * R, twos)
        best = following  # type: ignore[assignment]
        c0, c1, c2 = next_costs
        t, next_costs, next_t = next_t, costs_after, t_after

    state = base
    for i in tl.static_range(6):
        state ^= _check_bit(TARGET, P + i, inside_R) << i
    _walk_back(FLIPS, DECISIONS, TARGET, state, base, inside_R, P, R, X)


def cheapest_flips_triton(cost: Tensor, target: Tensor) -> Tensor:
    """Triton twin of `cheapest_flips_reference`; in groups of rows whose decisions fit the scratch memory."""
    (rows, width), periods = cost.shape, -(-cost.shape[1] // 3)
    flips = torch.empty(rows, periods, dtype=torch.uint8, device=cost.device)
    most = max(1, SCRATCH_BYTES // (periods * ROWS * 16)) * ROWS
    for begin in range(0, rows, most):
        part = slice(begin, min(begin + most, rows))
        count = part.stop - begin
        groups = triton.cdiv(count, ROWS)
        decisions = torch.empty(groups, periods, 4, ROWS, dtype=torch.int32, device=cost.device)
        _flips_kernel[(groups,)](
            *(cost[part], target[part], flips[part], decisions, count, target.shape[1]),
            K=width,
            R=ROWS,
            X=COLUMNS,
            ASM=not INTERPRET,
            num_warps=1,
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
