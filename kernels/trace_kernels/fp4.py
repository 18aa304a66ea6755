"""The FP4 arithmetic that all Triton kernels share: the device twins of `formats.py` and of `BlockFormat.quantize`.

Same integer arithmetic, same order of operations, so the same bytes (ties included) as the torch reference, in the
interpreter and on a GPU. Three traps are closed here once:

  * divisions are `div_rn`: Triton's `/` may be an approximation on a GPU;
  * maxima are taken over the *bits* of |x|, as integers: a NaN is the largest of them and is not lost;
  * kernels that compare squared errors are launched with `enable_fp_fusion=False`, or a fused multiply-add decides
  ties.

    R rows   G blocks of a row   B elements of a block (16 for NVFP4, 32 for MXFP4)
    x_RGB FP32   outer_R FP32   ->   codes int32 [R, G, B] in 0..15, scale bytes int32 [R, G]
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def abs_bits(x):
    """FP32 |x| as int32: ordered like |x|, NaN largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def next_power_of_two(x):
    """The smallest power of two >= positive FP32 x; NaN and infinity stay."""
    bits = x.to(tl.int32, bitcast=True)
    finite = bits < 0x7F800000
    rounded = ((tl.where(finite, bits, 0) + 0x7FFFFF) >> 23) << 23
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def outer_from_amax(amax, LIMIT: tl.constexpr):
    """FP32 outer scale for `amax`; LIMIT is the largest block scale times 6: 448 * 6, or 256 * 6 for four-over-six."""
    outer = next_power_of_two(tl.math.div_rn(amax, tl.full(amax.shape, LIMIT, tl.float32)))
    floor = tl.full(amax.shape, 7.888609052210118e-31, tl.float32)  # 2**-100, OUTER_MIN
    return tl.where(outer < floor, floor, outer)


@triton.jit
def e2m1_encode(z):
    """E2M1 codes (int32): nearest, ties to the even code; a magnitude of 0 has code 0 whatever its sign.

    Adding 2**22 times the power of two at or below |z| (at least 1) rounds |z| to its two kept bits. The sum's bits
    count the half steps n of that octave, 2 <= n <= 4 (from 0 in the lowest), and index = n + 2 * octave.
    """
    magnitude = tl.minimum(tl.abs(z), 6.0)
    octave = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    rounded = (magnitude + (octave + 0x0B000000).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    index = rounded - octave + (octave >> 22) - 0x0B0000FE
    return tl.where(z < -0.25, index + 8, index)


@triton.jit
def e2m1_bracket(z):
    """Index (0..6, int32) of the lower of the two E2M1 magnitudes around |z|; see `formats.e2m1_bracket`."""
    bits = abs_bits(z)
    one_bit = (bits >> 22) - 252
    halves = (tl.minimum(bits, 0x40000000).to(tl.float32, bitcast=True) * 2).to(tl.int32)  # up to 2, NaN too
    return tl.minimum(tl.maximum(tl.maximum(halves, one_bit), 0), 6)


@triton.jit
def signed_code(index, z):
    """Codes from magnitude indices and the signs of z; index 0 has code 0 whatever the sign."""
    return tl.where((z < 0) & (index > 0), index + 8, index)


@triton.jit
def e2m1_value(code):
    """FP32 values of codes 0..15 (int32)."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)  # the exponent is 126 too small, and 0.5 is subnormal
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3_scale_byte(x):
    """Non-negative FP32 to E4M3 bytes in [0x08, 0x7E] (int32), 0x7F for NaN and infinity."""
    raw = abs_bits(x)
    bits = tl.minimum(tl.maximum(raw, 0x3C800000), 0x43E00000)  # 2**-6 ... 448
    byte = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    return tl.where(raw < 0x7F800000, tl.minimum(byte, 0x7E), 0x7F)


@triton.jit
def e4m3_scale_value(byte):
    """FP32 values of our scale bytes (int32): normal codes and NaN, no subnormals."""
    bits = tl.where(byte == 0x7F, 0x7FC00000, (byte + 960) << 20)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def lower_e4m3_byte(amax_bits, outer):
    """The lower of the two scale bytes around the unrounded scale of finite maxima; see `formats.e4m3_adjacent`."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    ideal = tl.math.div_rn(tl.math.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), outer)
    bits = tl.minimum(tl.maximum(abs_bits(ideal), 0x3C800000), 0x43E00000)  # 2**-6 ... 448
    return tl.minimum(tl.maximum((bits >> 20) - 960, 0x08), 0x7D)


@triton.jit
def lower_e8m0_byte(amax_bits):
    """The lower of the two scale bytes around log2(amax) - 2.5 of finite maxima; see `formats.e8m0_adjacent`."""
    upper_half = (amax_bits & 0x7FFFFF) >= 0x3504F3
    byte = e8m0_scale_byte(amax_bits)
    return tl.minimum(tl.maximum(tl.where(upper_half, byte, byte - 1), 1), 253)


@triton.jit
def e8m0_scale_byte(amax_bits):
    """E8M0 byte (int32) by the OCP rule from the bits of amax: exponent - 2, 255 where not finite."""
    exponent = amax_bits >> 23
    return tl.where(exponent == 255, 255, tl.minimum(tl.maximum(exponent - 2, 1), 254))


@triton.jit
def e8m0_scale_value(byte):
    """FP32 values of E8M0 bytes 1..255 (int32)."""
    bits = tl.where(byte == 255, 0x7FC00000, byte << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _nvfp4_codes(x_RGB, byte_RG, outer_R):
    inverse = tl.math.div_rn(tl.full(outer_R.shape, 1.0, tl.float32), outer_R)
    scale_RG = e4m3_scale_value(byte_RG)
    factor_RG = tl.math.div_rn(tl.broadcast_to(inverse[:, None], scale_RG.shape), scale_RG)
    return e2m1_encode(x_RGB * factor_RG[:, :, None])


@triton.jit
def _sum_pairs(x_RGB):
    """Sum over the last dim in the reference's order: halves of even and odd entries, again and again. B = 16."""
    R: tl.constexpr = x_RGB.shape[0]
    G: tl.constexpr = x_RGB.shape[1]
    even, odd = tl.split(tl.reshape(x_RGB, (R, G, 8, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (R, G, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (R, G, 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def _squared_error(x_RGB, byte_RG, outer_R):
    value = e2m1_value(_nvfp4_codes(x_RGB, byte_RG, outer_R)) * e4m3_scale_value(byte_RG)[:, :, None]
    error = x_RGB - value * outer_R[:, None, None]
    return _sum_pairs(error * error)


@triton.jit
def _ideal_byte(amax_RG, outer_R, DIVISOR: tl.constexpr):
    divided = tl.math.div_rn(amax_RG, tl.full(amax_RG.shape, DIVISOR, tl.float32))
    return e4m3_scale_byte(tl.math.div_rn(divided, tl.broadcast_to(outer_R[:, None], amax_RG.shape)))


@triton.jit
def quantize_nvfp4(x_RGB, outer_R, FOUR_OVER_SIX: tl.constexpr):
    """Codes and E4M3 scale bytes; launch with `enable_fp_fusion=False` when FOUR_OVER_SIX."""
    amax_RG = tl.max(abs_bits(x_RGB), 2).to(tl.float32, bitcast=True)
    byte_RG = _ideal_byte(amax_RG, outer_R, 6.0)
    if FOUR_OVER_SIX:
        four_RG = _ideal_byte(amax_RG, outer_R, 4.0)
        better = _squared_error(x_RGB, four_RG, outer_R) < _squared_error(x_RGB, byte_RG, outer_R)
        byte_RG = tl.where(better, four_RG, byte_RG)
    return _nvfp4_codes(x_RGB, byte_RG, outer_R), byte_RG


@triton.jit
def quantize_mxfp4(x_RGB):
    """Codes and E8M0 scale bytes."""
    byte_RG = e8m0_scale_byte(tl.max(abs_bits(x_RGB), 2))
    scale_RG = e8m0_scale_value(byte_RG)
    inverse_RG = tl.math.div_rn(tl.full(scale_RG.shape, 1.0, tl.float32), scale_RG)
    return e2m1_encode(x_RGB * inverse_RG[:, :, None]), byte_RG


@triton.jit
def pack_codes(codes_RGB):
    """Codes int32 [R, G, B] to bytes uint8 [R, G, B / 2], element 2i in the low nibble."""
    R: tl.constexpr = codes_RGB.shape[0]
    G: tl.constexpr = codes_RGB.shape[1]
    B: tl.constexpr = codes_RGB.shape[2]
    low, high = tl.split(tl.reshape(codes_RGB, (R, G, B // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def pack_parity(codes_RGB):
    """Lowest bits of codes int32 [R, G, B] to bytes uint8 [R, G, B / 8], element 8i in the lowest bit."""
    R: tl.constexpr = codes_RGB.shape[0]
    G: tl.constexpr = codes_RGB.shape[1]
    B: tl.constexpr = codes_RGB.shape[2]
    bits = tl.reshape(codes_RGB & 1, (R, G, B // 8, 8)) << tl.arange(0, 8)[None, None, None, :]
    return tl.sum(bits, 3).to(tl.uint8)
