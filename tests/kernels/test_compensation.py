"""Residual compensation: by hand, against its formula, row by row, and what it buys."""

from __future__ import annotations

import pytest
import torch

from trace_kernels import MXFP4, NVFP4, get_format
from trace_kernels.compensation import compensated, selected

FORMATS = [NVFP4(), NVFP4(four_over_six=True), MXFP4()]


def error(x: torch.Tensor, share: float, fmt=FORMATS[0]) -> float:
    return ((compensated(x, fmt, share) - x).norm() / x.norm()).item()


def test_by_hand_in_one_block() -> None:
    # Scale 1: 6, 4.4, 2.2 and 1.1 round to 6, 4, 2 and 1 and leave 0, .4, .2 and .1.
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, 4.4, 2.2, 1.1])
    first = torch.zeros(1, 32)
    first[0, :4] = torch.tensor([6.0, 4.0, 2.0, 1.0])
    fmt = MXFP4()
    # MXFP4: exponent floor(log2(.4)) - 2 = -4, so the residuals are 6.4, 3.2 and 1.6 sixteenths: 6, 3 and 1.5.
    torch.testing.assert_close(compensated(x, fmt, 0.0), first, rtol=0, atol=0)
    half = first.clone()
    half[0, 1:3] += torch.tensor([6.0, 3.0]) / 16
    torch.testing.assert_close(compensated(x, fmt, 2 / 32), half, rtol=0, atol=0)
    whole = half.clone()
    whole[0, 3] += 1.5 / 16
    torch.testing.assert_close(compensated(x, fmt, 1.0), whole, rtol=0, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_formula(fmt, dtype) -> None:
    x = torch.randn(5, 96).to(dtype)
    first = fmt.dequantize(fmt.quantize(x))
    rest = x.float() - first
    second = fmt.dequantize(fmt.quantize(rest))
    order = rest.abs().argsort(dim=1, descending=True)[:, :48]
    mask = torch.zeros(5, 96).scatter_(1, order, 1.0)
    ties = rest.abs() == rest.abs().gather(1, order[:, -1:])
    expected = (first + torch.where(ties, 1.0, mask) * second).to(dtype)
    assert torch.equal(compensated(x, fmt, 0.5), expected)
    assert compensated(x, fmt, 0.5).dtype == dtype


@pytest.mark.parametrize("fmt", [*FORMATS, get_format("fp8")], ids=repr)
def test_share_zero_is_plain_rounding(fmt) -> None:
    x = torch.randn(3, 40)
    assert torch.equal(compensated(x, fmt, 0.0), fmt.dequantize(fmt.quantize(x)))


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_the_error_falls_with_the_share(fmt) -> None:
    x = torch.randn(64, 256)
    errors = [error(x, share, fmt) for share in (0.0, 0.125, 0.25, 0.5, 1.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.5 * errors[0]
    assert errors[4] < 0.2 * errors[0]


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(6, 64) * torch.logspace(-3, 3, 6)[:, None]
    together = compensated(x, NVFP4(), 0.5)
    alone = torch.cat([compensated(row[None], NVFP4(), 0.5) for row in x])
    assert torch.equal(together, alone)


def test_ties_are_all_selected_and_one_channel_at_least() -> None:
    residual = torch.tensor([[1.0, -2.0, 2.0, 0.5], [0.0, 0.0, 0.0, 3.0]])
    assert selected(residual, 0.25).tolist() == [[False, True, True, False], [False, False, False, True]]
    assert selected(residual, 0.01).sum(dim=1).tolist() == [2, 1]
    assert selected(torch.zeros(1, 4), 0.25).all()


def test_edge_values() -> None:
    assert torch.equal(compensated(torch.zeros(2, 16), NVFP4(), 0.5), torch.zeros(2, 16))
    assert compensated(torch.zeros(0, 16), NVFP4(), 0.5).shape == (0, 16)
    x = torch.randn(2, 32)
    x[0, 3] = torch.nan
    out = compensated(x, NVFP4(), 0.5)
    assert out[0].isnan().any()
    assert out[1].isfinite().all()
    grid = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 4])
    assert torch.equal(compensated(grid, MXFP4(), 0.5), grid)  # nothing is left to return


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"share=1\.5"):
        compensated(torch.zeros(1, 16), NVFP4(), 1.5)
    with pytest.raises(ValueError, match=r"expected \[M, C\]"):
        compensated(torch.zeros(16), NVFP4(), 0.5)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_values_and_can_capture_it() -> None:
    x = torch.randn(33, 256, dtype=torch.bfloat16)
    on_gpu = x.cuda()
    expected = compensated(x, NVFP4(), 0.5)
    assert torch.equal(compensated(on_gpu, NVFP4(), 0.5).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compensated(on_gpu, NVFP4(), 0.5)
    graph.replay()
    assert torch.equal(out.cpu(), expected)
