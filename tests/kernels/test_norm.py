"""Residual add, RMSNorm and rounding in one pass: against transformers' norm, torch, and the rows' own reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import FP8, MXFP4, NVFP4, BlockFormat, fake_quantize, pack_bits, pack_codes
from trace_kernels.norm import add_rms_norm, add_rms_norm_reference, add_rms_norm_triton
from trace_kernels.rows import RowRecord, finish_rows, format_words, permute_rows, record_tensors

# The interpreter computes with numpy, which warns where hardware silently gives the infinity or NaN that is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

SIX, FOUR_OVER_SIX = NVFP4(), NVFP4(four_over_six=True)
FP4 = [pytest.param(f, id=i) for f, i in ((SIX, "nvfp4"), (FOUR_OVER_SIX, "four_over_six"), (MXFP4(), "mxfp4"))]
ALL = [*FP4, pytest.param(FP8(), id="fp8"), pytest.param(None, id="none")]
DTYPES = {  # residual stream, compute
    "mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "fp32": (torch.float32, torch.float32),
}
EPS = 1e-6


def inputs(
    rows: int, width: int, splits: int, stream: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    residual, parts = torch.randn(rows, width), torch.randn(splits, rows, width) / splits
    gain = 1 + 0.2 * torch.randn(width)
    return residual.to(device, stream), parts.to(device), gain.to(device, stream)


def call(function, residual, parts, gain, dtype, fmt: BlockFormat | None, permute=False, record=None) -> Tensor:
    fields = record_tensors(record, fmt, *residual.shape)
    return function(residual, parts, gain, EPS, dtype, *format_words(fmt), permute, *fields)


def exact(residual: Tensor, gain: Tensor) -> Tensor:
    wide = residual.double()
    return gain.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_reference_is_the_unfused_forward(dtypes, fmt):
    stream, dtype = DTYPES[dtypes]
    residual, parts, gain = inputs(5, 96, 2, stream)
    norm = Qwen3RMSNorm(96, EPS)
    norm.weight = torch.nn.Parameter(gain)
    hidden = residual + (parts[0] + parts[1]).to(dtype)
    expected = norm(hidden)
    expected = (expected if fmt is None else fake_quantize(expected, fmt)).to(dtype)
    assert_bit_equal(add_rms_norm(residual, parts, gain, EPS, dtype=dtype, fmt=fmt), expected.detach())
    assert_bit_equal(residual, hidden)


@pytest.mark.parametrize("dtypes", ["fp16", "fp32"])
@pytest.mark.parametrize(("width", "splits"), [(40, 1), (200, 3), (512, 2)])
def test_kernel_is_no_worse_than_torch(width, splits, dtypes):
    stream, dtype = DTYPES[dtypes]
    residual, parts, gain = inputs(4, width, splits, stream)
    twin = residual.clone()
    ours = call(add_rms_norm_triton, residual, parts, gain, dtype, None)
    torchs = call(add_rms_norm_reference, twin, parts, gain, dtype, None)
    assert_bit_equal(residual, twin)
    assert ours.dtype == torchs.dtype == dtype
    assert_no_worse_than_torch(ours, torchs, exact(twin, gain), floor=1e-7)


@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
@pytest.mark.parametrize("width", [200, 256])
@pytest.mark.parametrize("fmt", FP4)
def test_codes_and_record_are_those_of_the_normed_row(fmt, width, permute):
    residual, parts, gain = inputs(4, width, 2, torch.float32)
    residual[1], parts[:, 1] = 0.0, 0.0
    residual[2] *= 1e18
    normed = call(add_rms_norm_triton, residual.clone(), parts, gain, torch.float32, None)
    q = fmt.quantize(normed)
    shapes = q.scale.shape, (4,), pack_bits(q.codes).shape, pack_codes(q.codes).shape
    dtypes = torch.uint8, torch.float32, torch.uint8, torch.uint8
    scale, outer, parity, codes = (torch.full(s, 77, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    record = RowRecord(scale, outer if fmt.has_outer else None, parity, codes)
    x = call(add_rms_norm_triton, residual, parts, gain, torch.float32, fmt, permute, record)
    values = fmt.dequantize(q)
    assert_bit_equal(x, permute_rows(values) if permute else values)
    assert_bit_equal(scale, q.scale)
    assert_bit_equal(parity, pack_bits(q.codes & 1))
    assert_bit_equal(codes, pack_codes(q.codes))
    if fmt.has_outer:
        assert_bit_equal(outer, q.outer.squeeze(-1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_row_stays_alone_and_visible(value):
    residual, _, gain = inputs(3, 130, 1, torch.float32)
    healthy = call(add_rms_norm_triton, residual.clone(), None, gain, torch.float32, SIX, True)
    residual[1, 5] = value
    x = call(add_rms_norm_triton, residual, None, gain, torch.float32, SIX, True)
    assert x[0, 5, 1, 0].isnan()  # element 5 itself
    assert x[1, :, 1, 1:].eq(0).all()  # elements from 136 on are padding
    others = torch.tensor([0, 2])
    assert_bit_equal(x[:, :, others], healthy[:, :, others])


def test_without_parts_the_residual_is_read_only():
    residual, _, gain = inputs(2, 64, 1, torch.float32)
    before = residual.clone()
    call(add_rms_norm_triton, residual, None, gain, torch.float32, SIX)
    assert_bit_equal(residual, before)


def test_mismatched_arguments_are_refused():
    residual, parts, gain = inputs(2, 64, 1, torch.float32)
    with pytest.raises(ValueError, match="needs a gain in the same dtype"):
        add_rms_norm(residual, parts, gain.bfloat16(), EPS, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="takes up"):
        add_rms_norm(residual.bfloat16(), parts, gain.bfloat16(), EPS, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"parts \[S, 2, 64\]"):
        add_rms_norm(residual, parts[0], gain, EPS, dtype=torch.bfloat16)


def test_operator_keeps_its_promises_to_the_compiler():
    residual, parts, gain = inputs(3, 64, 2, torch.float32)
    arguments = (residual, parts, gain, EPS, torch.float16, "nvfp4", False, True, None, None, None, None)
    torch.library.opcheck(torch.ops.trace_kernels.add_rms_norm.default, arguments)


def test_compiled_call_gives_the_same():
    residual, parts, gain = inputs(3, 64, 2, torch.float32)
    once, twice = residual.clone(), residual.clone()

    def step(stream: Tensor, scale: Tensor) -> Tensor:
        return add_rms_norm(stream, parts, gain, EPS, dtype=torch.float16, fmt=SIX, record=RowRecord(scale=scale))

    scales = torch.zeros(2, 3, 4, dtype=torch.uint8)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_bit_equal(compiled(once, scales[0]), step(twice, scales[1]))
    assert_bit_equal(once, twice)
    assert_bit_equal(scales[0], scales[1])


GPU_CASES = [("mixed", 4096, 4), ("bf16", 2560, 1), ("mixed", 8192, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtypes", "width", "splits"), GPU_CASES)
def test_gpu_is_no_worse_than_torch(dtypes, width, splits):
    stream, dtype = DTYPES[dtypes]
    residual, parts, gain = inputs(64, width, splits, stream, "cuda")
    twin = residual.clone()
    ours = add_rms_norm(residual, parts, gain, EPS, dtype=dtype)
    torchs = call(add_rms_norm_reference, twin, parts, gain, dtype, None)
    assert_bit_equal(residual, twin)
    assert_no_worse_than_torch(ours, torchs, exact(twin, gain))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ALL[:4])
@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
def test_gpu_codes_are_those_of_the_normed_row(fmt, permute):
    _, _, gain = inputs(64, 2560, 1, torch.float32, "cuda")
    # Squares that add up exactly: two formats are two programs, which may add in different orders.
    residual = torch.randint(-6, 7, (64, 2560), device="cuda") / 4
    normed = add_rms_norm(residual, None, gain, EPS, dtype=torch.float32)
    ours = add_rms_norm(residual, None, gain, EPS, dtype=torch.bfloat16, fmt=fmt, permute=permute)
    expected = finish_rows(normed.cpu(), torch.bfloat16, *format_words(fmt), permute, None, None, None, None)
    assert_bit_equal(ours.cpu(), expected)


@pytest.mark.gpu
def test_gpu_graph_and_compiler_give_the_same():
    residual, parts, gain = inputs(8, 1024, 2, torch.float32, "cuda")

    def step(stream: Tensor) -> Tensor:
        return add_rms_norm(stream, parts, gain, EPS, dtype=torch.bfloat16, fmt=SIX, permute=True)

    once = residual.clone()
    expected = step(once)
    compiled = residual.clone()
    assert_bit_equal(torch.compile(step, fullgraph=True)(compiled), expected)
    assert_bit_equal(compiled, once)
    replayed, graph = residual.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(replayed)
    replayed.copy_(residual)
    graph.replay()
    assert_bit_equal(captured, expected)
    assert_bit_equal(replayed, once)
