"""Partial sums and a low-rank product against torch, at sizes that are no whole tiles."""

from __future__ import annotations

import pytest
import torch

from numerics import assert_no_worse_than_torch
from trace_kernels.low_rank import expand, expand_reference, expand_triton

SHAPES = [(1, 1, 64, 4), (3, 5, 97, 12), (2, 67, 130, 48)]  # splits, rows, columns, rank


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.float16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(("splits", "rows", "columns", "rank"), SHAPES)
def test_kernel_against_torch(splits: int, rows: int, columns: int, rank: int, device: str, dtype: torch.dtype) -> None:
    parts = torch.randn(splits, rows, columns, device=device)
    hidden, b = (torch.randn(n, rank, device=device).to(dtype) for n in (rows, columns))
    exact = parts.double().sum(0) + hidden.double() @ b.double().T
    ours, theirs = expand_triton(parts, hidden, b), expand_reference(parts, hidden, b)
    assert ours.dtype == theirs.dtype == dtype
    assert_no_worse_than_torch(ours, theirs, exact)
    assert (ours.double() - parts.double().sum(0)).abs().max() > 0.1, "the product must have been added"


def test_the_base_is_rounded_before_the_sum() -> None:
    """As the trainer does, whose base product leaves its matmul in the compute dtype."""
    parts = torch.full((1, 1, 16), 1 + 2.0**-11)  # rounds to 1 in FP16, a tie
    hidden, b = torch.full((1, 1), 2.0**-10).half(), torch.full((16, 1), 0.5).half()
    assert expand_triton(parts, hidden, b).eq(1).all()
    assert expand_reference(parts, hidden, b).eq(1).all()


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit parts"):
        expand(torch.zeros(1, 2, 3), torch.zeros(2, 4), torch.zeros(5, 4))
