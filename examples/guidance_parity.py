"""Do trainer and rollout agree? Real engine against real trainer on one model, in a table.

The engine draws tokens step by step; the policy then scores the finished sequences in one pass. Printed per arm:
|difference of log-probs| of the drawn tokens, k3 KL, and the share of FP4 codes that differ after guidance. The two
sides run different matmul shapes and attention kernels, which on a GPU gives different BF16 roundings: the first row is
that floor. On a CPU both sides would round alike, so there the trainer's linears run in FP32 and are rounded to BF16.

    python examples/guidance_parity.py --model prepared:smollm2 --tokens 640 \
        --prompt 'Explain step by step how a bicycle stays upright, and compute 37*12.' --out parity.json
"""

import argparse
import dataclasses
import json

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from trace_lightning.metrics import DivergenceMetrics
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.quantization.guidance import GuidanceRecord
from trace_lightning.quantization.qat import QATLinear
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.microbatch import collate_rollout, take
from trace_lightning.rollout.scoring import score
from trace_lightning.types import GuidanceConfig, Problem, Prompt, QuantRecipe, RolloutBatch, SamplingParams


class OtherKernelLinear(torch.nn.Linear):
    """A linear whose product is computed in FP32 and rounded to BF16 once: another kernel, as it were."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float()).to(torch.bfloat16)


class OtherKernelQATLinear(QATLinear):
    """The same for a quantised linear."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.group.round_input(x), self.group.round_weight(self)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.bfloat16().float(), weight.bfloat16().float()).to(torch.bfloat16)


NVFP4 = {"weights": "nvfp4", "kv_cache": "nvfp4"}
ROLLOUTS = {"BF16": {}, "W4A16KV4": NVFP4, "W4A4KV4": NVFP4 | {"activations": "nvfp4"}}


def arms(name: str) -> dict[str, tuple[QuantRecipe, str | None]]:
    """Label -> (recipe of the trainer, guided layers or None) for one rollout format."""
    formats = ROLLOUTS[name]
    if not formats:
        return {"BF16 floor": (QuantRecipe(), None)}
    return {
        f"{name} naive, trainer not quantised": (QuantRecipe(trainer="bf16"), None),
        f"{name} QAT, not guided": (QuantRecipe(**formats), None),
        f"{name} guided by parity, last half": (QuantRecipe(**formats), "last_half"),
        f"{name} guided by parity, all layers": (QuantRecipe(**formats), "all"),
    }


def make_trainer(path: str, recipe: QuantRecipe, device: torch.device) -> PreTrainedModel:
    policy = load_policy(path, recipe, dtype=torch.float32).to(device).eval()
    if device.type == "cpu":
        for module in policy.modules():
            if type(module) is QATLinear:
                module.__class__ = OtherKernelQATLinear
            elif type(module) is torch.nn.Linear and module is not policy.get_output_embeddings():
                module.__class__ = OtherKernelLinear
    return policy


@torch.no_grad()
def roll_out(args: argparse.Namespace, recipe: QuantRecipe, device: torch.device) -> tuple[RolloutBatch, float]:
    """Draw `args.sequences` samples of one prompt; returns the batch and tokens per second."""
    tokenizer = load_tokenizer(args.model)
    source = load_policy(args.model, QuantRecipe(), dtype=torch.float32).to(device)
    engine = LocalEngine()
    engine.setup(source, tokenizer, recipe, dtype=torch.bfloat16)
    engine.load_weights(source.named_parameters(), version=0)
    text = args.prompt
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = Prompt(token_ids=tokenizer(text)["input_ids"], problem=Problem(prompt=text), uid=0)
    sampling = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, seed=args.seed)
    drawn = engine.generate([prompt], sampling, num_samples=args.sequences, record_guidance=True)
    batch = RolloutBatch(prompts=[prompt], num_generations=args.sequences, guidance=drawn.guidance)
    collate_rollout(batch, drawn.completions, tokenizer.pad_token_id)
    batch.advantages_B = torch.zeros(args.sequences)
    return batch, drawn.stats["generated_tokens"] / drawn.stats["seconds"]


def restrict(record: GuidanceRecord | None, layers: str | None) -> GuidanceRecord | None:
    """The record of the guided layers alone; None without guidance."""
    if record is None or layers is None:
        return None
    wanted = GuidanceConfig(mode="parity", layers=layers)
    count = 1 + max(layer for layer, _ in record.tables)
    kept = QuantRecipe(kv_cache="nvfp4", guidance=wanted).guided_layers(count)
    tables = {key: table for key, table in record.tables.items() if key[0] in kept}
    return dataclasses.replace(record, tables=tables)


@torch.no_grad()
def measure(policy: PreTrainedModel, batch: RolloutBatch, device: torch.device) -> dict[str, float]:
    """Score the rollout with `policy` under the batch's guidance and compare."""
    divergence = DivergenceMetrics().to(device)
    micro = take(batch, list(range(len(batch.completions))), device)
    with torch.autocast(device.type, torch.bfloat16):
        logprobs, _ = score(policy, micro, temperature=1.0)
    divergence.update(logprobs, micro.rollout_logprobs_BT, micro.mask_BT)
    values = {name: float(value) for name, value in divergence.compute().items()}
    codes = {} if micro.guidance is None else micro.guidance.mismatch.compute()
    return {
        "mean_abs_dlogp": values["sampling/sampling_logp_difference/mean"],
        "max_abs_dlogp": values["sampling/sampling_logp_difference/max"],
        "k3": values["rollout_corr/k3_kl"],
        "bytes_per_token": batch.guidance.bytes_per_token if batch.guidance else 0.0,
        **{f"code_mismatch_{name}": value for name, value in codes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny-qwen3")
    parser.add_argument("--prompt", default="12+34=")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="also write the rows as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: dict[str, dict[str, float]] = {}
    print(f"{'arm':38s} {'mean':>8s} {'max':>8s} {'k3':>9s} {'codes':>8s} {'B/token':>8s}")
    for name, formats in ROLLOUTS.items():
        mode = "parity" if formats else "none"
        guidance = GuidanceConfig(mode=mode, audit_sequences=args.sequences)
        drawn, speed = roll_out(args, QuantRecipe(**formats, guidance=guidance), device)
        for label, (recipe, layers) in arms(name).items():
            batch = dataclasses.replace(drawn, guidance=restrict(drawn.guidance, layers))
            rows[label] = row = measure(make_trainer(args.model, recipe, device), batch, device)
            row["rollout_tokens_per_s"] = speed
            codes = f"{row['code_mismatch_after']:8.4f}" if "code_mismatch_after" in row else f"{'-':>8s}"
            gaps = f"{row['mean_abs_dlogp']:8.4f} {row['max_abs_dlogp']:8.4f} {row['k3']:9.5f}"
            print(f"{label:38s} {gaps} {codes} {row['bytes_per_token']:8.0f}", flush=True)
    if args.out:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        with open(args.out, "w") as file:
            json.dump({"args": vars(args), "device": where, "torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
