"""What users bring (rewards, schedulers, callbacks, a curriculum) in checkpoints and on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import own_rewards
from trace_lightning.callbacks import Rollout
from trace_lightning.data import EvalSet, PromptDataModule
from trace_lightning.loading import Shuffle, SuccessCurriculum
from trace_lightning.module import PolicyModule
from trace_lightning.recipe import QuantRecipe
from trace_lightning.tasks import ExactMatch, Gcd, Mixture, OneDigitProducts, RewardFn, Task
from trace_lightning.types import Problem, SamplingParams


class Scheduled(PolicyModule):
    """Asks Lightning for the number of steps, which sets up the loaders before a checkpoint is restored."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.learning_rate)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Watch(Callback):
    """Notes what each step saw, saves a checkpoint once, and keeps a count as its state."""

    def __init__(self, save_at: int | None = None, path: Path | None = None) -> None:
        self.save_at, self.path, self.count = save_at, path, 0
        self.seen: dict[int, Any] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        uids = [prompt.uid for prompt in batch.prompts]
        texts = [completion.text for completion in batch.completions]
        self.seen[trainer.global_step] = (uids, texts, float(trainer.callback_metrics["grad_norm"]))
        self.count += 1
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


def run(watch: Watch, *callbacks: Callback, cls=PolicyModule, order=None, steps: int = 7, **fit: Any) -> pl.Trainer:
    pl.seed_everything(3)
    settings = {"logger": False, "enable_checkpointing": bool(callbacks), "enable_progress_bar": False}
    rollout = Rollout(
        rewards=[own_rewards.length, own_rewards.raising], num_generations=4, sampling=SamplingParams(max_new_tokens=5)
    )
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[rollout, *callbacks, watch],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )
    task = Mixture({"gcd": Gcd(largest=4, heldout_size=2), "products": OneDigitProducts(heldout_size=79)})
    evaluation = [EvalSet(name="two", num_generations=2, pass_at=[1, 2], size=2)]
    # 35 training problems in batches of 8: four steps an epoch, so step 7 lies in the second
    data = PromptDataModule(task, batch_size=8, order=order or Shuffle(), heldout_size=2, eval_sets=evaluation)
    trainer.fit(cls("builtin:tiny-qwen3", recipe=QuantRecipe(), learning_rate=1e-3), data, **fit)
    return trainer


@pytest.mark.parametrize("cls", [PolicyModule, Scheduled])
@pytest.mark.parametrize("order", [Shuffle, SuccessCurriculum])
def test_a_resumed_run_sees_the_prompts_completions_and_gradients_of_the_unbroken_one(cls, order, tmp_path) -> None:
    path = tmp_path / "three.ckpt"
    whole, rest = Watch(save_at=3, path=path), Watch()
    run(whole, cls=cls, order=order())
    assert len(whole.seen) == 7
    resumed = run(rest, cls=cls, order=order(), ckpt_path=path, weights_only=True)
    assert resumed.global_step == 7
    assert rest.seen == {step: whole.seen[step] for step in (4, 5, 6, 7)}
    assert rest.count == 7


def test_rewards_and_tasks_do_not_get_into_a_checkpoint(tmp_path) -> None:
    """Functions or classes in it would not open with `weights_only`, or on a machine without them."""
    path = tmp_path / "one.ckpt"
    run(Watch(save_at=1, path=path), steps=1, order=SuccessCurriculum())
    content = torch.load(path, weights_only=True)
    (loader,) = content["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert loader["position"] == 1
    assert set(loader["order"]["counts"]) == {"gcd", "products"}
    assert PolicyModule.load_from_checkpoint(path, weights_only=True).learning_rate == 1e-3


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_the_checkpoint_of_a_step_has_the_state_of_callbacks_listed_after_it(tmp_path) -> None:
    watch = Watch()
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    run(watch, checkpoint, steps=2)
    (path,) = tmp_path.glob("*.ckpt")
    states = torch.load(path, weights_only=True)["callbacks"]
    (own,) = [state for name, state in states.items() if name.startswith("Watch")]
    assert own == {"count": 2}


class OneLong(Task):
    """Seven short prompts and one that is longer than the model's context."""

    def train_problems(self) -> list[Problem]:
        return [Problem(prompt="9" * 140 + "=" if i == 3 else f"{i}0+10=", answer="1") for i in range(8)]

    def heldout_problems(self) -> list[Problem]:
        return [Problem(prompt="1+1=", answer="2")]

    def rewards(self) -> list[RewardFn]:
        return [ExactMatch()]


@pytest.mark.parametrize(("policy", "left"), [("drop", 7), ("truncate_left", 8)])
def test_a_run_with_a_prompt_beyond_the_context_goes_on_with_whole_groups(policy, left, caplog) -> None:
    batches = []

    class Groups(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            longest = max(len(prompt.token_ids) for prompt in batch.prompts)
            batches.append((len(batch.prompts), len(batch.completions), longest))

    pl.seed_everything(0)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    rollout = Rollout(num_generations=3, sampling=SamplingParams(max_new_tokens=5))
    trainer = pl.Trainer(
        max_steps=1,
        callbacks=[rollout, Groups()],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )
    data = PromptDataModule(OneLong(), batch_size=left, overlong_prompts=policy)
    trainer.fit(PolicyModule("builtin:tiny-qwen3", learning_rate=1e-4), data)
    assert "1 of 8 training prompts were longer than 123 tokens" in caplog.text
    assert batches == [(left, 3 * left, 123 if policy == "truncate_left" else 6)]
    assert trainer.global_step == 1
