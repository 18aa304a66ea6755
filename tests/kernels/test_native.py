"""Block-scaled FP4 matmul: the kernel in the interpreter against exact arithmetic over the dequantised operands."""

from __future__ import annotations

import pytest
import torch
import triton

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import get_format, native, pack_codes
from trace_kernels.launch import INTERPRET

interpreted = pytest.mark.skipif(
    not INTERPRET or tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8),
    reason="needs Triton's interpreter, which has dot_scaled from 3.8 on",
)


def quantize(x, fmt, *, per_row):
    """(qdata, scale, outer) and the FP64 values."""
    block_format = get_format(fmt)
    q = block_format.quantize(x, None if per_row else block_format.outer_from_amax(x.abs().amax().view(1, 1)))
    return (pack_codes(q.codes), q.scale, q.outer), block_format.dequantize(q).double()


# Triton 3.9's interpreter reads every block scale as E8M0, so the kernel itself is run on MXFP4 codes; outer scales,
# which only NVFP4 has, are put on top of them. The E4M3 form is left to the compile gate and to a Blackwell GPU.
@interpreted
@pytest.mark.parametrize("with_outer", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 130, 512), (17, 40, 288), (5, 128, 40)])
def test_kernel(with_outer, tokens, rows, width):
    (xq, xs, _), x_values = quantize(torch.randn(tokens, width), "mxfp4", per_row=True)
    (wq, ws, _), w_values = quantize(torch.randn(rows, width) * 0.1, "mxfp4", per_row=False)
    x_outer = torch.exp2(torch.arange(tokens) - 3.0)[:, None] if with_outer else None
    w_outer = torch.tensor([[0.125]]) if with_outer else None
    bias = torch.randn(rows)
    settings = {"in_features": width, "fmt": "mxfp4", "dtype": torch.float32}
    ours = native.native_fp4_linear_triton(xq, xs, x_outer, wq, ws, w_outer, bias, **settings)
    if with_outer:
        x_values, w_values = x_values * x_outer, w_values * w_outer
    torch_low = x_values.float() @ w_values.float().T + bias
    assert_no_worse_than_torch(ours, torch_low, x_values @ w_values.T + bias.double(), factor=4)


@interpreted
def test_zero_and_nan_tokens():
    x = torch.randn(4, 64)
    x[1], x[2, 3] = 0, float("nan")
    x_parts, _ = quantize(x, "mxfp4", per_row=True)
    w_parts, _ = quantize(torch.randn(16, 64), "mxfp4", per_row=False)
    y = native.native_fp4_linear_triton(*x_parts, *w_parts, None, in_features=64, fmt="mxfp4", dtype=torch.float32)
    assert (y[1] == 0).all()
    assert y[2].isnan().all()
    assert y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_reference(fmt):
    x, x_values = quantize(torch.randn(5, 40) * torch.logspace(-2, 2, 5)[:, None], fmt, per_row=True)
    w, w_values = quantize(torch.randn(24, 40), fmt, per_row=False)
    bias = torch.randn(24)
    ours = native.native_fp4_linear(*x, *w, bias, in_features=40, fmt=fmt, dtype=torch.bfloat16)
    expected = (x_values.float() @ w_values.float().T + bias).bfloat16()
    assert_bit_equal(ours, expected)


def test_compiles_whole():
    x, _ = quantize(torch.randn(2, 64), "nvfp4", per_row=True)
    w, _ = quantize(torch.randn(16, 64), "nvfp4", per_row=False)

    def layer(*tensors):
        return native.native_fp4_linear(*tensors, None, in_features=64, fmt="nvfp4", dtype=torch.float32) * 2

    assert_bit_equal(torch.compile(layer, fullgraph=True, backend="eager")(*x, *w), layer(*x, *w))


def test_refusals():
    x, _ = quantize(torch.randn(2, 64), "nvfp4", per_row=True)
    w, _ = quantize(torch.randn(16, 64), "nvfp4", per_row=False)
    with pytest.raises(ValueError, match="not 'fp8'"):
        native.native_fp4_linear(*x, *w, None, in_features=64, fmt="fp8", dtype=torch.float32)
    with pytest.raises(ValueError, match="outer scale"):
        native.native_fp4_linear(*x, *w[:2], None, None, in_features=64, fmt="nvfp4", dtype=torch.float32)
    assert not native.native_supported(torch.device("cpu"))


@pytest.mark.gpu
def test_other_gpus_are_refused():
    device = torch.device("cuda")
    if native.native_supported(device):
        pytest.skip("this GPU has FP4 tensor cores")
    x, _ = quantize(torch.randn(2, 64, device=device), "nvfp4", per_row=True)
    w, _ = quantize(torch.randn(16, 64, device=device), "nvfp4", per_row=False)
    with pytest.raises(ValueError, match="no FP4 tensor cores"):
        native.native_fp4_linear(*x, *w, None, in_features=64, fmt="nvfp4", dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [8, 100])
def test_on_blackwell(fmt, tokens):
    device = torch.device("cuda")
    if not native.native_supported(device):
        pytest.skip("needs FP4 tensor cores (capability 10.0 or 12.0)")
    x, x_values = quantize(torch.randn(tokens, 2560, device=device), fmt, per_row=True)
    w, w_values = quantize(torch.randn(1000, 2560, device=device) * 0.1, fmt, per_row=False)
    ours = native.native_fp4_linear(*x, *w, None, in_features=2560, fmt=fmt, dtype=torch.bfloat16)
    torch_low = x_values.bfloat16() @ w_values.bfloat16().T
    assert_no_worse_than_torch(ours, torch_low, x_values @ w_values.T, factor=1.5)
