"""The audit's sums: counts are those of the torch reference exactly, squared norms up to the order of additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from guides import given, inputs, recorded
from numerics import assert_bit_equal
from trace_kernels import get_format, pack_codes
from trace_kernels.audit_codes import audit_codes, audit_codes_reference, audit_codes_triton
from trace_kernels.rows import format_words

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize(("name", "six"), [("nvfp4", False), ("nvfp4", True), ("mxfp4", False)])
@pytest.mark.parametrize("shape", [(5, 33), (4, 4128), (4, 2, 80)])
def test_kernel_equals_reference(
    shape: tuple[int, ...], name: str, six: bool, bits: bool, full: bool, device: str
) -> None:
    if six and bits:
        pytest.skip("the parity of a scale does not tell four-over-six apart; the recipe refuses it")
    fmt: Any = get_format(name, four_over_six=six)
    rollout, outer = inputs(shape, device), given(shape, fmt, device)
    row = torch.tensor([shape[0] - 1, -1, *range(shape[0] - 2)], device=device)
    guide = recorded(rollout, fmt, outer, full=full, bits=bits, row=row)
    audit = pack_codes(fmt.quantize(rollout, outer).codes)
    tokens = torch.tensor([shape[0] - 1, 0], device=device)
    x = rollout[row] * (1 + 0.1 * torch.randn(shape, device=device))
    arguments = (x, tokens, row[tokens], audit, guide.row, guide.scale, guide.codes, guide.outer, *format_words(fmt))
    flags = guide.per_token, full, bits
    found, expected = (f(*arguments, *flags) for f in (audit_codes_triton, audit_codes_reference))
    assert_bit_equal(found[:, :6], expected[:, :6])
    torch.testing.assert_close(found[:, 6:], expected[:, 6:], rtol=1e-5, atol=0)
    assert expected[:, 1].sum() > 0, "no code differs before guidance, so nothing was tested"
    total = audit_codes(x, fmt, guide, tokens, audit, row[tokens])
    assert total[5:].eq(0).all() if bits else torch.allclose(total, expected.double().sum(0))
