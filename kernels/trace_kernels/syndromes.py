"""A third of a bit per element: parity checks of a rollout's parity bits, and the bits again from those and a guess.

A trainer that is guided everywhere before has nearly the rollout's numbers: it would find nearly all parity bits by
itself, and where not, its number lies close to a rounding threshold. So the record need not hold the bits. It holds a
*syndrome*, exclusive-ors of some of them, and the trainer takes of all rows of bits with that syndrome the likeliest
given its own numbers (source coding with side information, after Slepian and Wolf; checks that overlap along the row,
as in the syndrome-trellis codes of Filler, Judas and Fridrich, 2011).

    period p = elements 3p, 3p + 1, 3p + 2      opens check p + 6 and closes check p
    check c  = exclusive-or of 12 of the 21 bits of periods c - 6 ... c      (COLUMNS[j] >> i) & 1: j is in check p + i

    bits [M, K]  ->  syndrome uint8 [M, ceil((ceil(K / 3) + 6) / 8)]      check 8b + i is bit i of byte b

Any two rows of bits with one syndrome differ in at least 7 places, so three wrong guesses near to each other are always
found; what is found (`cheapest_flips.py`) is the cheapest set of flips, however many.

What was left out: other rates. One check per two elements (least distance 10) or per four (6) were measured as well
(docs/results/guidance.md): one per three is the fewest that holds for W4A16KV4 as one bit per element does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.formats import pack_bits, unpack_bits

COLUMNS = (101, 69, 115)
MEMORY = 6  # checks that are open between two periods
# The 21 bits of a window that a check adds up, oldest first: bit 3 (6 - i) + j is bit i of COLUMNS[j].
WINDOW = sum((COLUMNS[j] >> i & 1) << (3 * (MEMORY - i) + j) for i in range(MEMORY + 1) for j in range(3))
TILE = 1024


def num_checks(width: int) -> int:
    """Checks of a row of `width` bits."""
    return -(-width // 3) + MEMORY


def syndrome_bytes(width: int) -> int:
    """Bytes of the syndrome of a row of `width` bits."""
    return -(-num_checks(width) // 8)


@triton.jit
def checks_of(BITS, b, length, MASK: tl.constexpr):
    """Bytes `b` (int32) of the syndrome of `length` bytes of bits. A check is the parity of 21 bits under a mask."""
    check = b[:, None] * 8 + tl.arange(0, 8)[None, :]
    first = check * 3 - 18  # of the window, which is read as four bytes
    byte = (first + 24) // 8 - 3  # rounded down also below 0
    word = check * 0
    for k in tl.static_range(4):
        at = byte + k
        word |= tl.load(BITS + at, mask=(at >= 0) & (at < length), other=0).to(tl.int32) << (8 * k)
    window = (word >> (first - byte * 8)) & MASK
    for k in tl.static_range(5):
        window ^= window >> (16 >> k)
    return tl.sum((window & 1) << tl.arange(0, 8)[None, :], 1)


@triton.jit
def _encode_kernel(
    BITS, OUT, stride_bits, stride_out, width: tl.constexpr, BYTES: tl.constexpr, MASK: tl.constexpr, T: tl.constexpr
):
    """Grid (rows, tiles of T / 8 bytes)."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * (T // 8) + tl.arange(0, T // 8)
    checks = checks_of(BITS + row * stride_bits, b, (width + 7) // 8, MASK)
    tl.store(OUT + row * stride_out + b, checks.to(tl.uint8), mask=b < BYTES)


def encode_reference(bits: Tensor, width: int) -> Tensor:
    """`encode` in torch."""
    periods = num_checks(width) - MEMORY
    rows = torch.nn.functional.pad(unpack_bits(bits, width), (0, 3 * periods - width)).view(len(bits), periods, 3)
    checks = rows.new_zeros(len(bits), periods + MEMORY)
    for i in range(MEMORY + 1):
        for j in range(3):
            if COLUMNS[j] >> i & 1:
                checks[:, i : i + periods] ^= rows[:, :, j]
    return pack_bits(checks)


def encode_triton(bits: Tensor, width: int) -> Tensor:
    """Triton twin of `encode_reference`; rows may be columns of a wider matrix."""
    out = torch.empty(len(bits), syndrome_bytes(width), dtype=torch.uint8, device=bits.device)
    if len(bits):
        grid = (len(bits), triton.cdiv(out.shape[1], TILE // 8))
        _encode_kernel[grid](
            bits, out, bits.stride(0), out.stride(0), width=width, BYTES=out.shape[1], MASK=WINDOW, T=TILE
        )
    return out


_ENCODE = torch.library.custom_op(
    "trace_kernels::encode_syndrome", encode_reference, mutates_args=(), device_types="cpu"
)
_ENCODE.register_kernel("cuda")(encode_triton)
_ENCODE.register_fake(lambda bits, width: bits.new_empty(len(bits), syndrome_bytes(width)))


def encode(bits: Tensor, width: int) -> Tensor:
    """Syndromes uint8 [M, `syndrome_bytes(width)`] of rows of bits.

    Args:
        bits: uint8 [M, ceil(width / 8)] as `pack_bits` writes them; bits beyond `width` must be 0.
        width: bits of a row.
    """
    assert bits.stride(1) == 1, "dense within a row"
    return _ENCODE(bits, width)
