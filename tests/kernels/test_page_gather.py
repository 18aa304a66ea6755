"""Gathering K or V out of pages: the values of `KVPages.read`, whatever the format, the pages and the lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from trace_kernels import formats as F4
from trace_kernels import get_format
from trace_kernels.kv_pages import KVPages
from trace_kernels.page_gather import gather_pages, gather_pages_reference, gather_pages_triton

FORMATS = ["none", "nvfp4", "mxfp4", "fp8"]


def filled(fmt_name: str, lengths: list[int], *, page_size: int, head_dim: int, heads: int, device: str) -> tuple:
    """Pages in random order with random tokens: (pages, table, lengths, starts)."""
    fmt = get_format(fmt_name)
    width = max(-(-n // page_size) for n in lengths) + 1
    shape = {"num_pages": len(lengths) * width + 1, "page_size": page_size, "num_heads": heads, "head_dim": head_dim}
    pages = KVPages.empty(fmt, **shape, dtype=torch.float16, device=device)
    if pages.outer is not None:
        pages.outer.copy_(2.0 ** -torch.arange(heads)[:, None].float())
    tokens = shape["num_pages"] * page_size
    x = torch.randn(tokens, heads, head_dim, device=device) * torch.logspace(-2, 1, heads, device=device)[:, None]
    slots = torch.arange(tokens, device=device)
    if fmt is None:
        pages.store_values(slots, x)
    else:
        pages.store(slots, fmt.quantize(x, pages.outer))
    table = torch.randperm(shape["num_pages"])[: len(lengths) * width].view(len(lengths), width).int().to(device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return pages, table, seq_lens, (seq_lens.cumsum(0) - seq_lens).int()


def gathered(function, pages: KVPages, table: Tensor, seq_lens: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
    name, total = "none" if pages.fmt is None else pages.fmt.name, int(seq_lens.sum())
    tensors = (pages.data, pages.scale, pages.outer, table, seq_lens, starts)
    return function(*tensors, total, pages.head_dim, name, dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("page_size", "head_dim", "lengths"), [(16, 64, [33, 1, 0, 16]), (48, 40, [50, 20])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_values_of_the_pages(dtype: torch.dtype, page_size: int, head_dim: int, lengths: list[int], fmt: str) -> None:
    case = filled(fmt, lengths, page_size=page_size, head_dim=head_dim, heads=2, device="cpu")
    expected = gathered(gather_pages_reference, *case, dtype)
    assert expected.shape == (sum(lengths), 2, head_dim)
    assert_bit_equal(gathered(gather_pages_triton, *case, dtype), expected)
    pages, table, seq_lens, starts = case
    with_end = torch.cat([starts, seq_lens.sum()[None].int()])
    assert_bit_equal(gather_pages(pages, table, seq_lens, with_end, sum(lengths), dtype), expected)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("fmt", FORMATS[1:])
def test_every_byte(fmt: str) -> None:
    """All 256 data bytes; of the scale bytes those that quantising produces, NaN included."""
    pages, table, seq_lens, starts = filled(fmt, [32], page_size=16, head_dim=32, heads=1, device="cpu")
    pages.data.copy_((torch.arange(pages.data.numel()) % 256).view_as(pages.data))
    if pages.scale is not None:
        first, last = (F4.E4M3_MIN_NORMAL_BYTE, F4.E4M3_NAN_BYTE) if fmt == "nvfp4" else (1, 255)
        steps = torch.arange(pages.scale.numel()) % (last - first + 1)
        pages.scale.copy_((last - steps).view_as(pages.scale))
    ours, expected = (
        gathered(f, pages, table, seq_lens, starts, torch.float32)
        for f in (gather_pages_triton, gather_pages_reference)
    )
    assert expected.isnan().any()
    assert torch.equal(ours.isnan(), expected.isnan())
    assert_bit_equal(ours.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_number_of_sequences_must_agree() -> None:
    pages, table, seq_lens, starts = filled("nvfp4", [3, 4], page_size=16, head_dim=16, heads=1, device="cpu")
    with pytest.raises(ValueError, match="disagree about the number of sequences"):
        gather_pages(pages, table, seq_lens[:1], starts, 3, torch.float32)


@pytest.mark.gpu
class TestOnTheGPU:
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_values_compiled_and_captured(self, fmt: str) -> None:
        lengths = [1000, 1, 0, 517]
        case = filled(fmt, lengths, page_size=16, head_dim=128, heads=8, device="cuda")
        pages, table, seq_lens, starts = case
        expected = gathered(gather_pages_reference, *case, torch.bfloat16)

        def gather() -> Tensor:
            return gather_pages(pages, table, seq_lens, starts, sum(lengths), torch.bfloat16)

        assert_bit_equal(gather(), expected)
        assert_bit_equal(torch.compile(gather, fullgraph=True)(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gather()
        captured.zero_()
        graph.replay()
        assert_bit_equal(captured, expected)
