"""What drawing one rollout ahead gives: seconds of a step with `rollout.max_version_diff` 0 and 1, and their ratio.

    python examples/bench_ahead.py --json ahead.json                   one GPU, 1.7B shape, about 2 minutes
    python examples/bench_ahead.py --device cpu --shape tiny           to try it

Both runs have the same prompts, seeds, corrections and number of tokens, one after the other, each in a process of its
own. The gain is bounded by (rollout + train) / max(rollout, train): what is left of it after both have shared the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from support.random_policy import Digits, RandomPolicy, StepMeter

from trace_lightning.bench.shapes import SHAPES
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.rl import TIS
from trace_lightning.types import SamplingParams

WARM_STEPS = 3  # kernels are compiled and graphs captured


class Meter(StepMeter):
    """Waits for the trainer's stream alone, since the engine's may be at work; and the age of what is trained on."""

    def wait(self, module) -> None:
        if module.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def more(self, trainer, module, batch, step) -> dict[str, float]:
        return {"version_diff": float(trainer.global_step - 1 - batch.policy_version)}


def worker(args: argparse.Namespace) -> None:
    """One run; its medians go to `args.out`."""
    pl.seed_everything(0)
    sampling, meter = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True), Meter()
    rollout = Rollout(
        sampling=sampling, num_generations=args.generations, reward_workers=0, max_version_diff=args.max_version_diff
    )
    trainer = pl.Trainer(
        accelerator=args.device,
        devices=1,
        precision="32-true" if args.device == "cpu" else "bf16-mixed",
        max_steps=args.steps,
        callbacks=[rollout, meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = RandomPolicy(
        args.shape,
        recompute=args.shape != "tiny",
        corrections=[TIS()],
        max_tokens_per_microbatch=args.microbatch,
    )
    trainer.fit(module, PromptDataModule(Digits(args.prompt_length), batch_size=args.prompts))
    # The last step has nothing to draw beside it.
    steady = meter.steps[min(WARM_STEPS, args.steps - 2) : -1]
    result = {name: statistics.median(step[name] for step in steady) for name in steady[0]}
    result["steps_s"] = [step["step_s"] for step in meter.steps]
    if args.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    Path(args.out).write_text(json.dumps(result))


def measure(args: argparse.Namespace, diff: int) -> dict[str, Any]:
    """`worker` in a process of its own."""
    names = ("device", "shape", "steps", "prompts", "generations", "prompt_length", "new_tokens", "microbatch")
    flags = itertools.chain.from_iterable((f"--{name}", str(getattr(args, name))) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--max_version_diff", str(diff), "--out", str(out), *flags]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return dict(json.loads(out.read_text()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--steps", type=int, default=8, help="of each run, at least 3; medians leave the first 3 out")
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=None)
    parser.add_argument("--new_tokens", type=int, default=None)
    parser.add_argument("--microbatch", type=int, default=16384, help="padded tokens per micro-batch")
    parser.add_argument("--json", help="write the result there as well")
    parser.add_argument("--max_version_diff", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: at least 3, for the first draws by itself and the last has nothing drawn beside it")
    small = args.shape == "tiny"
    args.prompt_length = args.prompt_length or (16 if small else 256)
    args.new_tokens = args.new_tokens or (32 if small else 512)
    return args


def main() -> None:
    args = parse()
    if args.out:
        worker(args)
        return
    runs = {f"max_version_diff={diff}": measure(args, diff) for diff in (0, 1)}
    before, after = runs.values()
    phases = before["rollout_s"] + before["reward_s"], before["train_s"]
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "options": {name: value for name, value in vars(args).items() if name not in ("json", "out")},
        "runs": runs,
        "gain": before["step_s"] / after["step_s"],
        "bound": sum(phases) / max(phases),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
