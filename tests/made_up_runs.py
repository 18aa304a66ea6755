"""Made-up runs of any size; `python tests/made_up_runs.py FOLDER`: 10,000 steps and 100,000 completions."""

from __future__ import annotations

import csv
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

DLOGP = "sampling/sampling_logp_difference"
SPIKE = 0.75  # share of the run after which one step has a huge mismatch
WORDS = ["so", "we", "add", "the", "carry", "is", "one", ",", "which", "leaves", "ten", "times", "two", ";", "÷"]
WORDS += ["答案", "是", "<b>x</b>", "</script>", "\n"]


def metrics_row(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    progress = step / max(1, steps)
    mismatch = math.exp(rng.gauss(-4.5, 0.3)) + (2.0 if step == int(SPIKE * steps) else 0.0)
    seconds = {"sync": 0.1, "rollout": 2 + progress, "reward": 0.2, "train": 1.5 + rng.random() * 0.2}
    return {
        "step": step,
        "reward": 1 - math.exp(-3 * progress) + rng.gauss(0, 0.05),
        f"{DLOGP}/mean": mismatch,
        f"{DLOGP}/max": 20 * mismatch,
        "rollout_corr/k3_kl": mismatch**2,
        "rollout_corr/ess": 1 - min(0.9, mismatch),
        "guidance/code_mismatch_before": 0.02 * rng.random(),
        "guidance/code_mismatch_after": 0.0005 * rng.random() * (step % 3 > 0),
        "entropy": 0.2 + math.exp(-2 * progress),
        "completions/mean_length": 200 + 300 * progress + rng.gauss(0, 10),
        "completions/max_length": 900 + rng.gauss(0, 50),
        "grad_norm": math.exp(rng.gauss(0, 0.3)),
        "learning_rate": 1e-5 * (1 - progress),
        "num_tokens": 50_000,
        "policy_version": step,
        "throughput/rollout_tokens_per_s": 50_000 / seconds["rollout"],
        "throughput/step_tokens_per_s": 50_000 / sum(seconds.values()),
        **{f"timing/{name}_s": value for name, value in seconds.items()},
        "timing/step_s": sum(seconds.values()),
        **{f"rewards/part_{i}/mean": rng.random() for i in range(40)},
    }


def completion_line(step: int, split: str, tokens: int, rng: random.Random, *, turns: bool = False) -> dict[str, Any]:
    pieces = [[f" {rng.choice(WORDS)}", round(-rng.expovariate(2), 4)] for _ in range(tokens)]
    text, reward = "".join(piece for piece, _ in pieces), round(rng.random(), 3)
    line = {
        "step": step,
        "split": split,
        "reward": reward,
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"What is {rng.randrange(100)} + {rng.randrange(100)}?"},
        ],
        "completion": text,
        "rewards": {"exact_match": reward},
        "reasons": {},
        "finish_reason": "stop",
        "policy_version": step,
        "num_tokens": tokens,
        "mean_logprob": sum(logprob for _, logprob in pieces) / max(1, tokens),
    }
    if not turns:
        return line | {"tokens": pieces}
    half = tokens // 2
    return line | {
        "turns": [
            {"source": "policy", "text": "".join(p for p, _ in pieces[:half]), "reward": 0.0, "tokens": pieces[:half]},
            {"source": "environment", "text": "The calculator says 42.", "reward": None},
            {
                "source": "policy",
                "text": "".join(p for p, _ in pieces[half:]),
                "reward": reward,
                "tokens": pieces[half:],
            },
        ]
    }


def write_run(folder: Path, *, steps: int = 20, completions: int = 100, tokens: int = 12, turns: bool = False) -> Path:
    """A finished run: metrics.csv with a validation every tenth of it, completions.jsonl, run.json."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [metrics_row(step, steps, rng) for step in range(steps)]
    interval = max(1, steps // 10)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "heldout/reward", "heldout/mean_length"])
        writer.writeheader()
        for step, row in enumerate(rows):
            if step % interval == 0:
                writer.writerow({"step": step, "heldout/reward": row["reward"], "heldout/mean_length": 300})
            writer.writerow(row)
    per_rollout = max(1, completions // steps)
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as file:
        for number in range(completions):
            step = number // per_rollout
            split = "heldout" if step % interval == 0 and number % per_rollout < per_rollout // 3 else "train"
            line = completion_line(step, split, tokens, rng, turns=turns)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    facts = {"status": "finished", "command": "trace-fit fit", "model": "made-up", "versions": {"device": "none"}}
    (folder / "run.json").write_text(json.dumps(facts | {"seconds": 3.8 * steps, "updated": 1.8e9}))
    return folder


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), steps=10_000, completions=100_000, tokens=120, turns=len(sys.argv) > 2)
