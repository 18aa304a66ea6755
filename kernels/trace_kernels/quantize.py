"""Quantise to a block format, dequantise, and round under guidance: the one function both sides of RL call.

The rollout packs what `BlockFormat.quantize` returns; the trainer dequantises the same result and passes gradients
straight through. There is no second implementation to drift, so equal inputs give equal bytes.

    x [..., K]  ->  codes uint8 [..., Kp]   one per element, Kp = K rounded up to whole blocks (the pad is zero)
                    scale uint8 [..., Kp / block]     E4M3 (NVFP4) or E8M0 (MXFP4); None for FP8
                    outer FP32 broadcastable to [..., 1]        None for MXFP4; a power of two where it is ours
    value = (code value * block scale) * outer        the first product is exact, so there is one rounding at most

The outer scale is the smallest power of two that lets the largest value be represented. Every value then fits BF16
(six significant bits times a power of two), so a kernel that multiplies by the outer scale last, a matmul over a BF16
copy and the trainer's fake quantiser see the same numbers. Block scales are floats: half a step of range is all it
costs.

Order of operations (frozen, FP32 throughout): `scale = E4M3((amax_block / 6) / outer)`, then
`code = E2M1(x * ((1 / outer) / scale))`. It is the order of torchao's `nvfp4_quantize`, our independent oracle;
dividing `x` by the product instead moves codes by one ulp at ties.

Guided rounding (TRACE, arXiv 2610.07767): normalise by the *rollout's* scale, bracket the result by the two adjacent
E2M1 codes and take the one nearest the rollout's code (`round_full`) or the one with its parity (`round_parity`).

What was left out: stochastic rounding and random rotations, which make the two sides differ by design.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trace_kernels import formats as F4

OUTER_MIN = 2.0**-100  # keeps 1 / outer / scale finite; an all-zero row gets this outer scale and decodes to exact 0


@dataclass
class Quantized:
    """Codes and scales of one tensor, layout as at the top of this file; `width` is K before padding."""

    codes: Tensor
    scale: Tensor | None
    outer: Tensor | None
    width: int


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two >= positive FP32 `x`, exactly (`log2` is not, on every device); NaN and inf stay."""
    rounded = (((torch.nan_to_num(x, nan=1.0, posinf=1.0).view(torch.int32) + 0x7FFFFF) >> 23) << 23).view(
        torch.float32
    )
    return torch.where(x.isfinite(), rounded, x)


def divide(x: Tensor, divisor: float) -> Tensor:
    """`x / divisor`, rounded correctly on every device.

    With a Python number as divisor CUDA multiplies by its reciprocal, which is one ulp off for one value in a thousand.
    """
    return x / _constant(divisor, x.device)


def blocks(x: Tensor, block_size: int) -> Tensor:
    """FP32 view [..., Kp / block, block] of `x`, zero-padded to whole blocks."""
    pad = -x.shape[-1] % block_size
    x = torch.nn.functional.pad(x.float(), (0, pad)) if pad else x.float()
    return x.unflatten(-1, (-1, block_size))


class BlockFormat(ABC):
    """An element grid with its scales. Subclasses are frozen dataclasses; two equal ones quantise alike."""

    name: ClassVar[str]
    guidable: ClassVar[bool]  # whether guided rounding is defined on this grid
    has_outer: ClassVar[bool]
    block_size: int
    bits_per_element: float

    @abstractmethod
    def outer_from_amax(self, amax: Tensor) -> Tensor | None:
        """FP32 outer scale that lets `amax` be represented, or None where the format has none."""

    @abstractmethod
    def quantize(self, x: Tensor, outer: Tensor | None = None) -> Quantized:
        """Round to nearest with own block scales. `outer` defaults to one scale per row (the last dim's amax)."""

    @abstractmethod
    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., width] in `dtype`."""

    def row_outer(self, x: Tensor) -> Tensor | None:
        """Outer scale per row, [..., 1]: a token's codes then never depend on its neighbours in the batch."""
        return self.outer_from_amax(x.abs().amax(-1, keepdim=True).float())


class _E2M1Format(BlockFormat):
    """What NVFP4 and MXFP4 share: E2M1 elements under a one-byte block scale."""

    guidable = True

    nan_scale: ClassVar[int]  # the scale byte that decodes to NaN

    @abstractmethod
    def scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> Tensor:
        """Block scale bytes [..., n_blocks] by round to nearest (or the format's rule) for [..., n_blocks, block]."""

    @abstractmethod
    def adjacent_scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> tuple[Tensor, Tensor]:
        """The two neighbouring bytes around the unrounded block scale: what one parity bit chooses from."""

    @abstractmethod
    def decode_scale(self, scale: Tensor) -> Tensor:
        """FP32 values of scale bytes."""

    def normalize(self, x: Tensor, scale: Tensor, outer: Tensor | None) -> Tensor:
        """`x` in units of its block scale, FP32 [..., n_blocks, block]."""
        inverse = 1.0 if outer is None else 1.0 / outer
        return blocks(x, self.block_size) * (inverse / self.decode_scale(scale)).unsqueeze(-1)

    def quantize(self, x: Tensor, outer: Tensor | None = None) -> Quantized:
        outer = self.row_outer(x) if outer is None else outer
        scale = self.scale_bytes(blocks(x, self.block_size), outer)
        codes = F4.e2m1_encode(self.normalize(x, scale, outer)).flatten(-2)
        return Quantized(codes, scale, outer, x.shape[-1])

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scale is not None
        exact = F4.e2m1_decode(q.codes).unflatten(-1, (-1, self.block_size)) * self.decode_scale(q.scale).unsqueeze(-1)
        value = exact.flatten(-2) if q.outer is None else exact.flatten(-2) * q.outer
        return value[..., : q.width].to(dtype)

    def scale_from_parity(self, x: Tensor, outer: Tensor | None, parity: Tensor) -> Tensor:
        """Of the two bytes adjacent to the own ideal scale, the one whose last bit equals `parity` [..., n_blocks]."""
        lower, upper = self.adjacent_scale_bytes(blocks(x, self.block_size), outer)
        return torch.where((lower & 1) == parity, lower, upper)

    def round_parity(self, x: Tensor, scale: Tensor, outer: Tensor | None, parity: Tensor) -> Quantized:
        """Of the two codes that bracket `x`, the one with the rollout's parity bit. `parity` 0/1 uint8 [..., Kp]."""
        z = self.normalize(x, scale, outer).flatten(-2)
        near = F4.e2m1_bracket(z)
        index = near + ((near & 1) != parity)
        return Quantized(F4.with_sign(index, z < 0), self._mark(scale, x), outer, x.shape[-1])

    def round_full(self, x: Tensor, scale: Tensor, outer: Tensor | None, rollout_codes: Tensor) -> Quantized:
        """Of the two codes that bracket `x`, the one nearest in value to the rollout's code (uint8 [..., Kp])."""
        z = self.normalize(x, scale, outer).flatten(-2)
        near = F4.e2m1_bracket(z)
        inner, outward = (F4.with_sign(index, z < 0) for index in (near, near + 1))
        target = F4.e2m1_decode(rollout_codes)
        inner_gap, outward_gap = ((F4.e2m1_decode(codes) - target).abs() for codes in (inner, outward))
        codes = torch.where(inner_gap <= outward_gap, inner, outward)
        return Quantized(codes, self._mark(scale, x), outer, x.shape[-1])

    def _mark(self, scale: Tensor, x: Tensor) -> Tensor:
        """NaN scales where `x` is not finite: the rollout's scale is finite and would hide a diverged trainer."""
        finite = blocks(x, self.block_size).isfinite().all(-1)
        return torch.where(finite, scale, torch.full_like(scale, self.nan_scale))


@dataclass(frozen=True)
class NVFP4(_E2M1Format):
    """E2M1 in blocks of 16 under E4M3 scales and an FP32 outer scale.

    With `four_over_six` (arXiv 2512.02010) each block tries amax -> 6 and amax -> 4 and keeps the lower squared error,
    amax -> 6 on a tie. The outer scale then leaves room for the 1.5 times larger scale: 256 * 1.5 = 384 <= 448.
    """

    name = "nvfp4"
    has_outer = True
    four_over_six: bool = False
    block_size = 16
    nan_scale = F4.E4M3_NAN_BYTE
    bits_per_element = 4.5

    def outer_from_amax(self, amax: Tensor) -> Tensor:
        limit = (256.0 if self.four_over_six else F4.E4M3_MAX) * F4.E2M1_MAX
        return next_power_of_two(divide(amax, limit)).clamp_min(OUTER_MIN)

    def decode_scale(self, scale: Tensor) -> Tensor:
        return F4.e4m3_decode(scale)

    def scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> Tensor:
        assert outer is not None
        amax = x_blocks.abs().amax(-1)
        six = F4.e4m3_encode_scale(divide(amax, 6.0) / outer)
        if not self.four_over_six:
            return six
        four = F4.e4m3_encode_scale(divide(amax, 4.0) / outer)
        better = self._squared_error(x_blocks, four, outer) < self._squared_error(x_blocks, six, outer)
        return torch.where(better, four, six)

    def _squared_error(self, x_blocks: Tensor, scale: Tensor, outer: Tensor) -> Tensor:
        factor = self.decode_scale(scale).unsqueeze(-1)
        z = x_blocks * ((1.0 / outer).unsqueeze(-1) / factor)
        value = (F4.e2m1_decode(F4.e2m1_encode(z)) * factor) * outer.unsqueeze(-1)
        error = (x_blocks - value).square()
        while error.shape[-1] > 1:  # a fixed order of additions: a library sum may differ between devices
            error = error[..., ::2] + error[..., 1::2]
        return error.squeeze(-1)

    def adjacent_scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> tuple[Tensor, Tensor]:
        assert outer is not None
        assert not self.four_over_six
        return F4.e4m3_adjacent(divide(x_blocks.abs().amax(-1), 6.0) / outer)


@dataclass(frozen=True)
class MXFP4(_E2M1Format):
    """E2M1 in blocks of 32 under power-of-two scales, exponent = floor(log2 amax) - 2 (OCP MX); no outer scale."""

    name = "mxfp4"
    has_outer = False
    block_size = 32
    nan_scale = F4.E8M0_NAN_BYTE
    bits_per_element = 4.25

    def outer_from_amax(self, amax: Tensor) -> None:
        return None

    def quantize(self, x: Tensor, outer: Tensor | None = None) -> Quantized:
        return super().quantize(x, None)

    def decode_scale(self, scale: Tensor) -> Tensor:
        return F4.e8m0_decode(scale)

    def scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> Tensor:
        return F4.e8m0_encode_floor(x_blocks.abs().amax(-1))

    def adjacent_scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> tuple[Tensor, Tensor]:
        return F4.e8m0_adjacent(x_blocks.abs().amax(-1))


@dataclass(frozen=True)
class FP8(BlockFormat):
    """E4M3 elements under one FP32 scale per row. Not guidable: with 256 codes the two sides hardly differ."""

    name = "fp8"
    guidable = False
    has_outer = True
    block_size = 1
    bits_per_element = 8.0

    def outer_from_amax(self, amax: Tensor) -> Tensor:
        return next_power_of_two(divide(amax, F4.E4M3_MAX)).clamp_min(OUTER_MIN)

    def quantize(self, x: Tensor, outer: Tensor | None = None) -> Quantized:
        outer = self.outer_from_amax(x.abs().amax(-1, keepdim=True).float()) if outer is None else outer
        z = x.float() * (1.0 / outer)
        z = torch.where(z.isinf(), torch.full_like(z, float("nan")), z.clamp(-F4.E4M3_MAX, F4.E4M3_MAX))
        codes = z.to(torch.float8_e4m3fn)
        return Quantized(codes.view(torch.uint8), None, outer, x.shape[-1])

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.outer is not None
        return (F4.e4m3_decode(q.codes) * q.outer).to(dtype)


_OWN: dict[str, BlockFormat] = {}


def register_format(fmt: BlockFormat) -> None:
    """Let recipes name a format of yours for weights and activations; it runs in plain torch, without our kernels.

    Args:
        fmt: a frozen dataclass under `BlockFormat` with `guidable = False`.

    Raises:
        ValueError: a name that is taken by another format, or a format that wants guidance.
    """
    if fmt.name in ("none", "nvfp4", "mxfp4", "fp8") or _OWN.get(fmt.name, fmt) != fmt:
        raise ValueError(f"the format name {fmt.name!r} is taken")
    if fmt.guidable:
        raise ValueError(f"{fmt.name!r}: guided rounding is defined for our E2M1 formats alone; set guidable = False")
    _OWN[fmt.name] = fmt


def is_registered(name: str) -> bool:
    """Whether a recipe's word is a format of a user's."""
    return name in _OWN


def get_format(name: str, *, four_over_six: bool = False) -> BlockFormat | None:
    """The format object for a recipe's word: `none | nvfp4 | mxfp4 | fp8`, or one that was registered.

    The only place that chooses.

    Raises:
        ValueError: for any other word.
    """
    known: dict[str, BlockFormat | None] = {
        "none": None,
        "nvfp4": NVFP4(four_over_six=four_over_six),
        "mxfp4": MXFP4(),
        "fp8": FP8(),
        **_OWN,
    }
    if name not in known:
        raise ValueError(f"unknown number format {name!r}; choose one of {', '.join(known)}")
    return known[name]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward pass, the gradient of `x` in the backward pass (plain STE, also beyond +-6 scales)."""
    return _StraightThrough.apply(x, value)


def fake_quantize(x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
    """`DQ(Q(x))` in the dtype of `x`, with a straight-through gradient."""
    with torch.no_grad():
        value = fmt.dequantize(fmt.quantize(x, outer), x.dtype)
    return straight_through(x, value)
