"""The cheapest flips of a row of bits that have given checks (`syndromes.py`), exactly, by Viterbi's algorithm.

State: what the six open checks add up to, 64 of them. A period of three elements has eight sets of flips; each column
has its last bit set, so from 32 states on only odd sets lead there and below only even ones, four each:

    s' <- (2 s' + t) ^ X[e]     t the target of the check that closes, X[e] the columns of the flips e

A program takes some rows, and walks them forth and back once. Decisions (two bits per state and period) lie in scratch
memory in between.

What was left out: shortcuts where all checks agree. Most rows have a flip somewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.formats import unpack_bits
from trace_kernels.syndromes import COLUMNS, MEMORY

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
