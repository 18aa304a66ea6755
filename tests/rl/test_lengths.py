"""Length penalties by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trace_lightning.rl import KimiLength, LengthDiscount, SoftOverlong

NAN = float("nan")


def test_soft_overlong_by_hand() -> None:
    lengths = torch.tensor([[0, 15, 16, 17, 18, 20, 21]])
    rewards = torch.ones(1, 7)
    got = SoftOverlong(cache=4)(lengths, rewards, limit=20)
    assert got.tolist() == [[0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0]]
    assert SoftOverlong(cache=4, max_length=16, weight=2.0)(lengths, rewards, 20).tolist() == [
        [0.0, -1.5, -2.0, -2.0, -2.0, -2.0, -2.0]
    ]


def test_kimi_by_hand() -> None:
    lengths = torch.tensor([[2, 4, 6, 3], [5, 5, 5, 5]])
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    # lambda: .5, 0, -.5, and for the wrong one min(.25, 0)
    assert KimiLength(weight=1.0)(lengths, rewards, 9).tolist() == [[0.5, 0.0, -0.5, 0.0], [0.0] * 4]
    rewards[0, 2] = 0.0
    assert KimiLength(weight=1.0)(lengths, rewards, 9)[0, 2] == -0.5  # wrong and long: punished still
    assert KimiLength(weight=1.0)(lengths, torch.full((2, 4), NAN), 9)[0].tolist() == [0.0, 0.0, -0.5, 0.0]


def test_discount_by_hand() -> None:
    lengths, rewards = torch.tensor([[2, 4, 9]]), torch.tensor([[1.0, 1.0, 0.0]])
    # among the correct: mean 3, std 1, z = -1 and 1
    got = LengthDiscount(alpha=0.4)(lengths, rewards, 9)
    expected = [-0.4 / (1 + math.e), -0.4 / (1 + math.exp(-1)), 0.0]
    torch.testing.assert_close(got, torch.tensor([expected]))
    same = LengthDiscount(alpha=0.4)(torch.tensor([[3, 3]]), torch.tensor([[1.0, 2.0]]), 9)
    torch.testing.assert_close(same, torch.tensor([[-0.2, -0.4]]))


@pytest.mark.parametrize("penalty", [SoftOverlong(cache=3), KimiLength(), LengthDiscount()], ids=repr)
def test_what_is_not_scored_and_empty_answers_stay_finite(penalty) -> None:
    lengths = torch.tensor([[0, 0, 7], [3, 1, 2]])
    got = penalty(lengths, torch.tensor([[NAN, 1.0, NAN], [NAN, NAN, NAN]]), 8)
    assert got.isfinite().all()
    assert got.shape == (2, 3)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"length_penalty\.cache=0"):
        SoftOverlong(cache=0)
    with pytest.raises(ValueError, match="exceeds max_length=3"):
        SoftOverlong(cache=4, max_length=3)
    with pytest.raises(ValueError, match="exceeds the 3 tokens that an answer may have"):
        SoftOverlong(cache=4)(torch.ones(1, 1).long(), torch.ones(1, 1), 3)
    with pytest.raises(ValueError, match=r"alpha=1"):
        LengthDiscount(alpha=1.0)
