"""act(gate) * up in chunks: against torch's activations, and its codes against those of its own values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import FP8, MXFP4, NVFP4, BlockFormat, fake_quantize, pack_bits, pack_codes
from trace_kernels.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_reference,
    gated_activation_triton,
)
from trace_kernels.rows import RowRecord, finish_rows, format_words, permute_rows, record_tensors, sum_parts

# The interpreter computes with numpy, which warns where hardware silently gives the infinity or NaN that is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

SIX, FOUR_OVER_SIX = NVFP4(), NVFP4(four_over_six=True)
FP4 = [pytest.param(f, id=i) for f, i in ((SIX, "nvfp4"), (FOUR_OVER_SIX, "four_over_six"), (MXFP4(), "mxfp4"))]
ALL = [*FP4, pytest.param(FP8(), id="fp8"), pytest.param(None, id="none")]
TRANSFORMERS_NAME = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def call(function, parts, activation, dtype, fmt: BlockFormat | None, permute=False, record=None) -> Tensor:
    fields = record_tensors(record, fmt, parts.shape[1], parts.shape[2] // 2)
    return function(parts, activation, dtype, *format_words(fmt), permute, *fields)


def exact(parts: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """From gate and up as the compute dtype holds them, in FP64."""
    gate, up = sum_parts(parts, dtype).double().chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_the_unfused_forward(activation, fmt):
    parts = torch.randn(2, 5, 2 * 96)
    gate, up = (parts[0] + parts[1]).bfloat16().chunk(2, dim=-1)
    expected = ACT2FN[TRANSFORMERS_NAME[activation]](gate) * up
    expected = expected if fmt is None else fake_quantize(expected, fmt)
    assert_bit_equal(gated_activation(parts, activation=activation, dtype=torch.bfloat16, fmt=fmt), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("width", "splits"), [(40, 1), (1100, 3)])
def test_kernel_is_no_worse_than_torch(width, splits, activation, dtype):
    parts = 3 * torch.randn(splits, 3, 2 * width)
    ours, torchs = (
        call(function, parts, activation, dtype, None)
        for function in (gated_activation_triton, gated_activation_reference)
    )
    assert ours.dtype == dtype
    assert_no_worse_than_torch(ours, torchs, exact(parts, activation, dtype), floor=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_and_special_gates(activation):
    gate = torch.tensor([0.0, 90.0, -90.0, 1e30, -1e30, float("inf"), float("nan"), -20.0])
    parts = torch.cat((gate, torch.ones(8))).view(1, 1, 16)
    ours, torchs = (
        call(function, parts, activation, torch.float32, None)
        for function in (gated_activation_triton, gated_activation_reference)
    )
    torch.testing.assert_close(ours[0, :5], torchs[0, :5], rtol=1e-5, atol=1e-30)
    assert not ours[0, 5:7].isfinite().any()


@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
@pytest.mark.parametrize("width", [72, 1100])
@pytest.mark.parametrize("fmt", FP4)
def test_codes_and_record_are_those_of_the_values(fmt, width, permute):
    parts = torch.randn(2, 3, 2 * width)
    parts[:, 1] = 0.0
    q = fmt.quantize(call(gated_activation_triton, parts, "silu", torch.float32, None))
    shapes = q.scale.shape, (3,), pack_bits(q.codes).shape, pack_codes(q.codes).shape
    dtypes = torch.uint8, torch.float32, torch.uint8, torch.uint8
    scale, outer, parity, codes = (torch.full(s, 77, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    record = RowRecord(scale, outer if fmt.has_outer else None, parity, codes)
    x = call(gated_activation_triton, parts, "silu", torch.float32, fmt, permute, record)
    values = fmt.dequantize(q)
    assert_bit_equal(x, permute_rows(values) if permute else values)
    assert_bit_equal(scale, q.scale)
    assert_bit_equal(parity, pack_bits(q.codes & 1))
    assert_bit_equal(codes, pack_codes(q.codes))
    if fmt.has_outer:
        assert_bit_equal(outer, q.outer.squeeze(-1))


def test_nan_marks_its_row_across_chunks():
    parts = torch.randn(1, 2, 2 * 1100)
    parts[0, 1, 1099] = float("nan")
    x = call(gated_activation_triton, parts, "silu", torch.float32, SIX)
    assert x[0].isfinite().all()
    assert x[1].isnan().all()  # also the first chunk: the outer scale is the row's


def test_mismatched_arguments_are_refused():
    with pytest.raises(ValueError, match="choose one of silu"):
        gated_activation(torch.zeros(1, 1, 4), activation="relu", dtype=torch.float32)
    with pytest.raises(ValueError, match="width 5"):
        gated_activation(torch.zeros(1, 1, 5), activation="silu", dtype=torch.float32)


@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
def test_operator_keeps_its_promises_to_the_compiler(permute):
    arguments = (torch.randn(2, 3, 128), "silu", torch.float16, "nvfp4", False, permute, None, None, None, None)
    torch.library.opcheck(torch.ops.trace_kernels.gated_activation.default, arguments[:6])
    record = RowRecord(scale=torch.empty(3, 4, dtype=torch.uint8), codes=torch.empty(3, 32, dtype=torch.uint8))
    fields = record_tensors(record, NVFP4(), 3, 64)
    torch.library.opcheck(torch.ops.trace_kernels.gated_activation_recorded.default, (*arguments[:6], *fields))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu_is_no_worse_than_torch(activation):
    parts = torch.randn(2, 64, 2 * 12288, device="cuda")
    ours = gated_activation(parts, activation=activation, dtype=torch.bfloat16)
    torchs = call(gated_activation_reference, parts, activation, torch.bfloat16, None)
    assert_no_worse_than_torch(ours, torchs, exact(parts, activation, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
@pytest.mark.parametrize("fmt", ALL[:4])
def test_gpu_codes_are_those_of_the_values(fmt, permute):
    parts = torch.randn(1, 64, 2 * 9728, device="cuda", dtype=torch.bfloat16)
    values = gated_activation(parts, activation="silu", dtype=torch.bfloat16)
    ours = gated_activation(parts, activation="silu", dtype=torch.bfloat16, fmt=fmt, permute=permute)
    expected = finish_rows(values.cpu(), torch.bfloat16, *format_words(fmt), permute, None, None, None, None)
    assert_bit_equal(ours.cpu(), expected)


@pytest.mark.gpu
def test_gpu_graph_and_compiler_give_the_same():
    parts = torch.randn(2, 8, 2 * 3072, device="cuda")

    def step(x: Tensor) -> Tensor:
        return gated_activation(x, activation="silu", dtype=torch.bfloat16, fmt=SIX, permute=True)

    expected = step(parts)
    assert_bit_equal(torch.compile(step, fullgraph=True)(parts), expected)
    static, graph = torch.zeros_like(parts), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    static.copy_(parts)
    graph.replay()
    assert_bit_equal(captured, expected)
