"""The command line of `trace-fit bench`."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trace_lightning.bench.baselines import BASELINES
from trace_lightning.bench.report import tables, write_json
from trace_lightning.bench.roofline import FORMATS
from trace_lightning.bench.runner import BenchOptions, run_bench
from trace_lightning.bench.shapes import SHAPES

log = logging.getLogger(__name__)

_WIDTH = 150  # of tables that go to a file
_GPU: dict[str, Any] = {"shape": "qwen3-1.7b"}
_CPU: dict[str, Any] = {"shape": "tiny", "batch": (4,), "context": (64,), "new_tokens": 16, "prompts": 4}
_CPU |= {"prompt_length": 16, "baseline_new_tokens": 8}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trace-fit bench",
        description="Time rollouts: decode steps, prefill, weight sync, and transformers beside them.",
        epilog="On a CPU the defaults are the shape `tiny` and small sizes.",
        argument_default=argparse.SUPPRESS,
    )
    many: dict[str, Any] = {"nargs": "+", "metavar": "N", "type": int}
    parser.add_argument("--shape", help=f"{', '.join(SHAPES)}; random weights (default qwen3-1.7b)")
    parser.add_argument("--model.path", dest="path", help="a checkpoint instead of a shape")
    parser.add_argument("--formats", nargs="+", metavar="F", help=f"of {', '.join(FORMATS)}; ratios are to the first")
    parser.add_argument("--batch", help="sequences (default 64)", **many)
    parser.add_argument("--context", help="tokens in context (default 4096)", **many)
    parser.add_argument("--new_tokens", type=int, metavar="N", help="decode steps that are timed (default 64)")
    parser.add_argument("--samples", type=int, metavar="N", help="sequences per prompt (default 1)")
    parser.add_argument("--shared", type=int, metavar="N", help="prompt tokens that the samples share (default 0)")
    parser.add_argument(
        "--fill", action="store_true", help="as many sequences of each format as fit the cache of the first"
    )
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts of prefill and generate (default 64)")
    parser.add_argument("--prompt_length", type=int, metavar="N", help="their tokens (default 256)")
    parser.add_argument("--baselines", nargs="*", metavar="B", help=f"of {', '.join(BASELINES)} (default generate)")
    parser.add_argument("--baseline_new_tokens", type=int, metavar="N", help="tokens of generate (default 32)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--json", type=Path, default=Path("runs/bench.json"), help="default runs/bench.json")
    return parser


def main(arguments: list[str]) -> None:
    """Parse, measure, print and write.

    Raises:
        ValueError: options that cannot be measured.
    """
    parsed = vars(_parser().parse_args(arguments))
    path, device = parsed.pop("json"), _device(parsed.pop("device", None))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items()}
    if "path" in given:
        given.setdefault("shape", given["path"])
    defaults = _GPU if device.type == "cuda" else _CPU
    options = BenchOptions(**(defaults | {"device": device} | given))
    # Lines, not a spinner: its thread would take time from the host that is being timed.
    result = run_bench(options, lambda text: log.info("bench: %s", text))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in tables(result):
        console.print(table)
    write_json(result, shlex.join(["trace-fit", "bench", *arguments]), path)
    console.print(f"written: {path}")


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    use_gpu = torch.cuda.is_available() and name != "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
