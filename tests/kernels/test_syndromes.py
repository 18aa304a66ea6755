"""Syndromes of parity bits, and the bits again: kernels against torch, and the cheapest flips against all there are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from guides import given, inputs, recorded
from numerics import assert_bit_equal
from trace_kernels import NVFP4, get_format, pack_bits, unpack_bits
from trace_kernels import cheapest_flips as flips_file
from trace_kernels.cheapest_flips import cheapest_flips, cheapest_flips_reference, cheapest_flips_triton
from trace_kernels.round_values import Guide, round_values
from trace_kernels.syndrome_decode import (
    decode_bits,
    flip_bits_reference,
    flip_bits_triton,
    guide_by_bits,
    own_bits_reference,
    own_bits_triton,
)
from trace_kernels.syndromes import encode, encode_reference, encode_triton, num_checks, syndrome_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits_of(flips: Tensor, width: int) -> Tensor:
    return ((flips.unsqueeze(-1) >> torch.arange(3, dtype=torch.uint8, device=flips.device)) & 1).flatten(1)[:, :width]


def decode_guide(x: Tensor, guide: Guide, fmt: Any) -> Guide:
    return guide_by_bits(guide, decode_bits(x, guide, fmt))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [16, 48, 192, 4112])
def test_encoding(width: int, device: str) -> None:
    bits = pack_bits(torch.randint(0, 2, (5, width), dtype=torch.uint8, device=device))
    wide = torch.cat((torch.zeros_like(bits), bits), 1)[:, bits.shape[1] :]  # columns of a wider matrix
    assert_bit_equal(encode_triton(wide, width), encode_reference(bits, width))
    assert encode(bits, width).shape == (5, syndrome_bytes(width))
    assert num_checks(width) == -(-width // 3) + 6


def test_a_check_adds_up_twelve_bits() -> None:
    """A single bit is in the checks of its column and in no other; rows that differ have sums that differ likewise."""
    single = torch.eye(48, dtype=torch.uint8)
    checks = unpack_bits(encode_reference(pack_bits(single), 48), num_checks(48))
    assert checks[21].nonzero().squeeze(-1).tolist() == [7, 9, 12, 13]  # period 7, 101 = bits 0, 2, 5, 6
    assert checks.sum(1).tolist() == [4, 3, 5] * 16
    assert checks[:, 10].sum() == 12


@pytest.mark.parametrize("width", [9, 11])
def test_the_cheapest_flips_of_all(width: int) -> None:
    """Against all 2**width sets of flips."""
    cost = torch.rand(64, width)
    sent = torch.randint(0, 2, (64, width), dtype=torch.uint8)
    target = encode_reference(pack_bits(sent), width)
    found = bits_of(cheapest_flips_reference(cost, target), width)
    assert_bit_equal(encode_reference(pack_bits(found), width), target)
    every = torch.tensor(list(itertools.product((0, 1), repeat=width)), dtype=torch.uint8)
    same = (encode_reference(pack_bits(every), width)[None] == target[:, None]).all(-1)
    costs = torch.where(same, cost @ every.float().T, torch.inf)
    assert torch.allclose((cost * found).sum(1), costs.amin(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [16, 64, 112])
def test_kernel_equals_reference(width: int, device: str) -> None:
    cost = torch.rand(19, width, device=device)
    cost[::2] = (4 * cost[::2]).round()  # ties, and flips that cost nothing
    target = encode(pack_bits((torch.rand(19, width, device=device) < 0.05).to(torch.uint8)), width)
    assert_bit_equal(cheapest_flips_triton(cost, target), cheapest_flips_reference(cost, target))
    assert_bit_equal(cheapest_flips(cost, target), cheapest_flips_reference(cost, target))


def test_three_flips_are_always_found() -> None:
    """Wherever they are, at equal costs; so many can be told apart from all others, since the least distance is 7."""
    start = torch.randint(0, 48, (512,))
    sent = torch.zeros(512, 48, dtype=torch.uint8)
    for _ in range(3):
        sent[torch.arange(512), (start + torch.randint(0, 16, (512,))).clamp(max=47)] = 1
    target = encode_reference(pack_bits(sent), 48)
    assert_bit_equal(bits_of(cheapest_flips_reference(torch.ones(512, 48), target), 48), sent)
    words = torch.tensor(list(itertools.product((0, 1), repeat=18)), dtype=torch.uint8)
    weights = words[(encode_reference(pack_bits(words), 18) == 0).all(1)].sum(1)
    assert int(weights[weights > 0].min()) >= 7
    assert NVFP4().block_size % 16 == 0  # rows are whole bytes of bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_bits", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(5, 33), (4, 4128), (4, 2, 80)])
def test_own_bits(shape: tuple[int, ...], name: str, scale_bits: bool, device: str) -> None:
    """Bits of nearest rounding on the record's scales, and what it costs to flip them."""
    fmt: Any = get_format(name)
    rollout, outer = inputs(shape, device), given(shape, fmt, device)
    row = torch.arange(shape[0], device=device).flip(0)
    guide = recorded(rollout, fmt, outer, full=False, bits=scale_bits, row=row)
    x = rollout[row] * (1 + 0.1 * torch.randn(shape, device=device))
    arguments = x, row, guide.scale, guide.outer, name, guide.per_token, scale_bits
    bits, cost = own_bits_triton(*arguments)
    expected_bits, expected_cost = own_bits_reference(*arguments)
    assert_bit_equal(bits, expected_bits)
    assert_bit_equal(cost, expected_cost)
    assert expected_cost.max() > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_bits", [False, True])
@pytest.mark.parametrize("shape", [(32, 192), (32, 3, 64)])
def test_a_trainer_recovers_the_bits(shape: tuple[int, ...], scale_bits: bool, device: str) -> None:
    """Noise of 1 % flips codes under nearest rounding, and none here; one token follows no row."""
    fmt = NVFP4()
    rollout = torch.randn(shape, device=device)
    outer = None if len(shape) == 2 else torch.full((shape[1], 1), 2.0**-8, device=device)
    row = torch.tensor([-1, *range(31)], device=device)
    guide = recorded(rollout, fmt, outer, full=False, bits=scale_bits, row=row)
    syndromes = encode(guide.codes.flatten(1), 192)
    x = rollout[row] * (1 + 0.01 * torch.randn(shape, device=device))
    decoded = decode_guide(x, replace(guide, codes=syndromes, syndrome=True), fmt)
    assert_bit_equal(decoded.codes[1:], guide.codes[row[1:]])
    assert_bit_equal(round_values(x, fmt, outer, guide=decoded), round_values(x, fmt, outer, guide=guide))
    nearest, _ = own_bits_reference(x, row.clamp(min=0), guide.scale, guide.outer, "nvfp4", outer is None, scale_bits)
    assert (nearest[1:].view(guide.codes[1:].shape) != guide.codes[row[1:]]).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 64), (3, 2, 32)])
def test_nothing_to_follow(shape: tuple[int, ...], device: str) -> None:
    """No tokens, or a record without rows: what tokens there are round to nearest."""
    fmt, rollout = NVFP4(), torch.randn(shape, device=device)
    outer = None if len(shape) == 2 else torch.full((2, 1), 2.0**-8, device=device)
    guide = recorded(rollout, fmt, outer, full=False, bits=False, row=torch.arange(3, device=device))
    guide = replace(guide, codes=encode(guide.codes.flatten(1), 64), syndrome=True)
    decoded = decode_guide(rollout[:0], replace(guide, row=guide.row[:0]), fmt)
    assert round_values(rollout[:0], fmt, outer, guide=decoded).shape == (0, *shape[1:])
    own = guide.outer[:0] if guide.per_token and guide.outer is not None else guide.outer
    none = replace(guide, row=-torch.ones_like(guide.row), scale=guide.scale[:0], codes=guide.codes[:0], outer=own)
    found = round_values(rollout, fmt, outer, guide=decode_guide(rollout, none, fmt))
    assert_bit_equal(found, fmt.dequantize(fmt.quantize(rollout, outer)))


@pytest.mark.parametrize("device", DEVICES)
def test_flips_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose decisions do not fit the scratch memory at once; the last part has one row."""
    cost = torch.rand(33, 16, device=device)
    target = encode(pack_bits((torch.rand(33, 16, device=device) < 0.05).to(torch.uint8)), 16)
    whole = cheapest_flips_triton(cost, target)
    monkeypatch.setattr(flips_file, "SCRATCH_BYTES", 1)
    assert_bit_equal(cheapest_flips_triton(cost, target), whole)
    assert whole.any()


def test_outputs_are_laid_out_as_compilers_are_told() -> None:
    """Whatever the strides of the input."""
    x = torch.randn(64, 4).T
    guide = recorded(x, NVFP4(), None, full=False, bits=False, row=torch.arange(4))
    tables = guide.row, guide.scale, guide.codes, guide.outer
    checks = ("test_schema", "test_faketensor")
    own = x, guide.row, guide.scale, guide.outer, "nvfp4", True, False
    torch.library.opcheck(torch.ops.trace_kernels.own_bits.default, own, test_utils=checks)
    values = (x, None, *tables, "nvfp4", False, True, False, False, torch.bfloat16)
    torch.library.opcheck(torch.ops.trace_kernels.round_values.default, values, test_utils=checks)
    assert round_values(x, NVFP4()).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_flipping(device: str) -> None:
    bits = torch.randint(0, 256, (3, 26), dtype=torch.uint8, device=device)
    flips = torch.randint(0, 8, (3, 70), dtype=torch.uint8, device=device)  # 208 elements and two beyond
    found, expected = bits.clone(), bits.clone()
    flip_bits_triton(found, flips)
    flip_bits_reference(expected, flips)
    assert_bit_equal(found, expected)
    assert (found != bits).any()
