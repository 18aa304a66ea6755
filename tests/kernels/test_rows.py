"""The common ending of a linear's producers: bytes and order of the interpreter's rows against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from trace_kernels import FP8, MXFP4, NVFP4, BlockFormat
from trace_kernels.rows import (
    RowRecord,
    format_words,
    permute_rows,
    record_tensors,
    round_rows,
    round_rows_reference,
    round_rows_triton,
    sum_parts,
)

# The interpreter computes with numpy, which warns where hardware silently gives the infinity or NaN that is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

SIX, FOUR_OVER_SIX = NVFP4(), NVFP4(four_over_six=True)
FORMATS = [pytest.param(f, id=i) for f, i in ((SIX, "nvfp4"), (FOUR_OVER_SIX, "four_over_six"), (MXFP4(), "mxfp4"))]
WITH_FP8 = [*FORMATS, pytest.param(FP8(), id="fp8")]
ALL = [*WITH_FP8, pytest.param(None, id="none")]
RECORDLESS = (None, None, None, None)


def empty_record(fmt: BlockFormat, rows: int, width: int, device: str = "cpu") -> RowRecord:
    """Tensors full of a byte that no rounding gives them all."""
    padded = -(-width // fmt.block_size) * fmt.block_size
    scale, parity, codes = (
        torch.full((rows, n), 0xA5, dtype=torch.uint8, device=device)
        for n in (padded // fmt.block_size, padded // 8, padded // 2)
    )
    outer = torch.full((rows,), -1.0, device=device) if fmt.has_outer else None
    return RowRecord(scale, outer, parity, codes)


def assert_same_record(ours: RowRecord, expected: RowRecord) -> None:
    for name in ("scale", "outer", "parity", "codes"):
        if getattr(expected, name) is not None:
            assert_bit_equal(getattr(ours, name), getattr(expected, name))


def edge_rows(width: int) -> Tensor:
    """Random rows of several magnitudes, zeros (one negative), ties of the E2M1 grid, one outlier."""
    x = torch.randn(6, width) * torch.tensor([[1.0], [1e-30], [1e30], [0.0], [1.0], [1.0]])
    x[3, 0] = -0.0
    ties = torch.tensor([6.0, 0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0])
    x[4] = ties.repeat(-(-width // 8))[:width]
    x[5, width // 2] = -1e5
    return x


def run(
    function, x: Tensor, fmt: BlockFormat | None, *, permute: bool, dtype: torch.dtype, record=RECORDLESS
) -> Tensor:
    return function(x, dtype, *format_words(fmt), permute, *record)


@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
@pytest.mark.parametrize("width", [40, 1100])
@pytest.mark.parametrize("fmt", ALL)
def test_rows_and_record_match_torch(fmt, width, permute):
    x = edge_rows(width)
    records = [RowRecord(), RowRecord()]
    if fmt is not None and fmt.guidable:
        records = [empty_record(fmt, len(x), width) for _ in range(2)]
    fields = [record_tensors(record, fmt, *x.shape) if record.scale is not None else RECORDLESS for record in records]
    ours = run(round_rows_triton, x, fmt, permute=permute, dtype=torch.float32, record=fields[0])
    expected = run(round_rows_reference, x, fmt, permute=permute, dtype=torch.float32, record=fields[1])
    assert_bit_equal(ours, expected)
    assert_same_record(*records)


@pytest.mark.parametrize("fmt", WITH_FP8)
def test_half_precision_rows_match_torch(fmt):
    x = torch.randn(3, 96).half()
    ours, expected = (
        run(function, x, fmt, permute=False, dtype=torch.float16)
        for function in (round_rows_triton, round_rows_reference)
    )
    assert_bit_equal(ours, expected)


def test_every_fp8_neighbourhood_rounds_as_torch_does():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 ... 448
    middles = (grid[1:] + grid[:-1]) / 2
    below, above = (torch.nextafter(middles, torch.tensor(side)) for side in (0.0, 448.0))
    x = torch.cat((grid, middles, below, above, grid / 2**11))
    x = torch.stack((torch.cat((x, -x)), torch.cat((-x, x))))
    ours, expected = (
        run(function, x, FP8(), permute=False, dtype=torch.float32)
        for function in (round_rows_triton, round_rows_reference)
    )
    assert_bit_equal(ours, expected)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("fmt", WITH_FP8)
def test_non_finite_values_show_where_torch_shows_them(fmt, special):
    x = torch.randn(3, 130)
    x[1, 3] = special
    for permute in (False, True):
        ours, expected = (
            run(function, x, fmt, permute=permute, dtype=torch.float32)
            for function in (round_rows_triton, round_rows_reference)
        )
        assert expected.isnan().any()
        assert_bit_equal(ours.isnan(), expected.isnan())
        assert_bit_equal(ours.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_permuted_order_is_the_documented_one():
    x = torch.arange(2 * 150).view(2, 150)
    permuted = permute_rows(x)
    assert permuted.shape == (2, 8, 2, 16)
    for kb, j, m, w in ((0, 0, 0, 0), (0, 7, 1, 15), (1, 3, 1, 2), (1, 5, 0, 2)):
        assert permuted[kb, j, m, w] == x[m, 128 * kb + 8 * w + j]
    assert permuted[1, 6, 0, 2] == 0  # element 150


def test_parts_are_added_in_order_and_rounded_once():
    parts = torch.tensor([[1.0], [2.0**-9], [2.0**-9]])
    assert sum_parts(parts, torch.bfloat16) == 1.0  # 1 + 2**-8 is a tie of BF16, to even
    assert sum_parts(parts + torch.tensor([[0.0], [0.0], [2.0**-20]]), torch.bfloat16) == 1.0 + 2.0**-7
    large = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]])
    assert sum_parts(large, torch.float32) == 0.0  # the order decides


def test_record_that_does_not_fit_is_refused():
    x = torch.randn(2, 40)
    with pytest.raises(ValueError, match="no codes to record"):
        round_rows(x, dtype=torch.float32, fmt=FP8(), record=RowRecord())
    short = RowRecord(parity=torch.zeros(2, 5, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"record\.parity"):
        round_rows(x, dtype=torch.float32, fmt=SIX, record=short)
    with pytest.raises(ValueError, match="no outer scale"):
        round_rows(x, dtype=torch.float32, fmt=MXFP4(), record=RowRecord(outer=torch.zeros(2)))


def test_operator_keeps_its_promises_to_the_compiler():
    record = empty_record(SIX, 3, 40)
    fields = record_tensors(record, SIX, 3, 40)
    arguments = (torch.randn(3, 40), torch.float16, "nvfp4", False, True, *fields)
    torch.library.opcheck(torch.ops.trace_kernels.round_rows_recorded.default, arguments)
    torch.library.opcheck(torch.ops.trace_kernels.round_rows.default, arguments[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("permute", [False, True], ids=["natural", "permuted"])
@pytest.mark.parametrize("fmt", ALL)
def test_gpu_rows_match_the_cpu_bytes(fmt, permute):
    x = torch.cat((edge_rows(4096), torch.randn(58, 4096))).bfloat16()
    records = [None, None]
    if fmt is not None and fmt.guidable:
        records = [empty_record(fmt, *x.shape, device) for device in ("cuda", "cpu")]
    ours = round_rows(x.cuda(), dtype=torch.bfloat16, fmt=fmt, permute=permute, record=records[0])
    expected = round_rows(x, dtype=torch.bfloat16, fmt=fmt, permute=permute, record=records[1])
    assert_bit_equal(ours.cpu(), expected)
    if records[0] is not None:
        on_cpu = (None if t is None else t.cpu() for t in record_tensors(records[0], fmt, *x.shape))
        assert_same_record(RowRecord(*on_cpu), records[1])


@pytest.mark.parametrize("fmt", [NVFP4(), MXFP4()], ids=repr)
def test_record_may_be_columns_of_a_wider_matrix(fmt):
    x = torch.randn(5, 96)
    blocks = 96 // fmt.block_size
    apart = RowRecord(
        scale=torch.empty(5, blocks, dtype=torch.uint8),
        outer=torch.empty(5) if fmt.has_outer else None,
        parity=torch.empty(5, 12, dtype=torch.uint8),
        codes=torch.empty(5, 48, dtype=torch.uint8),
    )
    matrix = torch.full((5, 100), 0xAA, dtype=torch.uint8)
    outer = matrix[:, 4:8].view(torch.float32).squeeze(-1) if fmt.has_outer else None
    inside = RowRecord(matrix[:, 8 : 8 + blocks], outer, matrix[:, 20:32], matrix[:, 40:88])
    words = format_words(fmt)
    expected = round_rows_triton(x, torch.float32, *words, False, *record_tensors(apart, fmt, 5, 96))
    assert_bit_equal(round_rows_triton(x, torch.float32, *words, False, *record_tensors(inside, fmt, 5, 96)), expected)
    for name in ("scale", "outer", "parity", "codes"):
        if getattr(apart, name) is not None:
            assert_bit_equal(getattr(inside, name).contiguous(), getattr(apart, name))
    assert (matrix[:, 88:] == 0xAA).all()
    assert (matrix[:, :4] == 0xAA).all()
