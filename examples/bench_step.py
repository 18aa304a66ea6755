"""What FP4 rollouts gain over a whole step: seconds of rollout and training of several recipes, on random weights.

    python examples/bench_step.py --json step.json                     one GPU, 1.7B shape, about 3 minutes
    python examples/bench_step.py --device cpu --shape tiny            to try it

A faster rollout is worth its share of a step, and a trainer that rounds pays for it. All recipes have the same prompts,
seeds and number of tokens (completions ignore EOS), one after the other, each in a process of its own; seconds are
medians behind the warm steps, in which kernels are compiled and graphs captured. Ratios are over `bf16`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from support.random_policy import RECIPE, Digits, RandomPolicy, StepMeter

from trace_lightning.bench.shapes import SHAPES
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.types import GuidanceConfig, QuantRecipe, SamplingParams

W4A4 = {"weights": "nvfp4", "activations": "nvfp4", "kv_cache": "nvfp4"}
RECIPES = {
    "bf16": QuantRecipe(),
    "w4a16kv4": RECIPE,
    "w4a16kv4_qat": QuantRecipe(weights="nvfp4", kv_cache="nvfp4"),
    "w4a4kv4": QuantRecipe(**W4A4, guidance=GuidanceConfig(mode="parity")),  # type: ignore[arg-type]
    "w4a4kv4_qat": QuantRecipe(**W4A4),  # type: ignore[arg-type]
}
WARM_STEPS = 2
PHASES = ("step_s", "rollout_s", "train_s")


def worker(args: argparse.Namespace) -> None:
    """One recipe; its medians go to `args.out`."""
    pl.seed_everything(0)
    sampling, meter = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True), StepMeter()
    trainer = pl.Trainer(
        accelerator=args.device,
        devices=1,
        precision="32-true" if args.device == "cpu" else "bf16-mixed",
        max_steps=WARM_STEPS + args.steps,
        callbacks=[Rollout(sampling=sampling, num_generations=args.generations, reward_workers=0), meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = RandomPolicy(
        args.shape,
        recompute=args.shape != "tiny",
        recipe=RECIPES[args.recipe],
        max_tokens_per_microbatch=args.microbatch,
    )
    trainer.fit(module, PromptDataModule(Digits(args.prompt_length), batch_size=args.prompts))
    steady = meter.steps[WARM_STEPS:]
    result = {name: statistics.median(step[name] for step in steady) for name in steady[0]}
    if args.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    Path(args.out).write_text(json.dumps(result))


def measure(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """`worker` in a process of its own."""
    names = ("device", "shape", "steps", "prompts", "generations", "prompt_length", "new_tokens", "microbatch")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        flags = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
        command = [sys.executable, __file__, "--recipe", recipe, "--out", str(out), *flags]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return dict(json.loads(out.read_text()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=4, help="behind the warm ones")
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=None)
    parser.add_argument("--new_tokens", type=int, default=None)
    parser.add_argument("--microbatch", type=int, default=16384, help="padded tokens per micro-batch")
    parser.add_argument("--json", help="write the result there as well")
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    small = args.shape == "tiny"
    args.prompt_length = args.prompt_length or (16 if small else 256)
    args.new_tokens = args.new_tokens or (32 if small else 512)
    return args


def main() -> None:
    args = parse()
    if args.out:
        worker(args)
        return
    runs: dict[str, dict[str, Any]] = {}
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "options": {name: value for name, value in vars(args).items() if name not in ("json", "out", "recipe")},
        "runs": runs,
    }
    for recipe in args.recipes:
        runs[recipe] = measure(args, recipe)
        base = runs.get("bf16", runs[recipe])
        ratios = {name: base[name] / runs[recipe][name] for name in PHASES}
        runs[recipe]["gain"] = ratios
        print(f"{recipe:13}", *(f"{n[:-2]} {runs[recipe][n]:.3f} s ({ratios[n]:.2f} x)" for n in PHASES), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")  # here, so that a stop costs one recipe


if __name__ == "__main__":
    main()
