"""What drawing one rollout ahead gives: seconds of a step with `rollout.max_version_diff` 0 and 1, and their ratio.

    python examples/bench_ahead.py --json ahead.json                   one GPU, 1.7B shape, about 3 minutes
    python examples/bench_ahead.py --device cpu --shape tiny           to try it

All runs have the same prompts, seeds, corrections and number of tokens, one after the other, each in a process of its
own: on-policy; ahead, where both sides share all SMs of the GPU; and ahead with SMs for each (`rollout.ahead_sms`; not
on a CPU). The gain is bounded by (rollout + train) / max(rollout, train), of the first run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from support.random_policy import (
    StepMeter,
    fill_sizes,
    in_own_process,
    medians,
    run_steps,
    settings_of,
    size_options,
)

from trace_lightning.callbacks import Rollout
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
    ahead = {"max_version_diff": args.max_version_diff, "ahead_sms": args.ahead_sms}
    rollout = Rollout(sampling=sampling, num_generations=args.generations, reward_workers=0, **ahead)
    run_steps(args, args.steps, rollout, meter, corrections=[TIS()])
    # The last step has nothing to draw beside it.
    result = medians(args, meter.steps[min(WARM_STEPS, args.steps - 2) : -1])
    result["steps_s"] = [step["step_s"] for step in meter.steps]
    Path(args.out).write_text(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size_options(parser)
    parser.add_argument("--steps", type=int, default=8, help="of each run, at least 3; medians leave the first 3 out")
    parser.add_argument("--ahead_sms", type=int, help="of the last run; default: as `rollout.ahead_sms`")
    parser.add_argument("--max_version_diff", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: at least 3, for the first draws by itself and the last has nothing drawn beside it")
    return fill_sizes(args)


def main() -> None:
    args = parse()
    if args.out:
        worker(args)
        return
    ahead = {"max_version_diff": 1}
    runs = {"on-policy": {"max_version_diff": 0}, "ahead, SMs shared": ahead | {"ahead_sms": 0}}
    if args.device == "cuda":
        runs["ahead, SMs cut"] = ahead | ({} if args.ahead_sms is None else {"ahead_sms": args.ahead_sms})
    found = {name: in_own_process(__file__, args, **options) for name, options in runs.items()}
    before = found["on-policy"]
    phases = before["rollout_s"] + before["reward_s"], before["train_s"]
    result = {
        **settings_of(args, "max_version_diff"),
        "runs": found,
        "gain": {name: before["step_s"] / run["step_s"] for name, run in found.items()},
        "bound": sum(phases) / max(phases),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
