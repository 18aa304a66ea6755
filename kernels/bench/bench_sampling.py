"""Sampling from a vocabulary of 151,936 against the copy bandwidth and against torch.

    python kernels/bench/bench_sampling.py [--json PATH]

Logits rotate over four tensors, 156 MB at 64 rows of FP32, so that they come from memory.
"""

from __future__ import annotations

from typing import Any

import torch
from timing import Report, copy_bandwidth, graph_time
from torch import Tensor

from trace_kernels.sampling import sample_tokens, sample_tokens_reference

VOCABULARY, TENSORS = 151_936, 4
TRUNCATED = {"top_k": 50, "top_p": 0.95}


def inputs(rows: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Logits in rotation, and the counters and the seed."""
    logits = [(2 * torch.randn(rows, VOCABULARY, device="cuda")).to(dtype) for _ in range(TENSORS)]
    counter = torch.arange(rows, device="cuda")
    return logits, [counter, counter, counter, torch.zeros(1, dtype=torch.int64, device="cuda")]


def check(logits: Tensor, counters: list[Tensor], words: dict[str, Any]) -> None:
    """The reference's tokens, but for one row in 64 whose number may fall between two roundings."""
    tokens, logprobs = sample_tokens(logits, *counters, **words)
    full = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | words
    expected, torch_logprobs = sample_tokens_reference(logits, *counters, *full.values())
    same = tokens == expected
    assert (~same).sum() <= 1 + len(tokens) // 64, "tokens differ"
    assert (logprobs - torch_logprobs)[same].abs().max() < 1e-4, "log-probs differ"


def seconds_per_call(logits: list[Tensor], counters: list[Tensor], words: dict[str, Any]) -> float:
    """Of the operator, one row tensor after another."""
    return graph_time(lambda: [sample_tokens(x, *counters, **words) for x in logits]) / len(logits)


def torch_seconds(logits: list[Tensor], words: dict[str, Any]) -> float:
    """Softmax and multinomial; with truncation the usual sort, masks and renormalisation before it."""

    def draw(x: Tensor) -> Tensor:
        if words:
            values, order = x.topk(words["top_k"], dim=-1)
            probs = values.float().softmax(-1)
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= words["top_p"], 0.0)
            return order.gather(-1, probs.multinomial(1))
        return x.float().softmax(-1).multinomial(1)

    return graph_time(lambda: [draw(x) for x in logits]) / len(logits)


def main() -> None:
    """Check, then measure."""
    torch.manual_seed(0)
    report = Report(__doc__.splitlines()[0])
    for dtype, word in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for rows in (64, 256):
            logits, counters = inputs(rows, dtype)
            name = f"sampling {rows} x {VOCABULARY} {word}"
            for words, kind in (({}, ""), (TRUNCATED, ", top-k 50 and top-p 0.95")):
                check(logits[0], counters, words)
                ours = seconds_per_call(logits, counters, words)
                if not words:
                    report.add(f"{name}, share of copy bandwidth", logits[0].nbytes / ours / copy_bandwidth(), "")
                report.add(f"{name}{kind}, speed against torch", torch_seconds(logits, words) / ours, "x")
            del logits
    report.save()


if __name__ == "__main__":
    main()
