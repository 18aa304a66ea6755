"""The command line of `trace-fit estimate`: options over what a config says, over the defaults of `Plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from trace_lightning.bench.roofline import FORMATS, find_format
from trace_lightning.bench.shapes import SHAPES, read_shape
from trace_lightning.estimate.cards import CARDS, find_card
from trace_lightning.estimate.ladder import ladder, ladder_table
from trace_lightning.estimate.plan import LORA_ROLLOUTS, PRECISIONS, REFERENCES, Plan
from trace_lightning.estimate.report import ASSUMPTIONS, as_json, facts, tables
from trace_lightning.models.lora import LoraConfig
from trace_lightning.recipe import FP4, GuidanceConfig, QuantRecipe

_WIDTH = 150  # of tables that go to a file
_CARD = ("memory_gb", "bandwidth_tbs", "bf16_tflops")
_FROM_CONFIG = {  # option -> where a config has it
    "path": "model.path",
    "precision": "trainer.precision",
    "gpus": "trainer.devices",
    "prompt_length": "data.max_prompt_length",
    "samples": "rollout.num_generations",
    "new_tokens": "rollout.sampling.max_new_tokens",
    **{name: f"model.{name}" for name in ("gradient_checkpointing", "max_tokens_per_microbatch")},
    **{name: f"model.{name}" for name in ("num_iterations", "num_minibatches")},
    **{name: f"rollout.engine.init_args.{name}" for name in ("memory_fraction", "max_num_seqs", "kv_cache_tokens")},
    **{name: f"rollout.engine.init_args.{name}" for name in ("page_size", "decode_window", "prefill_tokens")},
    **{f"lora_{name}": f"model.lora.{name}" for name in ("rank", "rollout")},
    "keep_snapshot": "rollout.engine.init_args.keep_snapshot",
    "max_version_diff": "rollout.max_version_diff",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trace-fit estimate",
        description="Memory and time of a training step, by arithmetic: nothing runs and nothing is downloaded.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--shape", help=f"{', '.join(SHAPES)} (default qwen3-8b)")
    parser.add_argument("--model.path", dest="path", help="a checkpoint instead of a shape; its config.json is read")
    parser.add_argument("--config", type=Path, help="take model, recipe, batch and settings from a config of `fit`")
    parser.add_argument("--recipe", nargs="+", metavar="R", help=f"of {', '.join(FORMATS)} (default w4a16kv4)")
    parser.add_argument(
        "--guidance", choices=["none", "syndrome", "parity", "full"], help="default parity, where A or KV are FP4"
    )
    parser.add_argument("--scales", choices=["whole", "parity"], help="how block scales are recorded")
    parser.add_argument("--store", choices=["device", "host"], help="where the guidance record is kept")
    parser.add_argument("--card", help=f"{', '.join(CARDS)} (default h200)")
    for name in _CARD:
        parser.add_argument(f"--{name}", type=float, metavar="X", help="of the card, as reached")
    numbers = {"prompts": "per step, on all GPUs", "samples": "sequences per prompt", "prompt_length": "tokens"}
    numbers |= {"new_tokens": "limit of a completion", "mean_new_tokens": "of a completion on average", "gpus": ""}
    numbers |= {"max_tokens_per_microbatch": "", "max_num_seqs": "", "num_iterations": "", "num_minibatches": ""}
    for name, text in numbers.items():
        text += f" (default {getattr(Plan, name) or 'the limit'})"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text.strip())
    parser.add_argument("--memory_fraction", type=float, metavar="X", help="of free memory for K and V (default 0.4)")
    parser.add_argument("--precision", help=f"{' or '.join(PRECISIONS)} (default {PRECISIONS[0]})")
    parser.add_argument("--reference", help=f"of a KL term: {', '.join(REFERENCES)} (default none)")
    parser.add_argument(
        "--lora_rank", type=int, metavar="N", help="adapters of this rank on all linears (default none)"
    )
    parser.add_argument("--lora_rollout", help=f"{' or '.join(LORA_ROLLOUTS)} (default {LORA_ROLLOUTS[0]})")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument(
        "--release_snapshot", dest="keep_snapshot", action="store_false", help="engine.keep_snapshot=false"
    )
    parser.add_argument("--sizes", type=float, nargs="+", metavar="GB", help="which shapes fit cards of this memory")
    parser.add_argument(
        "--max_version_diff", type=int, choices=[0, 1], help="1: draw while the trainer works (default 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    return parser


def read_config(path: Path) -> dict[str, Any]:
    """What a config of `trace-fit fit` says of a `Plan`, and its recipe; the defaults of `fit` elsewhere.

    Raises:
        ValueError: no such file, no mapping in it, or settings that the estimate cannot follow.
    """
    content = _load(path)

    def find(dotted: str) -> Any:
        value: Any = content
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    found = {name: value for name, dotted in _FROM_CONFIG.items() if (value := find(dotted)) is not None}
    if find("rollout.turns.max_total_tokens"):  # what a conversation takes, all turns and the environment's included
        found["new_tokens"] = find("rollout.turns.max_total_tokens")
    if isinstance(found.get("gpus"), list):
        found["gpus"] = len(found["gpus"])
    if not isinstance(found.setdefault("gpus", 1), int) or found["gpus"] < 1:
        found.pop("gpus")  # `auto`: whatever the machine has
    if find("model.loss.init_args.beta"):
        found["reference"] = find("model.reference.dtype") or "bf16"
    if find("model.lora") is not None:
        found.setdefault("lora_rank", LoraConfig().rank)
    found["prompts"] = (find("data.batch_size") or 16) * found.get("gpus", 1)
    found.setdefault("samples", 8)  # the defaults of Rollout and of SamplingParams
    found.setdefault("new_tokens", 256)
    recipe = content.get("recipe") or {}
    recipe = _load(Path(recipe)) if isinstance(recipe, str) else dict(recipe)
    try:
        guidance = GuidanceConfig(**recipe.pop("guidance", None) or {})
        return found | {"recipe": QuantRecipe(**recipe, guidance=guidance)}
    except TypeError as error:
        raise ValueError(f"--config: the recipe of {path} has an option that does not exist: {error}") from error


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config: there is no file {path}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"--config: {path} holds no settings")
    return content


def _recipes(names: list[str] | None, config: QuantRecipe | None, asked: dict[str, Any]) -> list[QuantRecipe]:
    """The recipes to estimate, guided as asked; named ones by parity where they can be, if nothing was asked."""
    mode = asked.pop("mode", None)
    found = [config] if names is None and config is not None else [find_format(name) for name in names or ["w4a16kv4"]]
    recipes = []
    for recipe in found:
        guidable = bool({recipe.activations, recipe.kv_cache} & set(FP4))
        chosen = mode or (recipe.guidance.mode if recipe is config else "parity" if guidable else "none")
        recipes.append(dataclasses.replace(recipe, guidance=dataclasses.replace(recipe.guidance, mode=chosen, **asked)))
    return recipes


def plans(arguments: list[str]) -> tuple[list[Plan], Path | None]:
    """The plans that the command line asks for, that of a BF16 rollout first; and where to write JSON.

    Raises:
        ValueError: anything unknown or out of range.
    """
    return _plans(vars(_parser().parse_args(arguments)))


def _plans(given: dict[str, Any]) -> tuple[list[Plan], Path | None]:
    config = read_config(given.pop("config")) if "config" in given else {}
    options = {"guidance": "mode", "scales": "scales", "store": "store"}
    asked = {name: given.pop(option) for option, name in options.items() if option in given}
    recipes = _recipes(given.pop("recipe", None), config.pop("recipe", None), asked)
    card = find_card(given.pop("card", "h200"), *(given.pop(name, None) for name in _CARD))
    path, shape_name = given.pop("json", None), given.pop("shape", None)
    if shape_name is not None:
        config.pop("path", None)
    settings = config | given
    checkpoint = settings.pop("path", None)
    model = checkpoint or shape_name or "qwen3-8b"
    plain = Plan(model=model, shape=read_shape(model, checkpoint), card=card, recipe=QuantRecipe(), **settings)
    return [plain, *(dataclasses.replace(plain, recipe=recipe) for recipe in recipes)], path


def main(arguments: list[str]) -> None:
    """Parse, reckon, print, and write JSON if asked to.

    Raises:
        ValueError: see `plans`.
    """
    given = vars(_parser().parse_args(arguments))
    sizes = given.pop("sizes", None)
    wanted, path = _plans(given)
    console, command = Console(width=None if sys.stdout.isatty() else _WIDTH), ["trace-fit", "estimate", *arguments]
    if sizes is not None:
        _print_ladders(console, wanted[1:], sizes, path, shlex.join(command))
        return
    columns = [facts(wanted[0], plan) for plan in wanted]
    for table in tables(wanted[0], columns):
        console.print(table)
    for column in columns[1:]:
        for sentence in column["advice"]:
            console.print(f"{column['recipe']}: {sentence}.", highlight=False)
    for plan in wanted[1:]:
        if plan.recipe.exclude or plan.recipe.bf16_layers:
            console.print(
                "recipe.exclude and recipe.bf16_layers: their linears and K/V are counted as quantised, except in the "
                "guidance record."
            )
    console.print(ASSUMPTIONS, style="dim", highlight=False)
    _write(console, path, as_json(wanted[0], columns, shlex.join(command)))


def _print_ladders(console: Console, wanted: list[Plan], sizes: list[float], path: Path | None, command: str) -> None:
    if min(sizes) <= 0:
        raise ValueError(f"--sizes {min(sizes):g}: give gigabytes above 0")
    found = {plan.recipe.label: ladder(plan, sizes) for plan in wanted}
    for plan in wanted:
        console.print(ladder_table(plan, found[plan.recipe.label]))
    console.print(ASSUMPTIONS, style="dim", highlight=False)
    _write(console, path, {"command": command, "recipes": found, "assumptions": ASSUMPTIONS})


def _write(console: Console, path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"written: {path}")
