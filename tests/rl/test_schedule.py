"""The learning rate over a run, step by step."""

from __future__ import annotations

import pytest

from trace_lightning.rl.schedule import lr_factor


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("none", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1, 0.9045, 0.6545, 0.3455, 0.0955]),
    ],
)
def test_warm_up_of_two_in_six_steps(decay, expected):
    found = [lr_factor(step, warmup_steps=2, decay=decay, max_steps=6) for step in range(6)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_every_step_of_a_decay_moves_and_none_beyond():
    factors = [lr_factor(step, warmup_steps=0, decay="linear", max_steps=4) for step in range(6)]
    assert factors == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])
