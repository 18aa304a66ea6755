"""What two GPUs give over one: rollout, whole step, weight sync, memory; and what happens when a rank is killed.

    NCCL_NVLS_ENABLE=0 python examples/bench_two_gpus.py --json two_gpus.json       two GPUs, about 9 minutes
    python examples/bench_two_gpus.py --device cpu --shape tiny --steps 3           the same over gloo, to try it

One process, DDP, FSDP2 and FSDP2 with `keep_gathered` run in turn, each with the same prompts per rank, so the gain is
the ratio of tokens per second (weak scaling). Weights are random and are drawn on the device: nothing is downloaded.
Completions ignore EOS, so every run draws the same number of tokens. The drills kill a rank of a small DDP run with
SIGKILL, wait for the end of all of them, and resume from the checkpoint. Ranks are started by Lightning; the file calls
itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from support.random_policy import Digits, RandomPolicy, StepMeter, worker_command

from trace_lightning.bench.shapes import SHAPES
from trace_lightning.callbacks import Rollout, RunCheckpoint
from trace_lightning.data import PromptDataModule
from trace_lightning.models.sharding import Weights
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.strategy import FSDP2Strategy
from trace_lightning.types import SamplingParams

WARM_STEPS = 2  # kernels are compiled and graphs captured
ONE_GPU_STEPS = 8  # enough for a median; that memory stays flat is looked at on several ranks
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp2": FSDP2Strategy,
    "fsdp2_gathered": partial(FSDP2Strategy, keep_gathered=True),
}
ROLLOUT_GAIN, STEP_GAIN, END_SECONDS = 1.9, 1.7, 60.0
FLAT_BYTES = 2**20


class Meter(StepMeter):
    """And memory, and a weight sync at the end; rank zero writes those of all ranks."""

    def __init__(self, rollout: Rollout, path: Path | None) -> None:
        super().__init__()
        self.rollout, self.path = rollout, path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        # Called after the Rollout callback, which comes first in the list.
        self.wait(pl_module)

    def more(self, trainer, module, batch, step) -> dict[str, float]:
        print(f"step {trainer.global_step}: {step['step_s']:.2f} s", flush=True)
        if module.device.type != "cuda":
            return {}
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}

    def on_train_end(self, trainer, pl_module) -> None:
        found = {"steps": self.steps, "sync": self.time_sync(pl_module, trainer.global_step)}
        everyone: list[Any] = [found]
        if trainer.world_size > 1:
            everyone = [None] * trainer.world_size
            torch.distributed.all_gather_object(everyone, found)
        if trainer.is_global_zero and self.path is not None:
            self.path.write_text(json.dumps(everyone))

    def time_sync(self, module: Any, version: int) -> dict[str, float]:
        """Median seconds of three syncs, and the most bytes that one takes above what is held anyway."""
        seconds, above = [], 0
        for _ in range(3):
            self.wait(module)
            cuda = module.device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            held, begin = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
            self.rollout.engine.load_weights(Weights(module.policy), version=version)
            self.wait(module)
            seconds.append(time.perf_counter() - begin)
            above = max(above, torch.cuda.max_memory_allocated() - held if cuda else 0)
        return {"seconds": statistics.median(seconds), "bytes_above": above}


def worker(args: argparse.Namespace) -> None:
    """One run of the bench, on as many ranks as its kind has."""
    pl.seed_everything(0)
    tiny = args.shape == "tiny"
    sampling = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    rollout = Rollout(LocalEngine(), sampling, num_generations=args.generations, reward_workers=0)  # `toss` counts
    meter = Meter(rollout, None if args.out is None else Path(args.out))
    keep = [RunCheckpoint(every_n_steps=1)] if args.folder else []
    trainer = pl.Trainer(
        accelerator=args.device,
        devices=1 if args.kind == "one" else 2,
        strategy=STRATEGIES[args.kind](),
        precision="32-true" if args.device == "cpu" else "bf16-mixed",
        max_steps=args.steps,
        callbacks=[rollout, meter, *keep],
        logger=False,
        enable_checkpointing=bool(keep),
        default_root_dir=args.folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = RandomPolicy(args.shape, recompute=not tiny, max_tokens_per_microbatch=args.microbatch)
    data = PromptDataModule(Digits(args.prompt_length), batch_size=args.prompts)
    trainer.fit(module, data, ckpt_path=args.resume)


def measure(args: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """Run and sum up: medians over the steps after the warm ones; seconds of the slowest rank."""
    out, begin = folder / f"{kind}.json", time.monotonic()
    steps = min(args.steps, ONE_GPU_STEPS) if kind == "one" else args.steps
    path = folder / f"{kind}.log"
    with path.open("w") as log:
        command = worker_command(__file__, args, kind=kind, out=out, steps=steps)
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:  # the other runs are worth their time all the same
        print(path.read_text()[-4000:], flush=True)
        return {"failed": f"exit code {done.returncode}, see {path}"}
    ranks = json.loads(out.read_text())
    steady = [rank["steps"][min(WARM_STEPS, steps - 1) :] for rank in ranks]

    def slowest(name: str) -> float:
        return statistics.median(max(step[name] for step in steps) for steps in zip(*steady, strict=True))

    tokens = sum(statistics.median(step["tokens"] for step in steps) for steps in steady)
    result = {
        "ranks": len(ranks),
        "rollout_tokens_per_s": tokens / slowest("rollout_s"),
        "step_tokens_per_s": tokens / slowest("step_s"),
        **{f"{name}_s": slowest(f"{name}_s") for name in ("step", "rollout", "reward", "train")},
        "sync_s": max(rank["sync"]["seconds"] for rank in ranks),
        "sync_bytes_above": max(rank["sync"]["bytes_above"] for rank in ranks),
        "run_s": time.monotonic() - begin,
    }
    if args.device == "cuda":
        for name in ("allocated", "reserved"):
            result[f"{name}_bytes"] = max(steps[-1][name] for steps in steady)
            result[f"{name}_growth_bytes"] = max(steps[-1][name] - steps[0][name] for steps in steady)
    return result


def drill(args: argparse.Namespace, victim: int, folder: Path) -> dict[str, Any]:
    """Kill -9 one rank of a DDP run in its fourth step; seconds until all are gone, and whether the run resumes."""
    small = {"shape": "tiny", "steps": 500, "prompts": 2, "generations": 4, "new_tokens": 32, "prompt_length": 16}
    root, path = folder / f"kill{victim}", folder / f"kill{victim}.log"
    with path.open("w") as log:
        command = worker_command(__file__, args, kind="ddp", folder=root, **small)
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    wait_for(lambda: "step 3:" in path.read_text() or run.poll() is not None, 240)
    if run.poll() is not None:
        print(path.read_text()[-4000:], flush=True)
        return {"seconds": 0.0, "message": None, "saved_step": 0, "resumes": False}
    (child,) = children_of(run.pid)
    os.kill(run.pid if victim == 0 else child, signal.SIGKILL)
    begin = time.monotonic()
    run.wait(120)
    wait_for(lambda: not alive(child), 120)
    seconds = time.monotonic() - begin
    said = [
        line
        for line in path.read_text().splitlines()
        if re.search(r"terminated with code|is gone|rank \d failed by itself", line)
    ]
    (last,) = root.rglob("last.ckpt")
    saved = torch.load(last, weights_only=True, mmap=True)["global_step"]
    with (folder / f"resume{victim}.log").open("w") as log:
        small |= {"steps": saved + 2}
        again = worker_command(__file__, args, kind="ddp", folder=root / "again", resume=last, **small)
        resumed = subprocess.run(again, stdout=log, stderr=subprocess.STDOUT).returncode == 0
    first = re.search(r"step (\d+):", (folder / f"resume{victim}.log").read_text())
    goes_on = resumed and first is not None and int(first[1]) == saved + 1
    return {"seconds": seconds, "message": said[0] if said else None, "saved_step": saved, "resumes": goes_on}


def wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened for {seconds} s")
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """Processes that `pid` started as ranks."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"\0LOCAL_RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def promises(result: dict[str, Any], on_gpu: bool) -> list[dict[str, Any]]:
    """What was to be shown, and whether it was; speed and memory are promised of GPUs alone."""
    rows = []
    one = result["runs"].get("one")
    for kind, run in result["runs"].items():
        if "failed" in run:
            rows.append((f"{kind}/ran", 0.0, "== 1", False))
        elif kind != "one" and one is not None and "failed" not in one:
            for name, least in (("rollout", ROLLOUT_GAIN), ("step", STEP_GAIN)):
                gain = run[f"{name}_tokens_per_s"] / one[f"{name}_tokens_per_s"]
                rows.append((f"{kind}/{name} gain", gain, f">= {least}", gain >= least if on_gpu else None))
        if "allocated_growth_bytes" in run:
            growth = run["allocated_growth_bytes"]
            rows.append((f"{kind}/memory growth", growth, f"<= {FLAT_BYTES}", growth <= FLAT_BYTES))
    for name, kill in result["kills"].items():
        fine = kill["seconds"] < END_SECONDS and kill["message"] is not None and kill["resumes"]
        rows.append((f"kill {name}/seconds to the end", kill["seconds"], f"< {END_SECONDS}, message, resumes", fine))
    return [dict(zip(("name", "value", "must", "ok"), row, strict=True)) for row in rows]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--steps", type=int, default=22, help="optimizer steps of each run")
    parser.add_argument("--prompts", type=int, default=None, help="prompts per rank and step")
    parser.add_argument("--generations", type=int, default=None, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=None)
    parser.add_argument("--new_tokens", type=int, default=None)
    parser.add_argument("--microbatch", type=int, default=16384, help="padded tokens per micro-batch")
    parser.add_argument("--runs", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--kill", nargs="*", type=int, default=[1, 0], help="ranks to kill, one drill each")
    parser.add_argument("--json", default="two_gpus.json")
    parser.add_argument("--logs", default="two_gpus_logs", help="folder for the output of the runs")
    for internal in ("--kind", "--out", "--folder", "--resume"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = (2, 4, 16, 16) if args.shape == "tiny" else (8, 8, 256, 256)
    for name, size in zip(("prompts", "generations", "prompt_length", "new_tokens"), sizes, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, size)
    return args


def main() -> None:
    args = parse()
    if args.kind:
        worker(args)
        return
    needed = 2 if args.kill or set(args.runs) - {"one"} else 1
    if args.device == "cuda" and torch.cuda.device_count() < needed:
        raise SystemExit(f"this needs two GPUs, found {torch.cuda.device_count()}; --device cpu --shape tiny tries it")
    folder, begin = Path(args.logs), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "options": vars(args),
        "runs": {},
        "kills": {},
    }
    for kind in args.runs:
        result["runs"][kind] = measure(args, kind, folder)
        print(kind, json.dumps(result["runs"][kind]), flush=True)
        Path(args.json).write_text(json.dumps(result, indent=2))
    for victim in args.kill:
        result["kills"][f"rank {victim}"] = drill(args, victim, folder)
        print(f"kill rank {victim}", json.dumps(result["kills"][f"rank {victim}"]), flush=True)
        Path(args.json).write_text(json.dumps(result, indent=2))
    result |= {"promises": promises(result, args.device == "cuda"), "seconds": time.monotonic() - begin}
    Path(args.json).write_text(json.dumps(result, indent=2))
    for row in result["promises"]:
        verdict = {True: "kept", False: "BROKEN", None: "not judged"}[row["ok"]]
        print(f"{row['name']:36} {row['value']:12.4g}   {row['must']:34} {verdict}")
    sys.exit(any(row["ok"] is False for row in result["promises"]))


if __name__ == "__main__":
    main()
