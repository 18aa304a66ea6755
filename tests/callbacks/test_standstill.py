"""Measured runs that stood still are told so, once, and those that learned are not."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest

from trace_lightning.callbacks import Rollout, standstill
from trace_lightning.callbacks.standstill import Standstill
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rl import BatchAdvantage, GroupAdvantage
from trace_lightning.tasks import TwoDigitAddition
from trace_lightning.types import SamplingParams

STUDY = Path(__file__).parents[2] / "docs" / "results" / "stability_520.json"


def told(alike: list[float], rewards: list[float], caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Rollouts after which something was said, and what."""
    watch, found = Standstill(), []
    for number, (share, reward) in enumerate(zip(alike, rewards, strict=True), start=1):
        caplog.clear()
        watch.observe({"frac_reward_zero_std": share, "reward": reward})
        found += [(number, record.getMessage()) for record in caplog.records]
    return found


def test_of_the_measured_runs_those_that_stood_still_are_told(caplog) -> None:
    runs = json.loads(STUDY.read_text())["runs"]
    said = {name: told(run["frac_reward_zero_std"], run["reward"], caplog) for name, run in runs.items()}
    when = {name: [number for number, _ in messages] for name, messages in said.items() if messages}
    assert when == {"W4A16KV4 rounded mildly, TRACE/seed 1": [104], "W4A16KV4, TRACE/seed 2": [256]}
    ((_, message),) = said["W4A16KV4 rounded mildly, TRACE/seed 1"]
    assert "in 90 % of the groups of the last 50 rollouts" in message
    assert "the mean reward stays at 0.657" in message


@pytest.mark.parametrize(
    ("alike", "last", "rollout"),
    [(1.0, 0.0, 50), (1.0, 0.94, 50), (1.0, 0.96, None), (0.89, 0.0, None), (1.0, 7.0, 50)],
)
def test_what_is_said_of_groups_and_rewards(alike, last, rollout, caplog) -> None:
    assert [number for number, _ in told([alike] * 60, [last] * 60, caplog)] == ([rollout] if rollout else [])


def test_a_reward_that_rises_is_left_in_peace(caplog) -> None:
    assert not told([0.95] * 200, [0.002 * i for i in range(200)], caplog)


@pytest.mark.parametrize(
    ("group", "advantages", "times"), [(2, GroupAdvantage(), 1), (2, BatchAdvantage(), 0), (1, BatchAdvantage(), 0)]
)
def test_a_run_whose_answers_are_all_alike_is_told(group, advantages, times, monkeypatch, caplog) -> None:
    """Unless answers are compared with those to other prompts: equal rewards of a group teach something then."""
    monkeypatch.setattr(standstill, "_ROLLOUTS", 2)
    rollout = Rollout(
        rewards=[lambda completion, problem: 0.5],
        reward_workers=0,
        num_generations=group,
        sampling=SamplingParams(max_new_tokens=2),
    )
    trainer = pl.Trainer(
        max_steps=3,
        callbacks=[rollout],
        logger=False,
        num_sanity_val_steps=0,
        **{f"enable_{part}": False for part in ("checkpointing", "progress_bar", "model_summary")},
    )
    module = PolicyModule("builtin:tiny-qwen3", QuantRecipe(), advantages=advantages)
    trainer.fit(module, PromptDataModule(TwoDigitAddition(), batch_size=2, heldout_size=2))
    assert caplog.text.count("hardly anything to learn from") == times
