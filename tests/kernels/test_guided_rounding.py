"""Guided rounding: the trainer is never farther from the rollout than by rounding to nearest (arXiv 2610.07767)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from numerics import assert_bit_equal
from trace_kernels import MXFP4, NVFP4
from trace_kernels import formats as F4
from trace_kernels.quantize import Quantized, _E2M1Format

GUIDABLE = [pytest.param(NVFP4(), id="nvfp4"), pytest.param(MXFP4(), id="mxfp4")]
NOISE = [1e-4, 1e-2, 0.1, 1.0]


def pair(fmt: _E2M1Format, noise: float, width: int = 512) -> tuple[Tensor, Tensor, Quantized]:
    """Rollout input, the trainer's noisy copy, and what the rollout recorded."""
    rollout = torch.randn(128, width)
    trainer = rollout + noise * torch.randn(128, width)
    return rollout, trainer, fmt.quantize(rollout)


def own_rounding(fmt: _E2M1Format, x: Tensor, record: Quantized) -> Tensor:
    """Codes of round to nearest under the rollout's scales."""
    assert record.scale is not None
    return F4.e2m1_encode(fmt.normalize(x, record.scale, record.outer)).flatten(-2)


def guide(fmt: _E2M1Format, mode: str, x: Tensor, record: Quantized) -> Quantized:
    assert record.scale is not None
    if mode == "full":
        return fmt.round_full(x, record.scale, record.outer, record.codes)
    return fmt.round_parity(x, record.scale, record.outer, record.codes & 1)


def rollout_in_bracket(fmt: _E2M1Format, x: Tensor, record: Quantized) -> Tensor:
    assert record.scale is not None
    z = fmt.normalize(x, record.scale, record.outer).flatten(-2)
    lower = F4.e2m1_bracket(z)
    return (F4.with_sign(lower, z < 0) == record.codes) | (F4.with_sign(lower + 1, z < 0) == record.codes)


@pytest.mark.parametrize("fmt", GUIDABLE)
@pytest.mark.parametrize("noise", NOISE)
def test_full_is_never_farther_than_nearest(fmt: _E2M1Format, noise: float) -> None:
    _, trainer, record = pair(fmt, noise)
    target = F4.e2m1_decode(record.codes)
    guided = F4.e2m1_decode(guide(fmt, "full", trainer, record).codes)
    nearest = F4.e2m1_decode(own_rounding(fmt, trainer, record))
    assert ((guided - target).abs() <= (nearest - target).abs()).all()
    assert (nearest != target).any(), "the noise moved no code, so nothing was tested"


@pytest.mark.parametrize("fmt", GUIDABLE)
@pytest.mark.parametrize("noise", NOISE)
def test_parity_equals_full_inside_the_bracket(fmt: _E2M1Format, noise: float) -> None:
    _, trainer, record = pair(fmt, noise)
    inside = rollout_in_bracket(fmt, trainer, record)
    full, parity = (guide(fmt, mode, trainer, record).codes[inside] for mode in ("full", "parity"))
    assert_bit_equal(parity, full)
    assert_bit_equal(full, record.codes[inside])
    assert inside.double().mean() > 0.2


@pytest.mark.parametrize("fmt", GUIDABLE)
@pytest.mark.parametrize("mode", ["full", "parity"])
def test_noise_below_half_a_step_is_removed_altogether(fmt: _E2M1Format, mode: str) -> None:
    _, trainer, record = pair(fmt, 1e-2)
    assert_bit_equal(guide(fmt, mode, trainer, record).codes, record.codes)
    assert (own_rounding(fmt, trainer, record) != record.codes).double().mean() > 0.005, "the noise moved no code"


@pytest.mark.parametrize("fmt", GUIDABLE)
@pytest.mark.parametrize("mode", ["full", "parity"])
@pytest.mark.parametrize("width", [512, 17, 1])
def test_identity_on_equal_input(fmt: _E2M1Format, mode: str, width: int) -> None:
    rollout, _, record = pair(fmt, 0.0, width)
    guided = guide(fmt, mode, rollout, record)
    assert_bit_equal(guided.codes, record.codes)
    assert_bit_equal(fmt.dequantize(guided), fmt.dequantize(record))


@pytest.mark.parametrize("fmt", GUIDABLE)
@pytest.mark.parametrize("mode", ["full", "parity"])
def test_result_stays_in_the_trainers_bracket(fmt: _E2M1Format, mode: str) -> None:
    """Guidance chooses between two codes; it never pulls the trainer to a value that its own number excludes."""
    _, trainer, record = pair(fmt, 0.3)
    assert record.scale is not None
    z = fmt.normalize(trainer, record.scale, record.outer).flatten(-2).abs()
    index = guide(fmt, mode, trainer, record).codes & 7
    lower = F4.e2m1_bracket(z)
    assert ((index == lower) | (index == lower + 1)).all()


@pytest.mark.parametrize("fmt", GUIDABLE)
def test_one_code_outside_full_takes_the_near_end_and_parity_the_far_one(fmt: _E2M1Format) -> None:
    rollout, trainer = torch.zeros(1, fmt.block_size), torch.zeros(1, fmt.block_size)
    rollout[0, :2] = torch.tensor([6.0, 2.0])  # code 4, parity 0
    trainer[0, :2] = torch.tensor([6.0, 1.2])  # bracket {1, 1.5} = codes {2, 3}
    record = fmt.quantize(rollout, torch.ones(1, 1) if fmt.has_outer else None)
    assert record.codes[0, 1] == 4
    assert guide(fmt, "full", trainer, record).codes[0, 1] == 3
    assert guide(fmt, "parity", trainer, record).codes[0, 1] == 2


@pytest.mark.parametrize("fmt", GUIDABLE)
def test_scale_from_parity_recovers_the_rollouts_scale(fmt: _E2M1Format) -> None:
    _, trainer, record = pair(fmt, 1e-3)
    assert record.scale is not None
    recovered = fmt.scale_from_parity(trainer, record.outer, record.scale & 1)
    assert_bit_equal(recovered, record.scale)
    own = fmt.quantize(trainer, record.outer).scale
    assert not torch.equal(own, record.scale), "the noise moved no scale, so nothing was tested"


@pytest.mark.parametrize("fmt", GUIDABLE)
def test_scale_from_parity_at_zero_blocks(fmt: _E2M1Format) -> None:
    x = torch.randn(3, 128)
    x[0] = 0
    x[1, :64] = 0
    record = fmt.quantize(x)
    assert record.scale is not None
    assert_bit_equal(fmt.scale_from_parity(x, record.outer, record.scale & 1), record.scale)


@pytest.mark.parametrize("fmt", GUIDABLE)
@pytest.mark.parametrize("mode", ["full", "parity"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_not_guided_away(fmt: _E2M1Format, mode: str, bad: float) -> None:
    """The rollout's scale is finite and a code cannot hold a NaN: unmarked, a diverged trainer would look healthy."""
    _, trainer, record = pair(fmt, 1e-3)
    clean = fmt.dequantize(guide(fmt, mode, trainer, record))
    trainer[3, 40] = bad
    value = fmt.dequantize(guide(fmt, mode, trainer, record))
    assert not value[3, 40].isfinite()
    keep = torch.arange(128) != 3
    assert_bit_equal(value[keep], clean[keep])


@pytest.mark.parametrize("fmt", GUIDABLE)
def test_zero_record_does_not_make_the_trainer_infinite(fmt: _E2M1Format) -> None:
    record = fmt.quantize(torch.zeros(2, 64))
    for mode in ("full", "parity"):
        assert fmt.dequantize(guide(fmt, mode, torch.randn(2, 64) * 100, record)).isfinite().all()
