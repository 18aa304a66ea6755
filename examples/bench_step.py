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
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from support.random_policy import (
    RECIPE,
    StepMeter,
    fill_sizes,
    in_own_process,
    medians,
    run_steps,
    settings_of,
    size_options,
)

from trace_lightning.callbacks import Rollout
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.types import SamplingParams

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
    rollout = Rollout(sampling=sampling, num_generations=args.generations, reward_workers=0)
    run_steps(args, WARM_STEPS + args.steps, rollout, meter, recipe=RECIPES[args.recipe])
    Path(args.out).write_text(json.dumps(medians(args, meter.steps[WARM_STEPS:])))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size_options(parser)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=4, help="behind the warm ones")
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    return fill_sizes(parser.parse_args())


def main() -> None:
    args = parse()
    if args.out:
        worker(args)
        return
    runs: dict[str, dict[str, Any]] = {}
    result = {**settings_of(args, "recipe"), "runs": runs}
    for recipe in args.recipes:
        runs[recipe] = in_own_process(__file__, args, recipe=recipe)
        base = runs.get("bf16", runs[recipe])
        ratios = {name: base[name] / runs[recipe][name] for name in PHASES}
        runs[recipe]["gain"] = ratios
        print(f"{recipe:13}", *(f"{n[:-2]} {runs[recipe][n]:.3f} s ({ratios[n]:.2f} x)" for n in PHASES), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")  # here, so that a stop costs one recipe


if __name__ == "__main__":
    main()
