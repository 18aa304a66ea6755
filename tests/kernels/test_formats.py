"""Codecs, exhaustively: every code, every tie, every scale byte, against tables written down here a second time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from trace_kernels import formats as F4
from trace_kernels import pack_bits, pack_codes, parity_bits

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# (midpoint, code it rounds to): a tie goes to the even code.
TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]


def fp32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def ulp(x: float, steps: int) -> float:
    """The FP32 number `steps` (+-1) next to `x`."""
    return torch.nextafter(torch.tensor(x), torch.tensor(steps * math.inf)).item()


def fp32_sweep(low: float, high: float, stride: int) -> Tensor:
    """Every `stride`-th positive FP32 number in [low, high], by walking the bit patterns."""
    first, last = (int(fp32(x).view(torch.int32)) for x in (low, high))
    return torch.arange(first, last + 1, stride, dtype=torch.int32).view(torch.float32)


def e4m3_by_definition(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest_code(z: Tensor) -> Tensor:
    """Independent E2M1 rounding: least distance in FP64, the even code on a tie."""
    gaps = (z.double().abs().clamp(max=8).unsqueeze(-1) - torch.tensor(MAGNITUDES, dtype=torch.float64)).abs()
    best = gaps == gaps.amin(-1, keepdim=True)
    even_first = best.int() * torch.tensor([2, 1, 2, 1, 2, 1, 2, 1])
    index = even_first.argmax(-1)
    return (index + 8 * ((z < 0) & (index > 0))).to(torch.uint8)


class TestE2M1:
    def test_all_16_codes_decode(self) -> None:
        decoded = F4.e2m1_decode(torch.arange(16, dtype=torch.uint8))
        assert_bit_equal(decoded, fp32(*MAGNITUDES, *(-m for m in MAGNITUDES)))

    def test_grid_values_keep_their_code_and_zero_has_one(self) -> None:
        codes = torch.arange(16, dtype=torch.uint8)
        assert_bit_equal(F4.e2m1_encode(F4.e2m1_decode(codes)), torch.where(codes == 8, 0, codes))

    @pytest.mark.parametrize(("midpoint", "code"), TIES)
    @pytest.mark.parametrize("sign", [1, -1])
    def test_ties_go_to_the_even_code_and_one_ulp_decides(self, midpoint: float, code: int, sign: int) -> None:
        lower = MAGNITUDES.index(max(m for m in MAGNITUDES if m < midpoint))
        expected = torch.tensor([lower, code, lower + 1], dtype=torch.uint8)
        expected = torch.where((expected > 0) & (sign < 0), expected + 8, expected)
        z = sign * fp32(ulp(midpoint, -1), midpoint, ulp(midpoint, 1))
        assert_bit_equal(F4.e2m1_encode(z), expected)

    def test_sweep_against_least_distance(self) -> None:
        positive = torch.cat([torch.linspace(0, 8, 160_001), fp32_sweep(1e-30, 1e30, 4_000_037)])
        z = torch.cat([positive, -positive])
        assert_bit_equal(F4.e2m1_encode(z), nearest_code(z))

    def test_saturates_at_six(self) -> None:
        z = fp32(6.0, ulp(6.0, 1), 7.0, 3e38, math.inf)
        assert F4.e2m1_encode(z).tolist() == [7] * 5
        assert F4.e2m1_encode(-z).tolist() == [15] * 5

    def test_bracket_holds_the_value(self) -> None:
        z = torch.cat([torch.linspace(-6, 6, 48_001), fp32(*(ulp(m, s) for m in MAGNITUDES[1:7] for s in (1, -1)))])
        index = F4.e2m1_bracket(z).long()
        grid = fp32(*MAGNITUDES)
        assert ((grid[index] <= z.abs()) & (z.abs() <= grid[index + 1])).all()
        assert (grid[index + 1] > z.abs()).logical_or(z.abs() == 6).all()
        assert F4.e2m1_bracket(fp32(6.5, -1e30, math.inf)).tolist() == [6, 6, 6]

    def test_bracket_contains_the_rounded_code(self) -> None:
        z = torch.randn(100_000) * 3
        offset = F4.e2m1_magnitude(z) - F4.e2m1_bracket(z)
        assert set(offset.unique().tolist()) == {0, 1}

    def test_neighbours_differ_in_parity(self) -> None:
        parity = F4.e2m1_encode(fp32(*MAGNITUDES)) & 1
        assert (parity[1:] != parity[:-1]).all()


class TestPacking:
    def test_all_bytes_round_trip(self) -> None:
        every = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
        assert_bit_equal(F4.pack_codes(F4.unpack_codes(every)), every)

    def test_low_nibble_first(self) -> None:
        packed = F4.pack_codes(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
        assert packed.tolist() == [[0x21, 0x0F]]
        assert F4.unpack_codes(packed).tolist() == [[1, 2, 15, 0]]

    @pytest.mark.parametrize("shape", [(2,), (3, 16), (2, 1, 5, 34)])
    def test_codes_round_trip(self, shape: tuple[int, ...]) -> None:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        assert_bit_equal(F4.unpack_codes(F4.pack_codes(codes)), codes)

    @pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 61])
    def test_bits_round_trip_and_the_tail_is_zero(self, length: int) -> None:
        bits = torch.randint(0, 2, (3, length), dtype=torch.uint8)
        packed = F4.pack_bits(bits)
        assert packed.shape == (3, math.ceil(length / 8))
        assert_bit_equal(F4.unpack_bits(packed, length), bits)
        assert not F4.unpack_bits(packed, 8 * packed.shape[-1])[..., length:].any()

    def test_bits_are_lowest_first(self) -> None:
        assert F4.pack_bits(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.uint8)).tolist() == [0b1101, 1]

    def test_bits_of_bools(self) -> None:
        assert F4.pack_bits(torch.ones(8, dtype=torch.bool)).tolist() == [255]


class TestE4M3:
    def test_all_256_bytes_decode(self) -> None:
        decoded = F4.e4m3_decode(torch.arange(256, dtype=torch.uint8))
        expected = torch.tensor([e4m3_by_definition(b) for b in range(256)], dtype=torch.float32)
        assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
        number = ~expected.isnan()
        assert_bit_equal(decoded[number], expected[number])
        assert decoded[1].item() == 0.001953125

    def test_scale_bytes_keep_themselves(self) -> None:
        ours = torch.arange(0x08, 0x7F, dtype=torch.uint8)
        assert_bit_equal(F4.e4m3_encode_scale(F4.e4m3_decode(ours)), ours)

    def test_encode_equals_the_cast_on_a_dense_sweep(self) -> None:
        x = fp32_sweep(2.0**-6, 448.0, 61)
        assert_bit_equal(F4.e4m3_encode_scale(x), x.to(torch.float8_e4m3fn).view(torch.uint8))

    def test_encode_equals_the_cast_around_every_midpoint(self) -> None:
        values = F4.e4m3_decode(torch.arange(0x08, 0x7F, dtype=torch.uint8))
        middle = (values[1:] + values[:-1]) / 2
        x = torch.cat([middle, *(torch.nextafter(middle, fp32(end)) for end in (0.0, math.inf))])
        assert_bit_equal(F4.e4m3_encode_scale(x), x.to(torch.float8_e4m3fn).view(torch.uint8))

    def test_floor_and_saturation(self) -> None:
        """E4M3 has no infinity, so an unclamped cast of 480 is NaN and poisons the block (Model-Optimizer#1397)."""
        x = fp32(0.0, 2.0**-10, 2.0**-9, 448.0, 464.0, 480.0, 1e4, 3e38)
        assert F4.e4m3_encode_scale(x).tolist() == [8, 8, 8, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E]

    def test_not_finite_stays_visible(self) -> None:
        assert F4.e4m3_encode_scale(fp32(math.nan, math.inf)).tolist() == [0x7F, 0x7F]

    def test_adjacent_bytes_enclose_the_value_and_hold_the_rounded_one(self) -> None:
        x = fp32_sweep(2.0**-6, 448.0, 997)
        lower, upper = F4.e4m3_adjacent(x)
        assert_bit_equal(upper, lower + 1)
        assert ((F4.e4m3_decode(lower) <= x) & (x <= F4.e4m3_decode(upper))).all()
        rounded = F4.e4m3_encode_scale(x)
        assert ((rounded == lower) | (rounded == upper)).all()

    def test_adjacent_bytes_stay_in_range(self) -> None:
        lower, upper = F4.e4m3_adjacent(fp32(0.0, 2.0**-9, 448.0, 1e4))
        assert (lower.tolist(), upper.tolist()) == ([8, 8, 0x7D, 0x7D], [9, 9, 0x7E, 0x7E])


class TestE8M0:
    def test_all_256_bytes_decode(self) -> None:
        decoded = F4.e8m0_decode(torch.arange(256, dtype=torch.uint8))
        assert decoded[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
        assert decoded[255].isnan()

    def test_floor_rule(self) -> None:
        x = torch.cat([fp32_sweep(2.0**-120, 3e38, 1_000_003), 2.0 ** torch.arange(-120, 127).float()])
        expected = [math.frexp(v)[1] - 1 - 2 + 127 for v in x.tolist()]
        assert F4.e8m0_encode_floor(x).tolist() == expected

    def test_ends(self) -> None:
        assert F4.e8m0_encode_floor(fp32(0.0, 1e-45, 2.0**-126, math.inf, math.nan)).tolist() == [1, 1, 1, 255, 255]

    def test_adjacent_bytes_enclose_the_ideal_exponent(self) -> None:
        """`floor(log2 amax) - 2` is `log2 amax - 2.5` rounded to nearest; the pair is its floor and ceiling."""
        x = fp32_sweep(2.0**-100, 2.0**100, 100_003)
        lower, upper = F4.e8m0_adjacent(x)
        ideal = torch.log2(x.double()) - 2.5 + 127
        assert_bit_equal(lower, ideal.floor().to(torch.uint8))
        assert_bit_equal(upper, lower + 1)
        rounded = F4.e8m0_encode_floor(x)
        assert ((rounded == lower) | (rounded == upper)).all()

    def test_adjacent_bytes_stay_in_range(self) -> None:
        lower, upper = F4.e8m0_adjacent(fp32(0.0, 2.0**-126, 3e38))
        assert (lower.tolist(), upper.tolist()) == ([1, 1, 252], [2, 2, 253])


@pytest.mark.parametrize("shape", [(8,), (3, 64), (2, 5, 24)])
def test_parity_bits_of_packed_codes(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    assert_bit_equal(parity_bits(pack_codes(codes)), pack_bits(codes & 1))
