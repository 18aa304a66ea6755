"""The three kinds of numerical claim that the tests make. A test names its kind; a bare `allclose` says nothing.

assert_bit_equal             codecs, packing, anything that is the same operation in another place
assert_no_worse_than_torch   reordered arithmetic: matmuls, attention, log-probs in low precision
assert_sqnr                  quantised against full precision; the number of decibels belongs into the test id
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def assert_bit_equal(ours: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bytes: -0.0 differs from 0.0, and a NaN equals only the NaN with its bits."""
    assert ours.dtype == expected.dtype, f"dtype {ours.dtype}, expected {expected.dtype}"
    assert ours.shape == expected.shape, f"shape {tuple(ours.shape)}, expected {tuple(expected.shape)}"
    width = ours.element_size()
    same = (_bytes(ours) == _bytes(expected)).view(-1, width).all(-1)
    if not same.all():
        wrong = (~same).nonzero().flatten()
        first = int(wrong[0])
        index = tuple(int(i) for i in torch.unravel_index(wrong[0].cpu(), ours.shape))
        values = f"{ours.reshape(-1)[first].item()!r}, expected {expected.reshape(-1)[first].item()!r}"
        raise AssertionError(f"{len(wrong)} of {len(same)} elements differ, first at {index}: {values}")


def assert_no_worse_than_torch(
    ours: Tensor, torch_low: Tensor, reference: Tensor, *, factor: float = 2.0, floor: float = 0.0
) -> None:
    """max |ours - reference| <= factor * max |torch_low - reference| + floor.

    Args:
        ours: result under test.
        torch_low: the same computation by plain torch in the low precision.
        reference: the same computation in FP32 or FP64.
        factor: how much worse than torch is still the same class of error.
        floor: allowance where torch happens to be exact.
    """
    assert ours.shape == torch_low.shape == reference.shape
    error, allowed = ((x.double() - reference.double()).abs().max().item() for x in (ours, torch_low))
    allowed = factor * allowed + floor
    assert error <= allowed, f"max error {error:.3g} against the reference; torch's own allows {allowed:.3g}"


def sqnr_db(value: Tensor, reference: Tensor) -> float:
    """Signal to quantisation noise ratio 10 log10(|reference|^2 / |reference - value|^2), in dB; inf when equal."""
    noise = (reference.double() - value.double()).square().sum().item()
    signal = reference.double().square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def assert_sqnr(value: Tensor, reference: Tensor, min_db: float) -> None:
    """The SQNR of `value` is at least `min_db`; NaN and infinities fail."""
    assert value.shape == reference.shape
    assert value.isfinite().all(), "not finite"
    measured = sqnr_db(value, reference)
    assert measured >= min_db, f"SQNR {measured:.2f} dB, expected at least {min_db} dB"


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
