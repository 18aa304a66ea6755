"""Make the packaged tiny Qwen3: supervised two-digit addition from demonstrations that are wrong half of the time.

    python examples/pretrain_tiny.py                 about a minute on one CPU core
    python examples/pretrain_tiny.py --steps 20 --out /tmp/tiny

The noise is the point. In half of the demonstrations one digit of the answer is replaced by a wrong one, drawn afresh
every time, so supervised training cannot pass 50 to 60 % sampled accuracy at temperature 1 although the skill is
there: greedy decoding is right on nearly all held-out questions. That gap is what reinforcement learning closes, from
every seed. Clean demonstrations stopped early give the same sampled accuracy without the skill; RL then crawls.

700 steps end at 47 % sampled and 98 % greedy; 600 give 41 / 96, 800 give 49 / 100 and 1000 give 54 / 100.

Prints sampled and greedy accuracy on the 512 held-out questions of `TwoDigitAddition`, with the saved BF16 weights.
The result is the same on every run with one thread on one kind of CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

import trace_lightning
from trace_lightning.models.tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from trace_lightning.tasks import TwoDigitAddition
from trace_lightning.types import Problem

PROMPT_LENGTH = 6  # "12+34="
ANSWER_LENGTH = 4  # three digits and the EOS token
IGNORE = -100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(trace_lightning.__file__).parent / "assets" / "tiny_qwen3")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--noise", type=float, default=0.5, help="share of demonstrations with one wrong digit")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def demonstration(problem: Problem, noise: float, rng: random.Random) -> str:
    """The prompt and its answer, with one random digit replaced by another with probability `noise`."""
    answer = problem.answer
    if rng.random() < noise:
        place = rng.randrange(len(answer))
        wrong = rng.choice([digit for digit in "0123456789" if digit != answer[place]])
        answer = answer[:place] + wrong + answer[place + 1 :]
    return problem.prompt + answer


def make_batch(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, int64 [B, prompt + answer]; only the answer and its EOS carry loss."""
    ids = torch.full((len(texts), PROMPT_LENGTH + ANSWER_LENGTH), PAD_ID)
    labels = torch.full_like(ids, IGNORE)
    for row, encoded in enumerate(tokenizer(texts)["input_ids"]):
        tokens = torch.tensor([*encoded, EOS_ID])
        ids[row, : len(tokens)] = tokens
        labels[row, PROMPT_LENGTH : len(tokens)] = tokens[PROMPT_LENGTH:]
    return ids, labels


def train(model: Qwen3ForCausalLM, problems: list[Problem], args: argparse.Namespace) -> None:
    """AdamW with 50 warm-up steps, a constant rate, and a linear decay over the last tenth."""
    rng = random.Random(args.seed)
    tokenizer = tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    for step in range(args.steps):
        rate = args.lr * min(1.0, (step + 1) / 50, 10 * (args.steps - step) / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = [demonstration(problem, args.noise, rng) for problem in rng.choices(problems, k=args.batch_size)]
        ids, labels = make_batch(batch, tokenizer)
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, task: TwoDigitAddition, *, sampled: bool, seed: int = 0) -> float:
    """Share of held-out questions answered exactly, by four samples each at temperature 1 or by greedy decoding."""
    tokenizer = tiny_tokenizer()
    problems = list(task.heldout_problems()) * (4 if sampled else 1)
    prompts = torch.tensor([tokenizer.encode(problem.prompt) for problem in problems])
    torch.manual_seed(seed)
    tokens = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER_LENGTH,
        **({"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}),
    )
    texts = tokenizer.batch_decode(tokens[:, PROMPT_LENGTH:], skip_special_tokens=True)
    (reward,) = task.rewards()
    return sum(reward(text, problem) for text, problem in zip(texts, problems, strict=True)) / len(problems)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    task = TwoDigitAddition()
    model = tiny_model(args.seed)
    train(model, list(task.train_problems()), args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # save_pretrained leaves it readable by the owner only
    tiny_tokenizer().save_pretrained(args.out)
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    for label, sampled in (("sampled", True), ("greedy", False)):
        print(f"held-out accuracy, {label}: {accuracy(saved, task, sampled=sampled):.3f}")
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
