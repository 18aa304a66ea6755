"""How much does FP4 quality owe to luck? One network, rounded many times over, under two rules for the outer scales.

Reordering the channels of the residual stream and of the MLPs changes nothing a network computes, but it changes which
weights share a block, so each order is another rounding of the same network. What differs between two *rules* must
stand out of what differs between *orders*; a comparison on one order is a draw from a lottery.

    W4A16KV4    outer scales of the weights: powers of two (as shipped) | amax / 2688
    W4A4KV4     of the activations, weights as shipped: powers of two | amax / 2688 | 4/3 of that
                amax / 2688 makes the largest value of a row exact; 4/3 of it lies between two block scales

Per order and rule: the probability of the right answer (teacher-forced, so free of sampling noise) and the KL
divergence from the unquantised network over the tokens of a text. All in FP32. K/V scales are powers of two throughout.

    python examples/rounding_spread.py --model prepared:smollm2 --task OneDigitProducts --text README.md --orders 12
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import trace_lightning.tasks as tasks
from trace_kernels import NVFP4
from trace_lightning.models.layout import find_decoder_layers
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.recipe import QuantRecipe

W4A16KV4 = QuantRecipe(weights="nvfp4", kv_cache="nvfp4")
W4A4KV4 = QuantRecipe(weights="nvfp4", activations="nvfp4", kv_cache="nvfp4")


@dataclass(frozen=True)
class ExactAmax(NVFP4):
    """NVFP4 whose outer scale is `factor * amax / 2688`, not the power of two above amax / 2688."""

    factor: float = 1.0

    def outer_from_amax(self, amax: Tensor) -> Tensor:
        return (amax * (self.factor / 2688)).clamp_min(2.0**-100)


SHIPPED = NVFP4()
ARMS = {
    "W4A16KV4, powers of two": (W4A16KV4, SHIPPED, None),
    "W4A16KV4, weights amax/2688": (W4A16KV4, ExactAmax(), None),
    "W4A4KV4, powers of two": (W4A4KV4, SHIPPED, SHIPPED),
    "W4A4KV4, activations amax/2688": (W4A4KV4, SHIPPED, ExactAmax()),
    "W4A4KV4, activations 4/3 amax/2688": (W4A4KV4, SHIPPED, ExactAmax(factor=4 / 3)),
}


@torch.no_grad()
def reorder(model: PreTrainedModel, seed: int) -> None:
    """Permute residual and MLP channels in place: the same function. Seed 0 leaves the network as it is."""
    if not seed:
        return
    generator = torch.Generator().manual_seed(seed)
    _, layers = find_decoder_layers(model)
    decoder = model.get_decoder()
    order = torch.randperm(model.config.hidden_size, generator=generator)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(embedding[:, order])
    head = model.get_output_embeddings().weight
    if head is not embedding:
        head.copy_(head[:, order])
    norms = [
        decoder.norm,
        *(norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)),
    ]
    for norm in norms:
        norm.weight.copy_(norm.weight[order])
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        inner = torch.randperm(mlp.gate_proj.out_features, generator=generator)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight.copy_(linear.weight[:, order])
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.copy_(linear.weight[inner][:, order])
        attention.o_proj.weight.copy_(attention.o_proj.weight[order])
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[order][:, inner])


@torch.no_grad()
def next_logprobs(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Log-softmax [B, T - 1, V] of every next token."""
    return torch.log_softmax(model(ids_BT, use_cache=False).logits[:, :-1].float(), dim=-1)


def text_rows(model: str, path: Path, device: str) -> Tensor:
    """Up to four rows of 512 tokens (one, if the text is shorter)."""
    ids = torch.tensor(load_tokenizer(model)(path.read_text()).input_ids[:2048], device=device)
    return ids.view(1, -1) if len(ids) < 512 else ids[: len(ids) // 512 * 512].view(-1, 512)


def kl(reference: Tensor, logprobs: Tensor) -> float:
    """KL(reference || quantised) in nats per token."""
    return float((reference.exp() * (reference - logprobs)).sum(-1).mean())


class Questions:
    """Prompts with their answers as one padded batch."""

    def __init__(self, model: str, task: str, limit: int, device: str) -> None:
        tokenizer, chosen = load_tokenizer(model), getattr(tasks, task)()
        problems = [*chosen.heldout_problems(), *chosen.train_problems()][:limit]
        # SmolLM2 was shown answers after a blank and ended by a line; the embedded policy ends with its EOS token.
        lines = "\n" in problems[0].prompt
        texts = [p.prompt + (f" {p.answer}\n" if lines else f"{p.answer}") for p in problems]
        ends = [] if lines else [tokenizer.eos_token_id]
        rows = [tokenizer(text).input_ids + ends for text in texts]
        begins = [len(tokenizer(p.prompt).input_ids) for p in problems]
        width = max(map(len, rows))
        self.ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        position = torch.arange(1, width, device=device)
        length = torch.tensor([len(row) for row in rows], device=device).unsqueeze(1)
        begin = torch.tensor(begins, device=device).unsqueeze(1)
        self.answer = (position < length) & (position >= begin)

    def right(self, model: PreTrainedModel) -> float:
        """Mean probability of the right answer, its end included."""
        of_token = next_logprobs(model, self.ids).gather(-1, self.ids[:, 1:, None]).squeeze(-1)
        return float(of_token.where(self.answer, 0.0).sum(1).exp().mean())


def measure(
    args: argparse.Namespace, questions: Questions, text: Tensor, seed: int
) -> Iterator[dict[str, float | int | str]]:
    """One row per arm."""
    plain = load_policy(args.model, QuantRecipe(), dtype=torch.float32).to(args.device)
    reorder(plain, seed)
    reference = next_logprobs(plain, text)
    for arm, (recipe, weights, activations) in ARMS.items():
        policy = load_policy(args.model, recipe, dtype=torch.float32).to(args.device)
        reorder(policy, seed)
        for group in policy.trace_qat.groups:
            group.weights, group.activations = weights, activations
        gap = kl(reference, next_logprobs(policy, text))
        yield {"order": seed, "arm": arm, "right": questions.right(policy), "kl": gap}


def table(rows: list[dict[str, float | int | str]]) -> str:
    """Markdown: means over orders, their spread, and paired differences from the shipped rule of the same format."""
    lines = ["| arm | right | spread over orders | minus shipped | KL | minus shipped |", "|---|---|---|---|---|---|"]
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    for arm, own in by_arm.items():
        shipped = by_arm[f"{arm.split(',')[0]}, powers of two"]
        cells = [arm, f"{_mean(own, 'right'):.3f}", f"{_spread([row['right'] for row in own]):.3f}"]
        for name in ("right", "kl"):
            gaps = [mine[name] - theirs[name] for mine, theirs in zip(own, shipped, strict=True)]
            error = _spread(gaps) / math.sqrt(len(gaps))
            cells += [f"{_mean(own, 'kl'):.3f}"] if name == "kl" else []
            cells.append("-" if own is shipped else f"{statistics.fmean(gaps):+.4f} ± {error:.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(rows: list[dict[str, float | int | str]], name: str) -> float:
    return statistics.fmean(float(row[name]) for row in rows)


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny-qwen3")
    parser.add_argument("--task", default="TwoDigitAddition", help="a task of trace_lightning.tasks")
    parser.add_argument("--text", type=Path, required=True, help="a file whose tokens the divergence is taken over")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--orders", type=int, default=4, help="at least 2, or there is no spread")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bar()
    questions = Questions(args.model, args.task, args.questions, args.device)
    text = text_rows(args.model, args.text, args.device)
    rows: list[dict[str, float | int | str]] = []
    for seed in range(args.orders):
        rows += measure(args, questions, text, seed)
        print(
            f"order {seed}", *(f"{row['arm']}: {row['right']:.3f}" for row in rows[-len(ARMS) :]), sep="  ", flush=True
        )
        if args.json:
            content = {"model": args.model, "task": args.task, "questions": args.questions, "rows": rows}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
