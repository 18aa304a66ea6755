"""A run whose speed is measured: a published shape with random weights, prompts of one length, rewards that differ.

Nothing is downloaded: weights are drawn on the device. Completions should ignore EOS, so that every run draws as many
tokens as any other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from trace_lightning.bench.shapes import SHAPES, make_model
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
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


def size_options(parser: argparse.ArgumentParser) -> None:
    """Device, shape and sizes of a step."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=None)
    parser.add_argument("--new_tokens", type=int, default=None)
    parser.add_argument("--microbatch", type=int, default=16384, help="padded tokens per micro-batch")
    parser.add_argument("--json", help="write the result there as well")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # of a worker


def fill_sizes(args: argparse.Namespace) -> argparse.Namespace:
    """What was not given: small for the tiny shape."""
    small = args.shape == "tiny"
    args.prompt_length = args.prompt_length or (16 if small else 256)
    args.new_tokens = args.new_tokens or (32 if small else 512)
    return args


def run_steps(args: argparse.Namespace, max_steps: int, rollout: Rollout, meter: StepMeter, **settings: Any) -> None:
    """Train a random policy for some steps; settings are the policy's."""
    trainer = pl.Trainer(
        accelerator=args.device,
        devices=1,
        precision="32-true" if args.device == "cpu" else "bf16-mixed",
        max_steps=max_steps,
        callbacks=[rollout, meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = RandomPolicy(
        args.shape, recompute=args.shape != "tiny", max_tokens_per_microbatch=args.microbatch, **settings
    )
    trainer.fit(module, PromptDataModule(Digits(args.prompt_length), batch_size=args.prompts))


def medians(args: argparse.Namespace, steady: list[dict[str, float]]) -> dict[str, Any]:
    """Of every column over some steps, and on a GPU the peak of what was allocated."""
    result: dict[str, Any] = {name: statistics.median(step[name] for step in steady) for name in steady[0]}
    if args.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


def worker_command(file: str, args: argparse.Namespace, **more: Any) -> list[str]:
    """The command line of a bench's worker: the sizes of `args`, and more options or others."""
    names = ("device", "shape", "steps", "prompts", "generations", "prompt_length", "new_tokens", "microbatch")
    options = {name: getattr(args, name) for name in names} | more
    return [sys.executable, file, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def in_own_process(file: str, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What the worker of a bench writes to `--out`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        subprocess.run(worker_command(file, args, **more, out=out), check=True, stdout=sys.stderr)
        return dict(json.loads(out.read_text()))


def settings_of(args: argparse.Namespace, *hidden: str) -> dict[str, Any]:
    """For the result: device, version and options."""
    options = {name: value for name, value in vars(args).items() if name not in ("json", "out", *hidden)}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return {"device": device, "torch": torch.__version__, "options": options}


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
