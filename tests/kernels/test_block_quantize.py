"""Quantising on the device: the bytes of the torch reference, into the tensors given, whatever shape and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from trace_kernels import MXFP4, NVFP4, BlockFormat, get_format, pack_bits, pack_codes
from trace_kernels.block_quantize import (
    PackedRows,
    quantize_rows,
    quantize_rows_reference,
    quantize_rows_triton,
    requantize_,
    requantize_reference,
    requantize_triton,
)

FORMATS = [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)]
IDS = ["nvfp4", "four_over_six", "mxfp4"]
ODD = (4, 100, torch.float16)
WIDTHS = [(5, 64, torch.float32), (3, 4096, torch.bfloat16), ODD, (1, 33, torch.float32)]
# In the interpreter a kernel is numpy, which warns of an overflow or inf * 0; a GPU does not.
extreme_values = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
every_format = pytest.mark.parametrize(("name", "six"), FORMATS, ids=IDS)


def spread(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows of very different size, each with a block of zeros."""
    x = torch.randn(rows, width, device=device) * torch.logspace(-3, 3, rows, device=device)[:, None]
    x[:, : width // 3] = 0
    return x.to(dtype)


def poisoned(rows: int, width: int, fmt: BlockFormat, device: str = "cpu") -> PackedRows:
    groups = -(-width // fmt.block_size)
    counts = (groups * fmt.block_size // 2, groups, groups * fmt.block_size // 8)
    qdata, scale, parity = (torch.full((rows, n), 0xA5, dtype=torch.uint8, device=device) for n in counts)
    return PackedRows(qdata, scale, torch.full((rows, 1), -1.0, device=device) if fmt.has_outer else None, parity)


def rows_by(
    function: Callable[..., None], x: Tensor, name: str, six: bool, outer: Tensor | None = None
) -> tuple[PackedRows, BlockFormat]:
    fmt = get_format(name, four_over_six=six)
    assert fmt is not None
    out = poisoned(*x.shape, fmt, str(x.device))
    function(x, outer, out.qdata, out.scale, None if outer is not None else out.outer, out.parity, name, six)
    return out, fmt


def assert_same(ours: PackedRows, expected: PackedRows, *, codes: bool = True) -> None:
    for field in ("qdata", "scale", "outer", "parity") if codes else ("scale",):
        left, right = getattr(ours, field), getattr(expected, field)
        assert (left is None) == (right is None)
        if left is not None:
            assert_bit_equal(left, right)


def group_by(function: Callable[..., None], parts: list[Tensor], name: str, six: bool, dtype: torch.dtype) -> list[Any]:
    fmt = get_format(name, four_over_six=six)
    assert fmt is not None
    rows, width = sum(len(part) for part in parts), parts[0].shape[1]
    out = poisoned(rows, width, fmt, str(parts[0].device))
    outer = None if out.outer is None else out.outer[:1].clone()
    dense = torch.full((rows, width), -7.0, dtype=dtype, device=parts[0].device)
    function(parts, out.qdata, out.scale, outer, dense, name, six)
    return [out.qdata, out.scale, outer, dense]


class TestRows:
    @every_format
    @pytest.mark.parametrize(("rows", "width", "dtype"), WIDTHS)
    def test_bytes_of_the_reference(self, rows: int, width: int, dtype: torch.dtype, name: str, six: bool) -> None:
        x = spread(rows, width, dtype)
        ours, fmt = rows_by(quantize_rows_triton, x, name, six)
        assert_same(ours, rows_by(quantize_rows_reference, x, name, six)[0])
        q = fmt.quantize(x)
        assert_bit_equal(ours.qdata, pack_codes(q.codes))
        assert ours.parity is not None
        assert_bit_equal(ours.parity, pack_bits(q.codes & 1))

    @pytest.mark.parametrize("shape", [(1, 1), (3, 1)])
    @pytest.mark.parametrize("six", [False, True])
    def test_given_outer_saturates_where_it_is_too_small(self, six: bool, shape: tuple[int, int]) -> None:
        outer = torch.full(shape, 2.0**-6) * 2.0 ** torch.arange(shape[0])[:, None]
        x = torch.randn(3, 96) * 10.0 ** torch.arange(-3, 3).repeat_interleave(16)
        expected, _ = rows_by(quantize_rows_reference, x, "nvfp4", six, outer)
        assert (expected.scale == 0x7E).any(), "nothing saturates"
        assert_same(rows_by(quantize_rows_triton, x, "nvfp4", six, outer)[0], expected)

    @extreme_values
    @every_format
    def test_ties_and_extremes(self, name: str, six: bool) -> None:
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        block = torch.cat([ties, -ties, torch.nextafter(ties, torch.zeros(8)), -torch.nextafter(ties, 9 * ties)])
        x = block * torch.tensor([1.0, 2.0**-120, 1e-38, 3e37])[:, None]
        assert_same(rows_by(quantize_rows_triton, x, name, six)[0], rows_by(quantize_rows_reference, x, name, six)[0])
        zeros = torch.tensor([[0.0, -0.0] * 32])
        ours, _ = rows_by(quantize_rows_triton, zeros, name, six)
        assert (ours.qdata == 0).all()
        assert_same(ours, rows_by(quantize_rows_reference, zeros, name, six)[0])

    @extreme_values
    @every_format
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_scales_tell_what_is_not_finite(self, bad: float, name: str, six: bool) -> None:
        x = torch.randn(2, 128)
        x[0, 70] = bad
        expected, fmt = rows_by(quantize_rows_reference, x, name, six)
        ours, _ = rows_by(quantize_rows_triton, x, name, six)
        assert_same(ours, expected, codes=False)
        assert ours.scale[0, 70 // fmt.block_size] == (0x7F if name == "nvfp4" else 255)
        assert_bit_equal(ours.qdata[1], expected.qdata[1])

    @pytest.mark.parametrize("fmt", [NVFP4(), NVFP4(four_over_six=True), MXFP4()], ids=IDS)
    def test_operator_writes_where_it_is_told(self, fmt: BlockFormat) -> None:
        x, out = torch.randn(3, 72), poisoned(3, 72, fmt)
        returned = quantize_rows(x, fmt, out=out)
        assert returned is out
        assert_same(out, quantize_rows(x, fmt, with_parity=True))
        assert quantize_rows(x, fmt).parity is None
        given = torch.tensor([[0.5]])
        assert quantize_rows(x, fmt, given).outer is (given if fmt.has_outer else None)

    def test_unknown_format(self) -> None:
        fp8 = get_format("fp8")
        assert fp8 is not None
        with pytest.raises(ValueError, match="nvfp4 or mxfp4, not fp8"):
            quantize_rows(torch.randn(2, 16), fp8)


class TestWeights:
    @every_format
    @pytest.mark.parametrize("width", [64, 72])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["dense32", "dense16"])
    def test_group_under_one_scale(self, dtype: torch.dtype, width: int, name: str, six: bool) -> None:
        parts = [spread(6, width, torch.float32), spread(2, width, torch.bfloat16) / 50, torch.zeros(1, width)]
        ours, expected = (group_by(f, parts, name, six, dtype) for f in (requantize_triton, requantize_reference))
        for left, right in zip(ours, expected, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                assert_bit_equal(left, right)

    @extreme_values
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_bad_master_shows_in_the_dense_copy(self, bad: float) -> None:
        parts = [torch.randn(2, 32), torch.randn(2, 32)]
        parts[1][1, 3] = bad
        ours, expected = (
            group_by(f, parts, "nvfp4", False, torch.float32) for f in (requantize_triton, requantize_reference)
        )
        assert_bit_equal(ours[1], expected[1])
        assert ours[3][3, :16].isnan().all()
        assert torch.equal(ours[3].isnan(), expected[3].isnan())

    @pytest.mark.parametrize("name", ["none", "fp8"])
    def test_formats_without_packed_codes(self, name: str) -> None:
        parts = [torch.randn(3, 20), torch.randn(2, 20)]
        dense = torch.full((5, 20), -7.0)
        requantize_(parts, None, None, None, dense, name)
        fmt = get_format(name)
        whole = torch.cat(parts)
        assert_bit_equal(dense, whole if fmt is None else fmt.dequantize(fmt.quantize(whole)))

    def test_results_must_fit(self) -> None:
        parts, good = [torch.randn(4, 32)], torch.empty(4, 16, dtype=torch.uint8)
        scale, outer = torch.empty(4, 2, dtype=torch.uint8), torch.empty(1, 1)
        with pytest.raises(ValueError, match=r"need `qdata` \(4, 16\), found \(4, 32\)"):
            requantize_(parts, torch.empty(4, 32, dtype=torch.uint8), scale, outer, None, "nvfp4")
        with pytest.raises(ValueError, match=r"need `outer` \(1, 1\), found nothing"):
            requantize_(parts, good, scale, None, None, "nvfp4")
        with pytest.raises(ValueError, match=r"need `dense` \(4, 32\), found nothing"):
            requantize_(parts, None, None, None, None, "none")
        with pytest.raises(ValueError, match=r"need `scale` \(4, 2\), contiguous"):
            requantize_(parts, good, torch.empty(4, 4, dtype=torch.uint8)[:, ::2], outer, None, "nvfp4")


@pytest.mark.gpu
class TestOnTheGPU:
    @every_format
    @pytest.mark.parametrize(("rows", "width", "dtype"), [(300, 4096, torch.bfloat16), (7, 12288, torch.float32), ODD])
    def test_rows(self, rows: int, width: int, dtype: torch.dtype, name: str, six: bool) -> None:
        x = spread(rows, width, dtype, "cuda")
        assert_same(rows_by(quantize_rows_triton, x, name, six)[0], rows_by(quantize_rows_reference, x, name, six)[0])

    @every_format
    def test_weights(self, name: str, six: bool) -> None:
        parts = [torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) * 0.02 for n in (4096, 1024, 1024)]
        ours, expected = (
            group_by(f, parts, name, six, torch.bfloat16) for f in (requantize_triton, requantize_reference)
        )
        for left, right in zip(ours, expected, strict=True):
            if left is not None:
                assert_bit_equal(left, right)

    @every_format
    def test_compiled_and_captured(self, name: str, six: bool) -> None:
        fmt = get_format(name, four_over_six=six)
        assert fmt is not None
        x = spread(64, 1024, torch.bfloat16, "cuda")
        expected = quantize_rows(x, fmt, with_parity=True)

        def codes(x: Tensor) -> tuple[Tensor, Tensor]:
            packed = quantize_rows(x, fmt)
            return packed.qdata, packed.scale

        for left, right in zip(torch.compile(codes, fullgraph=True)(x), (expected.qdata, expected.scale), strict=True):
            assert_bit_equal(left, right)
        out, static, graph = poisoned(64, 1024, fmt, "cuda"), torch.zeros_like(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            quantize_rows(static, fmt, out=out)
        static.copy_(x)
        graph.replay()
        assert_same(out, expected)

    def test_captured_weight_sync_follows_the_masters(self) -> None:
        master, width = torch.randn(512, 1024, device="cuda"), 1024
        qdata, scale = torch.empty(512, 512, dtype=torch.uint8, device="cuda"), torch.empty(512, 64).byte().cuda()
        outer, dense = torch.empty(1, 1, device="cuda"), torch.empty(512, width, device="cuda", dtype=torch.bfloat16)
        requantize_([master], qdata, scale, outer, dense, "nvfp4")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            requantize_([master], qdata, scale, outer, dense, "nvfp4")
        master.copy_(torch.randn_like(master) * 9)
        graph.replay()
        for left, right in zip(
            [qdata, scale, outer, dense],
            group_by(requantize_reference, [master], "nvfp4", False, torch.bfloat16),
            strict=True,
        ):
            assert_bit_equal(left, right)
