"""Values rounded in one pass: those of the formats and of guided rounding, bit for bit, whatever the shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from guides import given, inputs, recorded
from numerics import assert_bit_equal
from trace_kernels import get_format
from trace_kernels.round_values import (
    Guide,
    guided_codes,
    round_values,
    round_values_reference,
    round_values_triton,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)]
SHAPES = [(5, 64), (3, 33), (2, 4128), (4, 2, 32), (3, 3, 80)]  # 80: not whole blocks of 32


def arguments(x: Tensor, fmt: Any, outer: Tensor | None, guide: Guide | None, dtype: torch.dtype) -> tuple[Any, ...]:
    tables = (guide.row, guide.scale, guide.codes, guide.outer) if guide else (None,) * 4
    flags = (guide.per_token, guide.full, guide.scale_bits) if guide else (False,) * 3
    own = None if outer is None else outer.reshape(-1)
    return x, own, *tables, fmt.name, getattr(fmt, "four_over_six", False), *flags, dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "six"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nearest(shape: tuple[int, ...], name: str, six: bool, device: str) -> None:
    fmt = get_format(name, four_over_six=six)
    x, outer = inputs(shape, device), given(shape, fmt, device)
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        found = round_values_triton(*arguments(x, fmt, outer, None, dtype))
        assert_bit_equal(found, fmt.dequantize(fmt.quantize(x, outer), dtype))
        assert_bit_equal(round_values(x, fmt, outer, dtype=dtype), found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_guided(shape: tuple[int, ...], name: str, bits: bool, full: bool, device: str) -> None:
    """Rows in any order, some of them none; near the rollout and far from it, where brackets do not hold its code."""
    fmt = get_format(name)
    rollout, outer = inputs(shape, device), given(shape, fmt, device)
    row = torch.tensor([shape[0] - 1, -1, *range(shape[0] - 2)], device=device)
    guide = recorded(rollout, fmt, outer, full=full, bits=bits, row=row)
    for noise in (0.01, 1.0):
        x = rollout[row] * (1 + noise * torch.randn(shape, device=device)) + 1e-3 * noise
        found = round_values_triton(*arguments(x, fmt, outer, guide, torch.float32))
        tokens = (row >= 0).nonzero().squeeze(-1)
        expected = fmt.dequantize(fmt.quantize(x, outer))
        expected[tokens] = fmt.dequantize(guided_codes(x[tokens], guide.followed(tokens), fmt))
        assert_bit_equal(found, expected)
        assert_bit_equal(round_values_reference(*arguments(x, fmt, outer, guide, torch.float32)), expected)
        assert_bit_equal(round_values(x, fmt, outer, guide=guide), expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_guidance_gives_the_rollouts_values(name: str) -> None:
    fmt = get_format(name)
    rollout = torch.randn(4, 256)
    guide = recorded(rollout, fmt, None, full=False, bits=False, row=torch.arange(4))
    x = rollout * (1 + 1e-2 * torch.randn(4, 256))
    found = round_values_triton(*arguments(x, fmt, None, guide, torch.float32))
    assert_bit_equal(found, fmt.dequantize(fmt.quantize(rollout)))
    assert (found != fmt.dequantize(fmt.quantize(x))).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float, name: str, bits: bool) -> None:
    """A block of the trainer's that diverged is NaN, under finite scales of the rollout too."""
    fmt = get_format(name)
    rollout = torch.randn(2, 64)
    guide = recorded(rollout, fmt, None, full=False, bits=bits, row=torch.tensor([0, -1]))
    x = rollout.clone()
    x[:, 40] = bad
    found = round_values_triton(*arguments(x, fmt, None, guide, torch.float32))
    block = slice(40 // fmt.block_size * fmt.block_size, (40 // fmt.block_size + 1) * fmt.block_size)
    assert found[0, block].isnan().all()
    assert found[0].isnan().sum() == fmt.block_size
    assert_bit_equal(found.isnan(), round_values_reference(*arguments(x, fmt, None, guide, torch.float32)).isnan())


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_and_given_scales_of_weights(device: str) -> None:
    x = inputs((6, 64), device)
    fp8, nvfp4 = get_format("fp8"), get_format("nvfp4")
    assert fp8 is not None
    assert nvfp4 is not None
    assert_bit_equal(round_values(x, fp8, dtype=torch.bfloat16), fp8.dequantize(fp8.quantize(x), torch.bfloat16))
    outer = nvfp4.outer_from_amax(x.abs().amax().reshape(1, 1))
    found = round_values_triton(*arguments(x, nvfp4, outer, None, torch.bfloat16)) if device == "cuda" else None
    expected = nvfp4.dequantize(nvfp4.quantize(x, outer), torch.bfloat16)
    assert_bit_equal(round_values(x, nvfp4, outer, dtype=torch.bfloat16), expected)
    assert found is None or torch.equal(found, expected)


def test_nothing_to_round() -> None:
    fmt = get_format("nvfp4")
    assert round_values_triton(*arguments(torch.zeros(0, 64), fmt, None, None, torch.float32)).shape == (0, 64)
