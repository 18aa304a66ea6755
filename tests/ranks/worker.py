"""What one rank does in the tests of several processes, and what they are compared with in the test's own."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.callbacks import Rollout, RunCheckpoint
from trace_lightning.data import PromptDataModule
from trace_lightning.models.sharding import whole
from trace_lightning.module import PolicyModule
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.tasks import TwoDigitAddition
from trace_lightning.types import GuidanceConfig, QuantRecipe, SamplingParams

W4A4KV4 = {"weights": "nvfp4", "activations": "nvfp4", "kv_cache": "nvfp4"}
# Every code is audited, so that the audit is a sum over the same sequences however they are spread.
GUIDED = QuantRecipe(**W4A4KV4, guidance=GuidanceConfig(mode="parity", audit_sequences=1000))
GLOBAL_BATCH, STEPS = 8, 3


class FewSums(TwoDigitAddition):
    """No time is lost on prompts that a test never comes to."""

    def train_problems(self):
        return list(super().train_problems())[:64]


class Sgd(PolicyModule):
    """Plain SGD: the update is the gradient, so updates can be compared."""

    def configure_optimizers(self):
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=self.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)}


class PartlyFrozen(Sgd):
    """The embedding and the first layer's MLP are not trained."""

    def configure_model(self):
        if self.policy is None:
            load, mesh = self._device_mesh, None
            self._device_mesh = mesh  # freeze before the policy is cut over ranks, as a user's subclass would
            super().configure_model()
            self._device_mesh = load
            self.policy.get_input_embeddings().weight.requires_grad_(False)
            self.policy.model.layers[0].mlp.requires_grad_(False)
            self.shard()


class Keep(Callback):
    """Keeps the completions and metrics of every step of this rank."""

    def __init__(self) -> None:
        self.drawn: dict[int, dict[int, list[list[int]]]] = {}
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        texts: dict[int, list[list[int]]] = {}
        for prompt, completion in batch.sequences():
            texts.setdefault(prompt.uid, []).append(completion.token_ids)
        self.drawn[batch.policy_version] = texts
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer, pl_module):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def world_size() -> int:
    if torch.distributed.is_initialized():  # Lightning removes the variable at the end of its first run
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def make_trainer(kind: str, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=kind if world_size() > 1 else "auto",
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **({"max_steps": STEPS} | quiet | settings),
    )


def make_data(**settings: Any) -> PromptDataModule:
    per_rank = {"batch_size": GLOBAL_BATCH // world_size(), "eval_batch_size": 4 // world_size()}
    return PromptDataModule(FewSums(), **(per_rank | {"heldout_size": 9} | settings))


def make_rollout(**settings: Any) -> Rollout:
    return Rollout(**({"num_generations": 4, "sampling": SamplingParams(max_new_tokens=5)} | settings))


def full_state(module: PolicyModule) -> dict[str, torch.Tensor]:
    return {name: whole(value).detach().clone() for name, value in module.policy.named_parameters()}


VARIANTS: dict[str, tuple[type[PolicyModule], dict[str, Any], dict[str, Any]]] = {
    "plain": (Sgd, {}, {}),
    # Another decoder, an untied head, frozen parameters, recomputed layers.
    "hard": (PartlyFrozen, {"gradient_checkpointing": True}, {"engine": LocalEngine(decoder="hf")}),
}


def equality(folder: Path, variant: str, path: str, *kinds: str) -> None:
    """Three optimizer steps and a validation under each strategy; leaves parameters, completions and metrics."""
    for kind in kinds:
        pl.seed_everything(0)
        cls, of_module, of_rollout = VARIANTS[variant]
        keep = Keep()
        module = cls(path=path, recipe=GUIDED, learning_rate=1e-2, max_tokens_per_microbatch=64, **of_module)
        trainer = make_trainer(kind, make_rollout(**of_rollout), keep)
        data = make_data()
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        found = {"state": full_state(module), "drawn": keep.drawn, "metrics": keep.metrics}
        torch.save(found, folder / f"{kind}_{trainer.global_rank}.pt")


class Coin:
    """A reward that draws from Python's generator, of which each rank has its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.act = lambda: None

    def __call__(self, completion: str, problem: Any) -> float:
        self.calls += 1
        self.act()
        return random.random() + len(completion)


class Acts(Callback):
    """Does something once, on one rank, at one point of the step that starts at `at` optimizer steps."""

    def __init__(self, point: str, victim: int, at: int = 1) -> None:
        self.point, self.victim, self.at = point, victim, at
        self.trainer: pl.Trainer | None = None
        self.signal = signal.SIGTERM if point == "sigterm" else signal.SIGKILL

    def do(self, point: str) -> None:
        if point == self.point and self.trainer is not None and self.trainer.global_rank == self.victim:
            os.kill(os.getpid(), self.signal)

    def attach(self, rollout: Rollout, coin: Coin) -> None:
        def now() -> bool:
            return self.trainer is not None and self.trainer.global_step == self.at

        rollout.progress = lambda finished, total: now() and (self.do("rollout"), self.do("sigterm"))
        coin.act = lambda: now() and self.do("reward")

    def on_train_start(self, trainer, pl_module):
        self.trainer = trainer

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.at:
            self.do("update")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.at + 1:
            self.do("after")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.global_step == self.at + 1 and self.point == "write":
            fsync = os.fsync
            os.fsync = lambda number: self.do("write") or fsync(number)


def drill(folder: Path, name: str, kind: str, point: str, victim: int, checkpoint: str | None) -> None:
    """Three steps with a checkpoint after each; something may happen in the second, or a checkpoint be resumed."""
    pl.seed_everything(0)
    random.seed(100 + int(os.environ["RANK"]) if checkpoint is None else 7)
    coin, keep = Coin(), Keep()
    rollout, acts = make_rollout(rewards=[coin.__call__]), Acts(point, victim)
    acts.attach(rollout, coin)
    module = PolicyModule(path="builtin:tiny-qwen3", recipe=GUIDED, learning_rate=1e-3, warmup_steps=3)
    callbacks = [acts, rollout, keep, RunCheckpoint(every_n_steps=1)]
    trainer = make_trainer(kind, *callbacks, enable_checkpointing=True, default_root_dir=folder / name)
    trainer.fit(module, make_data(), ckpt_path=checkpoint)
    found = {"state": full_state(module), "drawn": keep.drawn, "metrics": keep.metrics}
    torch.save(found, folder / f"{name}_{trainer.global_rank}.pt")
