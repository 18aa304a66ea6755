"""Is `trace-fit estimate` right? Two steps of the real loop on random weights, and the peak of every phase beside it.

    python examples/estimate_peaks.py --json peaks.json                three shapes, for a GPU of 80 GB or more
    python examples/estimate_peaks.py --shapes tiny                    a CPU: the loop runs, peaks are not measured

A phase's peak is what torch had allocated at most in it, and what the device holds beside torch (context, libraries).
Phases end where the estimate's do: the rollout before the first forward, training before the optimizer's step.
"""

import argparse
import dataclasses
import gc
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trace_lightning import GuidanceConfig, QuantRecipe, SamplingParams
from trace_lightning.bench.shapes import SHAPES, make_model
from trace_lightning.callbacks import Rollout
from trace_lightning.data import PromptDataModule
from trace_lightning.estimate.cards import CARDS
from trace_lightning.estimate.memory import peaks
from trace_lightning.estimate.plan import Plan
from trace_lightning.models.tiny import tiny_tokenizer
from trace_lightning.module import PolicyModule
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.tasks import FunctionReward, Task
from trace_lightning.types import Problem

GUIDED = GuidanceConfig(mode="parity")
W4A16KV4 = QuantRecipe(weights="nvfp4", kv_cache="nvfp4", guidance=GUIDED)
W4A4KV4 = dataclasses.replace(W4A16KV4, activations="nvfp4")
RUNS: dict[str, dict[str, Any]] = {  # what differs from the defaults of Plan
    "tiny": {"recipe": W4A4KV4, "prompts": 2, "samples": 2, "prompt_length": 16, "new_tokens": 16},
    "qwen3-0.6b": {"recipe": W4A4KV4, "prompts": 16, "samples": 8, "prompt_length": 256, "new_tokens": 768},
    "qwen3-1.7b": {
        **{"recipe": W4A16KV4, "prompts": 16, "samples": 8, "prompt_length": 256, "new_tokens": 768},
        "max_tokens_per_microbatch": 8192,
    },
    "qwen3-4b": {
        **{"recipe": W4A16KV4, "prompts": 8, "samples": 8, "prompt_length": 256, "new_tokens": 768},
        **{"gradient_checkpointing": True, "memory_fraction": 0.2},
    },
}


class Prompts(Task):
    """As many prompts of one length as are needed."""

    def __init__(self, plan: Plan) -> None:
        texts = (f"{i:06d}" + "+" * (plan.prompt_length - 6) for i in range(2 * plan.prompts))
        self.problems = [Problem(prompt=text) for text in texts]

    def train_problems(self) -> list[Problem]:
        return self.problems

    def heldout_problems(self) -> list[Problem]:
        return []

    def rewards(self) -> list[FunctionReward]:
        return [FunctionReward(lambda completion, problem: float(len(completion) % 2))]


class Peaks(pl.Callback):
    """The largest allocation of each phase, bytes; empty on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, dict[str, int]()

    def end(self, phase: str) -> None:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            beside = total - free - torch.cuda.memory_reserved(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) + beside
            self.bytes[phase] = max(self.bytes.get(phase, 0), peak)
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_train_batch_start(self, *_: Any) -> None:
        self.end("rollout")  # behind the Rollout callback, which stands before this one


def run(name: str, plan: Plan, folder: str, device: torch.device) -> dict[str, int]:
    """Two steps of `plan` with random weights; measured bytes by phase."""
    path = Path(folder) / name
    model = make_model(plan.shape, None, torch.device("cpu") if device.type == "cpu" else device)
    model.generation_config.eos_token_id = tiny_tokenizer().eos_token_id
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    del model
    gc.collect()
    measured = Peaks(device)
    sampling = SamplingParams(max_new_tokens=plan.new_tokens, ignore_eos=True)
    engine = LocalEngine(memory_fraction=plan.memory_fraction, max_num_seqs=plan.max_num_seqs)
    policy = PolicyModule(
        path=str(path),
        recipe=plan.recipe,
        gradient_checkpointing=plan.gradient_checkpointing,
        max_tokens_per_microbatch=plan.max_tokens_per_microbatch,
    )
    settings: dict[str, Any] = {"accelerator": device.type if device.type == "cpu" else "gpu", "devices": 1}
    trainer = pl.Trainer(
        max_steps=2,
        precision="bf16-mixed",
        callbacks=[Rollout(engine, sampling, num_generations=plan.samples), measured],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: measured.end("train")),
        register_optimizer_step_post_hook(lambda *_: measured.end("step")),
    ]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer.fit(policy, PromptDataModule(Prompts(plan), batch_size=plan.prompts))
    for hook in hooks:
        hook.remove()
    return measured.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=RUNS, default=[name for name in RUNS if name != "tiny"])
    parser.add_argument("--json", help="write the numbers")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else CARDS["h200"].memory
    card, rows = dataclasses.replace(CARDS["h200"], memory=memory), []
    print(f"{'shape':12s} {'recipe':24s} {'phase':8s} {'estimate GB':>12s} {'measured GB':>12s} {'their ratio':>12s}")
    for name in args.shapes:
        plan = Plan(model=name, shape=SHAPES[name], card=card, **RUNS[name])
        with tempfile.TemporaryDirectory() as folder:
            measured = run(name, plan, folder, device)
        gc.collect()
        for phase, estimate in peaks(plan).items():
            found = measured.get(phase)
            rows.append(
                {"shape": name, "recipe": plan.recipe.label, "phase": phase, "estimate": estimate, "measured": found}
            )
            cells = ("not measured", "") if found is None else (f"{found / 1e9:.2f}", f"{estimate / found:.3f}")
            print(
                f"{name:12s} {plan.recipe.label:24s} {phase:8s} {estimate / 1e9:12.2f} {cells[0]:>12s} {cells[1]:>12s}",
                flush=True,
            )
    if args.json:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        Path(args.json).write_text(
            json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
