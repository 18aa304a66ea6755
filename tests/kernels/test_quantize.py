"""Block formats: the bytes against torchao, what a row may depend on, and what happens at zeros, NaN and odd widths.

Guided rounding has its own file, test_guided_rounding.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal, assert_sqnr
from trace_kernels import (
    FP8,
    MXFP4,
    NVFP4,
    BlockFormat,
    Quantized,
    fake_quantize,
    get_format,
    pack_codes,
    straight_through,
    unpack_codes,
)
from trace_kernels import formats as F4

SIX, FOUR_OVER_SIX = NVFP4(), NVFP4(four_over_six=True)
ALL = [pytest.param(f, id=i) for f, i in ((SIX, "nvfp4"), (FOUR_OVER_SIX, "four_over_six"), (MXFP4(), "mxfp4"))]
ALL.append(pytest.param(FP8(), id="fp8"))
FP4 = ALL[:3]
WITH_OUTER = [ALL[0], ALL[1], ALL[3]]
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def round_trip(fmt: BlockFormat, x: Tensor, outer: Tensor | None = None) -> Tensor:
    return fmt.dequantize(fmt.quantize(x, outer))


def assert_same_bytes(ours: Quantized, expected: Quantized) -> None:
    assert ours.width == expected.width
    for name in ("codes", "scale", "outer"):
        left, right = getattr(ours, name), getattr(expected, name)
        assert (left is None) == (right is None)
        if left is not None:
            assert_bit_equal(left, right)


def rows(q: Quantized, index: int | slice) -> Quantized:
    parts = (None if t is None else t[index] for t in (q.codes, q.scale, q.outer))
    return Quantized(*parts, q.width)  # type: ignore[arg-type]


def relative_error(fmt: BlockFormat, x: Tensor) -> float:
    return ((round_trip(fmt, x) - x).double().norm() / x.double().norm()).item()


def tied_blocks(scale_bytes: Tensor, outer: Tensor) -> Tensor:
    """Blocks of 16 whose normalised values are 6, every midpoint with both signs, and zero."""
    block = torch.cat([torch.tensor([6.0]), MIDPOINTS, -MIDPOINTS, torch.tensor([-0.0])])
    return (block * (F4.e4m3_decode(scale_bytes) * outer).unsqueeze(-1)).flatten(-2)


class TestAgainstTorchAO:
    """torchao clamps scales to 2**-6 as well and keeps -0 as code 8, where ours has one zero; all else is equal."""

    @staticmethod
    def check(x: Tensor, outer: Tensor) -> None:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        their_scale, their_packed = nvfp4_quantize(x, 16, outer)
        their_codes = unpack_codes(their_packed)
        ours = SIX.quantize(x, outer)
        assert ours.scale is not None
        assert_bit_equal(ours.scale, their_scale.view(torch.uint8))
        assert_bit_equal(ours.codes, torch.where(their_codes == 8, 0, their_codes))
        theirs = Quantized(their_codes, their_scale.view(torch.uint8), outer, x.shape[-1])
        assert_bit_equal(SIX.dequantize(ours) + 0.0, SIX.dequantize(theirs) + 0.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("spread", [1e-4, 0.02, 1.0, 300.0])
    def test_million_random_values(self, dtype: torch.dtype, spread: float) -> None:
        x = (torch.randn(1000, 1024) * spread).to(dtype)
        outer = SIX.outer_from_amax(x.abs().amax().float())
        self.check(x, outer)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_outer_scale_per_row(self, dtype: torch.dtype) -> None:
        x = (torch.randn(256, 512) * torch.logspace(-4, 3, 256).unsqueeze(-1)).to(dtype)
        outer = SIX.row_outer(x)
        assert outer is not None
        self.check(x, outer)

    @pytest.mark.parametrize("outer", [1.0, 0.037, 3.1e-5])
    def test_midpoints_under_every_scale(self, outer: float) -> None:
        x = tied_blocks(torch.arange(0x08, 0x7F, dtype=torch.uint8), torch.tensor(outer))
        self.check(x.reshape(7, -1), torch.tensor(outer))

    def test_outer_scale_is_torchaos_rounded_up_to_a_power_of_two(self) -> None:
        from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

        amax = torch.rand(1000) * 100
        assert_bit_equal(SIX.outer_from_amax(amax), per_tensor_amax_to_scale(amax).log2().ceil().exp2())
        exact = torch.tensor([448.0 * 6, 2 * 448.0 * 6])
        assert_bit_equal(SIX.outer_from_amax(exact), torch.tensor([1.0, 2.0]))


class TestRounding:
    def test_midpoints_by_hand(self) -> None:
        q = SIX.quantize(tied_blocks(torch.full((1,), 0x38, dtype=torch.uint8), torch.tensor(1.0)), torch.ones(1))
        assert q.scale is not None
        assert q.scale.tolist() == [0x38]
        assert q.codes.tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, 10, 10, 12, 12, 14, 14, 0]

    @pytest.mark.parametrize("fmt", ALL)
    def test_source_dtype_does_not_matter(self, fmt: BlockFormat) -> None:
        """Rounding a BF16 source in FP32 in one place and in BF16 in another moved 4 % of the codes (miles#1054)."""
        x = torch.randn(1000, 1024).bfloat16()
        assert_same_bytes(fmt.quantize(x), fmt.quantize(x.float()))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("fmt", FP4)
    def test_trainer_sees_what_the_rollout_packs(self, fmt: BlockFormat, dtype: torch.dtype) -> None:
        ties = torch.cat([torch.tensor([6.0, -0.0]), MIDPOINTS, -MIDPOINTS]).repeat(2)  # scale 1 or a power of two
        x = torch.cat([torch.randn(1000, 992), ties.expand(1000, 32)], dim=-1).to(dtype)
        q = fmt.quantize(x)
        stored = Quantized(unpack_codes(pack_codes(q.codes)), q.scale, q.outer, q.width)
        assert_bit_equal(fake_quantize(x, fmt), fmt.dequantize(stored, dtype))

    @pytest.mark.parametrize("fmt", FP4)
    def test_decoding_rounds_once(self, fmt: BlockFormat) -> None:
        """Code, block scale and outer scale multiply exactly in FP64, so FP32 must hold that product rounded once."""
        q = fmt.quantize(torch.randn(256, 512))
        assert q.scale is not None
        scale = F4.e4m3_decode(q.scale) if fmt.has_outer else F4.e8m0_decode(q.scale)
        exact = F4.e2m1_decode(q.codes).double() * scale.double().repeat_interleave(fmt.block_size, -1)
        exact = exact if q.outer is None else exact * q.outer.double()
        assert_bit_equal(fmt.dequantize(q), exact.float())

    @pytest.mark.parametrize("fmt", [ALL[0], ALL[2], ALL[3]])
    def test_idempotent_with_the_outer_scale_held(self, fmt: BlockFormat) -> None:
        """Fails if values are divided by the unrounded scale but stored with the rounded (Model-Optimizer#2243)."""
        x = torch.randn(512, 512) * torch.logspace(-3, 0, 512)
        outer = fmt.outer_from_amax(x.abs().amax())
        q = fmt.quantize(x, outer)
        assert_same_bytes(fmt.quantize(fmt.dequantize(q), outer), q)

    @pytest.mark.parametrize(("fmt", "bound"), [(SIX, 0.2), (FOUR_OVER_SIX, 0.2), (MXFP4(), 0.25)], ids=repr)
    def test_error_is_bounded_by_the_block_maximum(self, fmt: BlockFormat, bound: float) -> None:
        """Half of the gap 4 to 6 is 1/6 of the maximum; MXFP4's floor rule also cuts maxima between 6 and 8 scales."""
        x = torch.randn(512, 512)
        error = (round_trip(fmt, x) - x).abs().unflatten(-1, (-1, fmt.block_size)).amax(-1)
        assert (error < bound * x.abs().unflatten(-1, (-1, fmt.block_size)).amax(-1)).all()

    @pytest.mark.parametrize(
        ("fmt", "min_db"), [(SIX, 20.3), (FOUR_OVER_SIX, 21.1), (MXFP4(), 18.8), (FP8(), 31.5)], ids=repr
    )
    def test_sqnr_of_normal_weights(self, fmt: BlockFormat, min_db: float) -> None:
        x = torch.randn(1024, 1024) * 0.02
        assert_sqnr(round_trip(fmt, x), x, min_db)

    def test_fp8_is_torchs_cast(self) -> None:
        x = torch.randn(64, 256)
        q = FP8().quantize(x, torch.full((64, 1), 0.25))
        assert_bit_equal(q.codes, (x * 4).to(torch.float8_e4m3fn).view(torch.uint8))


class TestRowsAreIndependent:
    """A token's bytes depend on the token alone; a tensor-wide outer scale makes them depend on the batch."""

    @pytest.mark.parametrize("fmt", ALL)
    def test_other_rows_change_nothing(self, fmt: BlockFormat) -> None:
        x = torch.randn(40, 96)
        q = fmt.quantize(x)
        louder = torch.cat([x[:7] * 1e3, x, torch.full((1, 96), 1e5)])
        assert_same_bytes(rows(fmt.quantize(louder), slice(7, 47)), q)
        assert_same_bytes(fmt.quantize(x[11:12]), rows(q, slice(11, 12)))

    @pytest.mark.parametrize("fmt", ALL)
    @pytest.mark.parametrize("length", [1, 7])
    @pytest.mark.parametrize("batch", [1, 2, 31, 32, 33, 128])
    def test_batch_size_changes_nothing(self, fmt: BlockFormat, batch: int, length: int) -> None:
        """Kernels that switch path at batch 32 returned other values (pytorch/ao#3783, #4023)."""
        x = torch.randn(batch, length, 48)
        q = fmt.quantize(x)
        for b in {0, batch // 2, batch - 1}:
            assert_same_bytes(fmt.quantize(x[b]), rows(q, b))
        assert_bit_equal(fmt.dequantize(q)[-1], round_trip(fmt, x[-1]))


class TestZerosAndOverflow:
    def test_zero_block_beside_a_loud_one(self) -> None:
        """A block amax of 0 became 1, passed 448 and turned into NaN (Model-Optimizer#1397, #1633)."""
        x = torch.cat([torch.zeros(1, 16), torch.ones(1, 16)], dim=-1)
        q = SIX.quantize(x)
        assert q.scale is not None
        assert q.scale.tolist() == [[0x08, 0x7B]]  # 352, the nearest to 2**11 / 6
        assert_bit_equal(SIX.dequantize(q)[:, :16], torch.zeros(1, 16))

    @pytest.mark.parametrize("fmt", ALL)
    @pytest.mark.parametrize("sign", [1, -1])
    def test_zero_rows_decode_to_zero(self, fmt: BlockFormat, sign: int) -> None:
        """All-zero activations gave an infinite scale and NaN logits (compressed-tensors#595, vLLM#45212)."""
        x = torch.randn(5, 64)
        x[2] = sign * 0.0
        q = fmt.quantize(x)
        value = fmt.dequantize(q)
        assert (value[2] == 0).all()
        assert value.isfinite().all()
        for scale, decode in ((q.scale, getattr(fmt, "decode_scale", None)), (q.outer, Tensor.float)):
            assert scale is None or decode(scale).isfinite().all()

    @pytest.mark.parametrize("fmt", ALL)
    def test_nothing_overflows_at_the_ends_of_fp32(self, fmt: BlockFormat) -> None:
        x = torch.randn(2, 64) * torch.tensor([[1e-38], [5e37]])
        assert round_trip(fmt, x).isfinite().all()

    @pytest.mark.parametrize("fmt", WITH_OUTER)
    def test_held_outer_scale_saturates(self, fmt: BlockFormat) -> None:
        """A KV outer scale is chosen before generation; what exceeds it is cut to the largest value, never NaN."""
        value = round_trip(fmt, torch.full((1, 16), 1e6), torch.ones(1))
        assert (value == (448.0 if fmt.name == "fp8" else 2688.0)).all()

    @pytest.mark.parametrize("fmt", ALL)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_not_finite_shows_in_its_row_only(self, fmt: BlockFormat, bad: float) -> None:
        x = torch.randn(4, 64)
        clean = round_trip(fmt, x)
        x[1, 37] = bad
        value = round_trip(fmt, x)
        assert not value[1, 37].isfinite()
        keep = [0, 2, 3]
        assert_bit_equal(value[keep], clean[keep])

    @pytest.mark.parametrize("fmt", WITH_OUTER)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_not_finite_shows_under_a_held_outer_scale(self, fmt: BlockFormat, bad: float) -> None:
        x = torch.randn(4, 64)
        x[1, 37] = bad
        value = round_trip(fmt, x, torch.full((1,), 0.01))
        assert not value[1, 37].isfinite()
        assert value[[0, 2, 3]].isfinite().all()


class TestScaleInvariance:
    @pytest.mark.parametrize("fmt", WITH_OUTER)
    @pytest.mark.parametrize("factor", [1e-6, 1e4])
    def test_relative_error_does_not_depend_on_the_magnitude(self, fmt: BlockFormat, factor: float) -> None:
        """Small block scales underflowed in a BF16 path (vLLM#34577); the FP32 outer scale is what prevents it."""
        x = torch.randn(256, 1024) * 0.02
        # The outer scale is a power of two, so another factor puts block scales elsewhere between two of theirs.
        assert relative_error(fmt, x * factor) == pytest.approx(relative_error(fmt, x), rel=5e-3)

    @pytest.mark.parametrize("fmt", ALL)
    @pytest.mark.parametrize("power", [-20, 13])
    def test_powers_of_two_change_no_code(self, fmt: BlockFormat, power: int) -> None:
        x = torch.randn(64, 256)
        assert_bit_equal(fmt.quantize(x * 2.0**power).codes, fmt.quantize(x).codes)


class TestFourOverSix:
    def test_no_block_gets_worse_and_many_get_better(self) -> None:
        x = torch.randn(512, 1024)
        outer = FOUR_OVER_SIX.row_outer(x)
        ours, plain = (
            (round_trip(f, x, outer) - x).double().square().unflatten(-1, (-1, 16)).sum(-1)
            for f in (FOUR_OVER_SIX, SIX)
        )
        assert (ours <= plain * (1 + 1e-6)).all()
        assert (ours < plain * 0.99).double().mean() > 0.2

    def test_the_larger_scale_fits(self) -> None:
        """A block of equal values prefers amax -> 4 wherever 6 is not exact; 256 * 1.5 stays below 448."""
        q = FOUR_OVER_SIX.quantize(torch.randn(512, 1024))
        assert q.scale is not None
        assert q.scale.max() <= F4.e4m3_encode_scale(torch.tensor(384.0))

    def test_by_hand(self) -> None:
        """4 and 3 are exact when amax -> 4; when amax -> 6, the 3 becomes 4.5 and is not on the grid."""
        x = torch.tensor([[4.0, *[3.0] * 15]])
        assert_bit_equal(round_trip(FOUR_OVER_SIX, x, torch.ones(1, 1)), x)
        assert not torch.equal(round_trip(SIX, x, torch.ones(1, 1)), x)


class TestShapes:
    @pytest.mark.parametrize("fmt", ALL)
    @pytest.mark.parametrize("width", [16, 24, 17, 1])
    @pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 5)])
    def test_any_width_and_odd_rows(self, fmt: BlockFormat, width: int, lead: tuple[int, ...]) -> None:
        """Widths that are no multiple of the block are padded with zeros, which no scale notices."""
        x = torch.randn(*lead, width)
        q = fmt.quantize(x)
        padded = math.ceil(width / fmt.block_size) * fmt.block_size
        assert q.codes.shape == (*lead, padded)
        assert q.width == width
        assert q.scale is None or q.scale.shape == (*lead, padded // fmt.block_size)
        value = fmt.dequantize(q)
        assert value.shape == x.shape
        wide = torch.nn.functional.pad(x, (0, padded - width))
        assert_bit_equal(round_trip(fmt, wide)[..., :width], value)

    @pytest.mark.parametrize("fmt", ALL)
    def test_views_quantise_like_their_copies(self, fmt: BlockFormat) -> None:
        x = torch.randn(64, 48).t()
        assert_same_bytes(fmt.quantize(x), fmt.quantize(x.contiguous()))

    @pytest.mark.parametrize("fmt", ALL)
    def test_dequantises_into_the_asked_dtype(self, fmt: BlockFormat) -> None:
        x = torch.randn(3, 32)
        assert_bit_equal(fmt.dequantize(fmt.quantize(x), torch.bfloat16), round_trip(fmt, x).bfloat16())


class TestStraightThrough:
    @pytest.mark.parametrize("fmt", ALL)
    def test_gradient_is_upstreams(self, fmt: BlockFormat) -> None:
        x = (torch.randn(8, 48) * 10).requires_grad_()
        upstream = torch.randn(8, 48)
        value = fake_quantize(x, fmt)
        value.backward(upstream)
        assert x.grad is not None
        assert_bit_equal(x.grad, upstream)
        assert_bit_equal(value.detach(), round_trip(fmt, x.detach()))

    def test_value_forward_gradient_of_x(self) -> None:
        x, value = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
        out = straight_through(x, value)
        out.square().sum().backward()
        assert x.grad is not None
        assert_bit_equal(x.grad, 2 * value.detach())
        assert value.grad is None


class TestGetFormat:
    def test_words_of_the_recipe(self) -> None:
        assert get_format("none") is None
        assert get_format("nvfp4") == SIX
        assert get_format("nvfp4", four_over_six=True) == FOUR_OVER_SIX
        assert get_format("mxfp4") == MXFP4()
        assert get_format("fp8") == FP8()

    def test_unknown_word_names_the_choices(self) -> None:
        with pytest.raises(ValueError, match=r"'int4'.*none, nvfp4, mxfp4, fp8"):
            get_format("int4")
