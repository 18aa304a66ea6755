"""A run whose speed is measured: a published shape with random weights, prompts of one length, rewards that differ.

Nothing is downloaded: weights are drawn on the device. Completions should ignore EOS, so that every run draws as many
tokens as any other.
"""

import itertools
import time
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.bench.shapes import SHAPES, make_model
from trace_lightning.models.policy import set_gradient_checkpointing
from trace_lightning.module import PolicyModule
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.tasks import FunctionReward, Task
from trace_lightning.types import Problem

RECIPE = QuantRecipe(weights="nvfp4", kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity"))  # W4A16KV4, for Hopper
coin = itertools.count()


def toss(completion: str, problem: Problem) -> float:
    """A reward that differs within every group."""
    return float(next(coin) % 2)


class Digits(Task):
    """Prompts of one length; what they say does not matter."""

    def __init__(self, length: int, count: int = 4096) -> None:
        self.texts = [f"{i:0{length}d}" for i in range(count)]

    def train_problems(self) -> list[Problem]:
        return [Problem(prompt=text) for text in self.texts]

    def heldout_problems(self) -> list[Problem]:
        return []

    def rewards(self) -> list[FunctionReward]:
        return [FunctionReward(toss)]


class RandomPolicy(PolicyModule):
    """A policy of a published shape with random weights, drawn where it trains."""

    def __init__(self, shape: str, recompute: bool, recipe: QuantRecipe = RECIPE, **settings: Any) -> None:
        super().__init__(path="builtin:tiny-qwen3", recipe=recipe, **settings)  # for its tokenizer
        self.shape_name, self.recompute = shape, recompute
        self.context_length = SHAPES[shape].max_positions

    def configure_model(self) -> None:
        if self.policy is None:
            model = make_model(SHAPES[self.shape_name], None, self.trainer.strategy.root_device).float()
            install_qat(model, self.recipe.trained)
            set_gradient_checkpointing(model, self.recompute)
            self.policy = model.train()
            self.shard()


class StepMeter(Callback):
    """Seconds, drawn tokens and phases of every step; a bench adds what else it wants to know of one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.begin = 0.0

    def on_train_start(self, trainer, pl_module) -> None:
        self.begin = time.perf_counter()

    def wait(self, module) -> None:
        """Let the device finish the step."""
        if module.device.type == "cuda":
            torch.cuda.synchronize()

    def more(self, trainer, module, batch, step: dict[str, float]) -> dict[str, float]:
        """Further columns of `step`."""
        return {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.wait(pl_module)
        now = time.perf_counter()
        tokens = float(sum(len(completion.token_ids) for completion in batch.completions))
        step = {"step_s": now - self.begin, "tokens": tokens, **{f"{k}_s": v for k, v in batch.seconds.items()}}
        self.steps.append(step | self.more(trainer, pl_module, batch, step))
        self.begin = now
