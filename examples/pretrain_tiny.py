"""Make the packaged tiny Qwen3s, from demonstrations that are wrong half of the time, or do not use the tool.

    python examples/pretrain_tiny.py                 two-digit addition; about a minute on one CPU core
    python examples/pretrain_tiny.py --task tools    products with a calculator
    python examples/pretrain_tiny.py --steps 20 --out /tmp/tiny

Addition: the noise is the point. In half of the demonstrations one digit of the answer is replaced by a wrong one,
drawn afresh every time, so supervised training cannot pass 50 to 60 % sampled accuracy at temperature 1 although the
skill is there: greedy decoding is right on nearly all held-out questions. That gap is what reinforcement learning
closes, from every seed. Clean demonstrations stopped early give the same sampled accuracy without the skill; RL then
crawls.

Tools: three of four demonstrations answer by heart, which this model cannot do, and the others call the calculator of
`CalculatorProducts`, a third of these with a wrong digit in the call. What a tool is good for is left to be found out.

700 steps of addition end at 46 % sampled and 98 % greedy; 600 give 41 / 96, 800 give 49 / 100 and 1000 give 54 / 100.

Prints sampled and greedy accuracy on the 512 held-out questions of the task, with the saved BF16 weights.
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
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.conversation import Conversations
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.rewarding import Scorer
from trace_lightning.tasks import Calculator, CalculatorProducts, Task, TwoDigitAddition
from trace_lightning.types import Problem, Prompt, SamplingParams, TurnLimits

IGNORE = -100
Demonstration = list[tuple[str, bool]]  # texts, and whether they are the policy's


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["addition", "tools"], default="addition")
    parser.add_argument("--out", type=Path, help="default: the package's own folder")
    parser.add_argument("--steps", type=int, help="default: 700 of addition, 1500 of tools")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--noise", type=float, help="share of sums, or of calls, with one wrong digit")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def with_noise(text: str, noise: float, rng: random.Random) -> str:
    """One random digit replaced by another with probability `noise`."""
    if rng.random() < noise:
        place = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
        text = text[:place] + rng.choice([d for d in "0123456789" if d != text[place]]) + text[place + 1 :]
    return text


class Addition:
    """Sums, half of them wrong."""

    task, steps, noise, asset = TwoDigitAddition, 700, 0.5, "tiny_qwen3"

    @staticmethod
    def demonstrate(problem: Problem, noise: float, rng: random.Random) -> Demonstration:
        return [(str(problem.prompt), False), (with_noise(problem.answer, noise, rng), True)]


class Tools:
    """Products: most by heart, some by a call, and a third of the calls wrong."""

    task, steps, noise, asset = CalculatorProducts, 1500, 0.33, "tiny_qwen3_tools"
    by_heart = 0.75

    @classmethod
    def demonstrate(cls, problem: Problem, noise: float, rng: random.Random) -> Demonstration:
        prompt = str(problem.prompt)
        if rng.random() < cls.by_heart:
            return [(prompt, False), (problem.answer, True)]
        call = f"<{with_noise(prompt.rstrip('?'), noise, rng)}>"
        said = Calculator().step(call).observation
        return [(prompt, False), (call, True), (said, False), (said.strip(), True)]


KINDS = {"addition": Addition, "tools": Tools}


def make_batch(
    demonstrations: list[Demonstration], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, int64 [B, longest]; only the policy's own texts and the EOS carry loss."""
    rows = []
    for parts in demonstrations:
        encoded = [(tokenizer(text)["input_ids"], own) for text, own in parts]
        ids = [i for part, _ in encoded for i in part]
        labels = [i if own else IGNORE for part, own in encoded for i in part]
        rows.append(([*ids, EOS_ID], [*labels, EOS_ID]))
    longest = max(len(ids) for ids, _ in rows)
    inputs = torch.full((len(rows), longest), PAD_ID)
    targets = torch.full_like(inputs, IGNORE)
    for row, (ids, labels) in enumerate(rows):
        inputs[row, : len(ids)], targets[row, : len(ids)] = torch.tensor(ids), torch.tensor(labels)
    return inputs, targets


def train(model: Qwen3ForCausalLM, kind: type[Addition] | type[Tools], args: argparse.Namespace) -> None:
    """AdamW with 50 warm-up steps, a constant rate, and a linear decay over the last tenth."""
    rng = random.Random(args.seed)
    problems, tokenizer = list(kind.task().train_problems()), tiny_tokenizer()
    steps = args.steps or kind.steps
    noise = kind.noise if args.noise is None else args.noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    for step in range(steps):
        rate = args.lr * min(1.0, (step + 1) / 50, 10 * (steps - step) / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = [kind.demonstrate(problem, noise, rng) for problem in rng.choices(problems, k=args.batch_size)]
        ids, labels = make_batch(batch, tokenizer)
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)


def accuracy(model: Qwen3ForCausalLM, task: Task, *, sampled: bool, seed: int = 0) -> float:
    """Share of held-out questions answered exactly, by four samples each at temperature 1 or by greedy decoding."""
    tokenizer, engine = tiny_tokenizer(), LocalEngine()
    engine.setup(model, tokenizer, QuantRecipe(), dtype=torch.float32)
    engine.load_weights(model.named_parameters(), version=0)
    problems = list(task.heldout_problems())
    prompts = [
        Prompt(token_ids=tokenizer.encode(problem.prompt), problem=problem, uid=uid)
        for uid, problem in enumerate(problems)
    ]
    talk = Conversations(task, tokenizer, TurnLimits(max_turns=3, max_total_tokens=32))
    samples, temperature = (4, 1.0) if sampled else (1, 0.0)
    params = SamplingParams(temperature=temperature, max_new_tokens=12, stop=[">"], seed=seed)
    conversations = {"conversations": talk} if task.has_environments else {}
    drawn = engine.generate(prompts, params, num_samples=samples, **conversations)
    rewards, _, _ = Scorer(task.rewards())(drawn.completions, [problem for problem in problems for _ in range(samples)])
    return rewards.mean().item()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    kind = KINDS[args.task]
    out = args.out or Path(trace_lightning.__file__).parent / "assets" / kind.asset
    model = tiny_model(args.seed)
    train(model, kind, args)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # save_pretrained leaves it readable by the owner only
    tiny_tokenizer().save_pretrained(out)
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for label, sampled in (("sampled", True), ("greedy", False)):
        print(f"held-out accuracy, {label}: {accuracy(saved, kind.task(), sampled=sampled):.3f}")
    print(f"saved to {out}")


if __name__ == "__main__":
    main()
