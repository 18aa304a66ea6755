"""Packed weights to values: those of the torch reference, bit for bit, whatever the width."""

from __future__ import annotations

import pytest
import torch

from numerics import assert_bit_equal
from trace_kernels import get_format
from trace_kernels.block_dequantize import (
    dequantize_packed,
    dequantize_packed_reference,
    dequantize_packed_triton,
)
from trace_kernels.block_quantize import quantize_rows

FORMATS = [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)]


def packed(rows: int, width: int, name: str, six: bool, device: str) -> tuple:
    x = torch.randn(rows, width, device=device) * torch.logspace(-3, 3, rows, device=device)[:, None]
    fmt = get_format(name, four_over_six=six)
    out = quantize_rows(x, fmt, fmt.outer_from_amax(x.abs().amax().reshape(1, 1)))
    return out.qdata, out.scale, out.outer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "six"), FORMATS)
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (2, 33), (1, 4128)])
def test_kernel_equals_reference(rows: int, width: int, name: str, six: bool, device: str) -> None:
    tensors = packed(rows, width, name, six, device)
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        expected = dequantize_packed_reference(*tensors, width, name, dtype)
        assert_bit_equal(dequantize_packed_triton(*tensors, width, name, dtype), expected)
        assert expected.abs().max() > 0


def test_nan_scales_stay_nan() -> None:
    qdata, scale, outer = packed(1, 32, "nvfp4", False, "cpu")
    scale[0, 1] = 0x7F
    value = dequantize_packed_triton(qdata, scale, outer, 32, "nvfp4", torch.float32)
    assert value[0, 16:].isnan().all()
    assert value[0, :16].isfinite().all()


def test_refusals() -> None:
    qdata, scale, outer = packed(2, 64, "nvfp4", False, "cpu")
    with pytest.raises(ValueError, match="not 'fp8'"):
        dequantize_packed(qdata, scale, outer, width=64, fmt="fp8", dtype=torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        dequantize_packed(qdata[:, ::2], scale, outer, width=64, fmt="nvfp4", dtype=torch.float32)
