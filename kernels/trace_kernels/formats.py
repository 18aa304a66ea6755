"""The number formats: E2M1 elements, E4M3 and E8M0 scales, and how codes are packed.

Everything here is exact and is decided by integer arithmetic or by comparing with representable thresholds, so that a
CPU, a GPU and the Triton interpreter return the same bytes, ties included. What was left out: any use of
`tensor.to(float8)` for block scales. Its rounding is right on today's devices, but it saturates to NaN on some of them
and it cannot express the two rules our scales follow (no subnormals, no zero).

    E2M1 code     s e e m        value  0  .5  1  1.5  2  3  4  6   (codes 0..7; bit 3 is the sign)
    packed byte   hhhhllll       element 2i in the low nibble, element 2i + 1 in the high one
    E4M3 scale    0 eeee mmm     bias 7, largest 448 = 0x7E, 0x7F is NaN, smallest normal 2**-6 = 0x08
    E8M0 scale    eeeeeeee       2 ** (byte - 127), 255 is NaN

Two rules of ours:
  * Zero has one code. A magnitude that rounds to 0 gets code 0 whatever its sign; otherwise two equal roundings would
    compare as different codes (code 8 = -0 is decoded, never produced).
  * The mantissa bit of an E2M1 code is the parity of its index, so two adjacent grid values never share it. This is
    what makes one bit of guidance enough (TRACE, arXiv 2610.07767).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL_BYTE = 0x08  # 2**-6; our scale bytes never go below
E4M3_MAX_BYTE, E4M3_NAN_BYTE = 0x7E, 0x7F
E8M0_MIN_BYTE, E8M0_MAX_BYTE = 1, 254  # byte 0 is an FP32 subnormal, which some devices flush
E8M0_NAN_BYTE = 255

# Adding it to a float below 2 leaves round-half-even(2 x) in the last bits: its ulp is 0.5.
_HALVES = 2.0**22
_HALVES_BITS = 0x4A800000


@functools.cache
def _code_values(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=device)


def e2m1_magnitude(z: Tensor) -> Tensor:
    """Index (0..7, int32) of the E2M1 magnitude nearest to FP32 `|z|`, ties to the even code, saturating at 6.

    Below 2 the grid is the multiples of 0.5, from 1 on it is every float with one mantissa bit; in [1, 2] both rules
    agree, so min and max join them. Integer arithmetic, exact on every device. What a NaN maps to is not defined: a NaN
    travels in the scale, FP4 cannot hold it.
    """
    magnitude = z.abs()
    bits = magnitude.view(torch.int32)
    one_bit = (bits >> 22).bitwise_and_(1).add_(bits).add_(0x1FFFFF).bitwise_right_shift_(22).sub_(2 * (127 - 1))
    halves = magnitude.add_(_HALVES).view(torch.int32).sub_(_HALVES_BITS)  # in place: large temporaries are dear
    return torch.maximum(halves.clamp_(max=4), one_bit, out=one_bit).clamp_(max=7)


def e2m1_bracket(z: Tensor) -> Tensor:
    """Index (0..6, int32) of the lower end of the bracket around `|z|`: the bracket is {index, index + 1}.

    A `z` on a grid value opens the bracket away from zero; everything beyond 4 falls into the last bracket {4, 6}.
    """
    magnitude = z.abs()
    one_bit = (magnitude.view(torch.int32) >> 22) - 2 * (127 - 1)
    halves = (magnitude.clamp(max=2.0) * 2).to(torch.int32)
    return torch.maximum(halves, one_bit).clamp_(0, 6)


def e2m1_encode(z: Tensor) -> Tensor:
    """Round FP32 `z` to E2M1 codes (uint8, one per element, same shape)."""
    return with_sign(e2m1_magnitude(z), z < 0)


def with_sign(index: Tensor, negative: Tensor) -> Tensor:
    """Codes from magnitude indices and a sign mask; index 0 always becomes code 0."""
    sign = negative.to(torch.int32) << 3
    return (index | (sign & (-index >> 31))).to(torch.uint8)  # -index >> 31 is 0 for index 0, all ones above


def e2m1_decode(codes: Tensor) -> Tensor:
    """FP32 values of E2M1 codes (uint8); code 8 decodes to -0.0."""
    return _code_values(codes.device)[codes.to(torch.int32)]


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] to bytes [..., K / 2], element 2i in the low nibble. K must be even."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`: bytes [..., K / 2] to codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """0/1 uint8 [..., K] to bytes [..., ceil(K / 8)], element 8i in the lowest bit; the tail is filled with 0."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.uint8)


def parity_bits(packed: Tensor) -> Tensor:
    """Parity bits of packed codes: bytes [..., K / 2] to what `pack_bits(codes & 1)` gives, [..., K / 8]. K % 8 == 0.

    Works on whole words, an eighth of the elements: bits 0, 4, ... 28 of a word move together in three steps.
    """
    word = packed.contiguous().view(torch.int32) & 0x11111111
    word = (word | (word >> 3)) & 0x03030303
    word = (word | (word >> 6)) & 0x000F000F
    return ((word | (word >> 12)) & 0xFF).to(torch.uint8)


def unpack_bits(packed: Tensor, length: int) -> Tensor:
    """Inverse of `pack_bits`: the first `length` bits as 0/1 uint8 [..., length]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :length]


def e4m3_encode_scale(x: Tensor) -> Tensor:
    """Round non-negative FP32 scales to E4M3 bytes in [0x08, 0x7E]: nearest, ties to even, saturating, never subnormal.

    The bits of a float are rounded as an integer (add half of the last kept bit, minus one when that bit is even).
    NaN and infinity become 0x7F, so that they stay visible in their block: E4M3 has no infinity, and saturating one
    would turn a diverged number into a healthy one.
    """
    clamped = x.clamp(2.0**-6, E4M3_MAX)
    bits = torch.nan_to_num(clamped, nan=1.0).contiguous().view(torch.int32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    byte = (rounded - ((127 - 7) << 3)).clamp(E4M3_MIN_NORMAL_BYTE, E4M3_MAX_BYTE)
    return torch.where(x.isfinite(), byte, torch.full_like(byte, E4M3_NAN_BYTE)).to(torch.uint8)


def e4m3_decode(byte: Tensor) -> Tensor:
    """FP32 values of E4M3 bytes: all 256, subnormals and NaN included (foreign tensors may hold them)."""
    return byte.contiguous().view(torch.float8_e4m3fn).float()


def e4m3_adjacent(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two neighbouring scale bytes (lower, upper) around non-negative `x`, both in [0x08, 0x7E]."""
    bits = torch.nan_to_num(x.clamp(2.0**-6, E4M3_MAX), nan=1.0).contiguous().view(torch.int32)
    lower = ((bits >> 20) - ((127 - 7) << 3)).clamp(E4M3_MIN_NORMAL_BYTE, E4M3_MAX_BYTE - 1)
    return lower.to(torch.uint8), (lower + 1).to(torch.uint8)


def e8m0_encode_floor(amax: Tensor) -> Tensor:
    """E8M0 byte of the block scale by the OCP MX rule: exponent = floor(log2 amax) - 2. Non-finite amax gives 255."""
    exponent = (amax.contiguous().view(torch.int32) >> 23) & 0xFF
    byte = (exponent - 2).clamp(E8M0_MIN_BYTE, E8M0_MAX_BYTE)
    return torch.where(exponent == 255, torch.full_like(byte, E8M0_NAN_BYTE), byte).to(torch.uint8)


def e8m0_decode(byte: Tensor) -> Tensor:
    """FP32 values of E8M0 bytes: 2 ** (byte - 127); byte 0 is 2**-127 (subnormal), 255 is NaN."""
    wide = byte.to(torch.int32)
    value = torch.where(wide == 0, torch.full_like(wide, 0x00400000), wide << 23).view(torch.float32)
    return torch.where(wide == E8M0_NAN_BYTE, torch.full_like(value, float("nan")), value)


def e8m0_adjacent(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The two scale bytes (lower, upper) around the ideal exponent log2(amax) - 2.5.

    Rounding that number to the nearest integer is the floor rule above, so the pair always holds the block's own byte,
    and the other one is the byte that a slightly different amax would have had.
    """
    bits = amax.contiguous().view(torch.int32)
    upper_half = (bits & 0x7FFFFF) >= 0x3504F3  # mantissa of sqrt(2): the exponent above is the nearer one
    byte = e8m0_encode_floor(amax).to(torch.int32)
    lower = (byte - (~upper_half).int()).clamp(E8M0_MIN_BYTE, E8M0_MAX_BYTE - 1)
    return lower.to(torch.uint8), (lower + 1).to(torch.uint8)
