"""What adapters save: trainable share, memory and seconds of a step, against training all weights, on random weights.

    python examples/bench_lora.py --json bench_lora.json                 the 1.7B shape on one GPU, below 3 minutes
    python examples/bench_lora.py --device cpu --shape tiny              a CPU: it runs, memory is not measured

The same prompts, lengths and recipe (W4A16KV4, guided) for each way of training; completions ignore EOS, so each draws
the same number of tokens. A step's seconds are medians behind the warm steps, in which kernels are compiled and graphs
captured. Memory is what torch had allocated: at most, and at rest between two steps. `estimated` is the largest peak by
`trace-fit estimate`, which counts 1.5 GB for context and libraries that torch does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from support.random_policy import RECIPE, Digits, StepMeter

from trace_lightning import SamplingParams
from trace_lightning.bench.shapes import SHAPES, make_model
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.estimate.cards import CARDS
from trace_lightning.estimate.memory import peaks
from trace_lightning.estimate.plan import Plan
from trace_lightning.models.lora import LoraConfig
from trace_lightning.models.tiny import tiny_tokenizer
from trace_lightning.module import PolicyModule
from trace_lightning.rollout.engine import LocalEngine

WAYS = ("full", "adapter", "merged")


class Meter(StepMeter):
    """And what is allocated when a step ends."""

    def more(self, trainer, module, batch, step) -> dict[str, float]:
        print(f"  step {trainer.global_step}: {step['step_s']:.2f} s", flush=True)
        held = {"rest_bytes": torch.cuda.memory_allocated()} if module.device.type == "cuda" else {}
        return held | {"rollout_tokens_per_s": step["tokens"] / step["rollout_s"]}


def measure(args: argparse.Namespace, way: str, path: Path) -> dict[str, Any]:
    """A few steps of one way of training, and what they cost."""
    pl.seed_everything(0)
    lora = None if way == "full" else LoraConfig(rank=args.rank, alpha=2 * args.rank, rollout=way)
    module = PolicyModule(
        path=str(path),
        recipe=RECIPE,
        lora=lora,
        gradient_checkpointing=args.shape != "tiny",
        max_tokens_per_microbatch=args.microbatch,
    )
    meter, sampling = Meter(), SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if on_gpu else "32-true",
        max_steps=args.warm + args.steps,
        callbacks=[Rollout(LocalEngine(), sampling, num_generations=args.samples, reward_workers=0), meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, PromptDataModule(Digits(args.prompt_length), batch_size=args.prompts))
    steady = meter.steps[args.warm :]
    result = {name: statistics.median(step[name] for step in steady) for name in steady[0]}
    assert module.policy is not None
    trained = sum(parameter.numel() for parameter in module.policy.parameters() if parameter.requires_grad)
    result |= {"trained": trained, "trained_share": trained / SHAPES[args.shape].params}
    if on_gpu:
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return result | {"estimated": estimated(args, lora)}


def estimated(args: argparse.Namespace, lora: LoraConfig | None) -> float:
    """The largest peak that `trace-fit estimate` would have said."""
    plan = Plan(
        **{"model": args.shape, "shape": SHAPES[args.shape], "recipe": RECIPE, "card": CARDS["h200"]},
        **{name: getattr(args, name) for name in ("prompts", "samples", "prompt_length", "new_tokens")},
        max_tokens_per_microbatch=args.microbatch,
        gradient_checkpointing=args.shape != "tiny",
        **({} if lora is None else {"lora_rank": lora.rank, "lora_rollout": lora.rollout}),
    )
    return max(peaks(plan).values())


def save_model(args: argparse.Namespace, path: Path) -> None:
    """Random BF16 weights of the shape, with the tokenizer of the embedded model."""
    model = make_model(SHAPES[args.shape], None, torch.device(args.device))
    model.generation_config.eos_token_id = tiny_tokenizer().eos_token_id
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=None, help="per step")
    parser.add_argument("--samples", type=int, default=None, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=None)
    parser.add_argument("--new_tokens", type=int, default=None)
    parser.add_argument("--microbatch", type=int, default=16384, help="padded tokens per micro-batch")
    parser.add_argument("--json", default="bench_lora.json")
    args = parser.parse_args()
    sizes = (2, 4, 16, 16) if args.shape == "tiny" else (8, 8, 256, 256)
    for name, size in zip(("prompts", "samples", "prompt_length", "new_tokens"), sizes, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, size)
    return args


def main() -> None:
    args = parse()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    result: dict[str, Any] = {"options": vars(args), "torch": torch.__version__, "ways": {}}
    result["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        save_model(args, Path(folder))
        for way in args.ways:
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            print(way, flush=True)
            result["ways"][way] = measure(args, way, Path(folder))
            print("  " + ", ".join(f"{name} {value:.4g}" for name, value in result["ways"][way].items()), flush=True)
            result["seconds"] = time.monotonic() - begin
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n")  # here, so that a stop costs one way


if __name__ == "__main__":
    main()
