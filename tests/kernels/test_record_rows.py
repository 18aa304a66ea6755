"""Rows shortened by one kernel: those of torch, field by field, and nothing beside the fields."""

from __future__ import annotations

import pytest
import torch

from numerics import assert_bit_equal
from trace_kernels.record_rows import shorten_rows_, shorten_rows_reference, shorten_rows_triton

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# scale: where, bytes, where to; codes: where, bytes, where to; outer: where or -1, where to
FIELDS = [[0, 12, 0, 12, 24, 12, 36, 36], [40, 3, 40, 44, 6, 44, -1, -1], [52, 258, 52, 312, 516, 312, 828, 828]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_bits", [False, True])
@pytest.mark.parametrize("syndrome", [False, True])
def test_kernel_equals_reference(scale_bits: bool, syndrome: bool, device: str) -> None:
    fields = torch.tensor(FIELDS, dtype=torch.int32, device=device)
    wide = torch.randint(0, 256, (3, 900), dtype=torch.uint8, device=device)
    data = wide[:, :832]  # columns of a wider matrix
    found, expected, by_op = (torch.full((3, 840), 7, dtype=torch.uint8, device=device) for _ in range(3))
    shorten_rows_triton(data, found, fields, scale_bits, syndrome)
    shorten_rows_reference(data, expected, fields, scale_bits, syndrome)
    shorten_rows_(data, by_op, fields, scale_bits=scale_bits, syndrome=syndrome)
    assert_bit_equal(found, expected)
    assert_bit_equal(by_op, expected)
    assert (expected[:, 832:] == 7).all()
    assert torch.equal(expected[:, 36:40], data[:, 36:40])
    same = torch.equal(expected[:, 12:36], data[:, 12:36])
    assert same is not syndrome
