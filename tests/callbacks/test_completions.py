from __future__ import annotations

import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from trace_lightning.callbacks import CompletionsLogger
from trace_lightning.callbacks.completions import completion_entries, completions_table, shorten, visible
from trace_lightning.types import Completion, Problem, Prompt, RolloutBatch


def make_batch(num_prompts: int = 2, text: str = "4[/bold]\n") -> RolloutBatch:
    prompts = [Prompt(token_ids=[1], problem=Problem(prompt=f"{i}+{i}="), uid=i) for i in range(num_prompts)]
    completions = [
        Completion(
            token_ids=[5, 6],
            logprobs=[-0.5, -1.5],
            finish_reason="stop" if i % 2 else "length",
            policy_version=3,
            text=text,
        )
        for i in range(2 * num_prompts)
    ]
    rewards = torch.tensor([math.nan] + [1.0] * (2 * num_prompts - 1))
    return RolloutBatch(
        prompts=prompts,
        num_generations=2,
        completions=completions,
        rewards_B=rewards,
        rewards_by_name={"exact": rewards.tolist()},
    )


def fake_trainer(folder, *, step: int = 0, batch_idx: int = 0, max_steps: int = 100) -> SimpleNamespace:
    return SimpleNamespace(
        log_dir=None if folder is None else str(folder),
        fast_dev_run=False,
        is_global_zero=True,
        global_step=step,
        max_steps=max_steps,
        fit_loop=SimpleNamespace(total_batch_idx=batch_idx),
    )


def logged_steps(folder, every: int, num_steps: int) -> list[int]:
    logger = CompletionsLogger(every_n_steps=every, print_table=False)
    logger.setup(fake_trainer(folder), None, "fit")
    for i in range(num_steps):
        logger.on_train_batch_start(fake_trainer(folder, step=i), None, None, i)
        after = fake_trainer(folder, step=i + 1, batch_idx=i, max_steps=num_steps)
        logger.on_train_batch_end(after, None, None, make_batch(), i)
    lines = (folder / "completions.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines][:: len(make_batch().completions)]


def test_lines_hold_what_was_measured(tmp_path) -> None:
    logger = CompletionsLogger(print_table=False)
    logger.setup(fake_trainer(tmp_path), None, "fit")
    logger.on_validation_batch_end(fake_trainer(tmp_path, step=7), None, None, make_batch(), 0)
    first, second, *_ = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert first["reward"] is None
    assert first["rewards"] == {"exact": None}
    assert first["finish_reason"] == "length"
    expected = {"step": 7, "split": "heldout", "prompt": "0+0=", "completion": "4[/bold]\n", "policy_version": 3}
    assert expected.items() <= second.items()
    assert second["mean_logprob"] == -1.0
    assert second["reward"] == 1.0


def test_first_every_nth_and_last_step(tmp_path) -> None:
    assert logged_steps(tmp_path, every=3, num_steps=6) == [0, 3, 5]


def test_table_is_printed_readably(monkeypatch) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(completions_table(completion_entries(make_batch(), "train", 2), num_samples=2))
    printed = console.file.getvalue()
    assert "step 2: training samples" in printed
    assert "4[/bold]↵" in printed  # neither read as markup nor broken into lines
    assert "0+0=" in printed
    assert "1+1=" in printed  # samples of different prompts
    assert "2 cut" in printed


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    logger = CompletionsLogger(print_table=False)
    logger.setup(fake_trainer(None), None, "fit")
    logger.on_validation_batch_end(fake_trainer(None), None, None, make_batch(), 0)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_long_text_keeps_its_end() -> None:
    text = "a" * 500 + "answer"
    assert shorten(text, 40).endswith("answer")
    assert len(shorten(text, 40)) <= 40
    assert shorten("short", 40) == "short"
    assert visible("a\x1b[2Jb\tc") == "a\\x1b[2Jb c"


@pytest.mark.parametrize("arguments", [{"every_n_steps": 0}, {"num_samples": 0}])
def test_out_of_range(arguments) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CompletionsLogger(**arguments)
