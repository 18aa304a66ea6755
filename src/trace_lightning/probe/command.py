"""The command line of `trace-fit probe`: options over what a config of `fit` says, checked, then measured."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.bench.machine import device_name
from trace_lightning.bench.measure import random_prompts
from trace_lightning.bench.shapes import SHAPES, NoTokenizer, lookup, make_model, read_shape
from trace_lightning.data import encode
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.probe import report
from trace_lightning.probe.agreement import off_grid
from trace_lightning.probe.cells import headline
from trace_lightning.probe.plan import (
    ProbePlan,
    ProbeSettings,
    as_problems,
    check_formats,
    choose_formats,
    trajectory_sampling,
)
from trace_lightning.probe.run import ProbeResult, run_probe
from trace_lightning.probe.store import PartStore, digest, model_state
from trace_lightning.probe.study import Study
from trace_lightning.quantization.qat import install_qat
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.base import RolloutEngine
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.rewarding import Scorer
from trace_lightning.suggestions import did_you_mean, vocabulary
from trace_lightning.tasks import FunctionReward, RewardFn, Task, TwoDigitAddition
from trace_lightning.types import Problem, Prompt, SamplingParams
from trace_lightning.version import __version__

_WIDTH = 170  # of tables that go to a file
_BUILTIN = "builtin:tiny-qwen3"
_FROM_CONFIG = (
    *("model.path", "model.attention", "data.task", "recipe"),
    *(f"rollout.{name}" for name in ("engine", "sampling", "eval_sampling", "rewards", "reward_weights")),
    *("rollout.reward_workers", "rollout.reward_time_limit"),
)
_NO_LIMIT = 2**31
_NOT_IN_KEY = ("config", "out", "formats", "target", "parts", "recipe")  # the values of `config` are among the others
_RANDOM_PROMPT = 64  # tokens of the prompts of a shape with random weights


class _Parser(ArgumentParser):  # type: ignore[misc]
    """Bad input ends as a ValueError, which `trace-fit` tells in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        near = did_you_mean(message, vocabulary(self, (Task, RewardFn, RolloutEngine)))
        hint = f". Did you mean: {', '.join(near)}?" if near else ""
        raise ValueError(f"{message}{hint} (trace-fit probe --help lists all options)") from ex


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="trace-fit probe",
        description="Measure before moving to FP4: trainer against rollout, long answers, layers, speed; a verdict.",
    )
    parser.add_argument(
        "--config", action="append", help="a config of `trace-fit fit`; its model, task, recipe, sampling"
    )
    parser.add_argument("--model.path", type=str, default=_BUILTIN, help="as in `fit`")
    parser.add_argument("--model.attention", type=str, default="sdpa", help="as in `fit`")
    parser.add_argument("--shape", type=str | None, default=None, help=f"random weights instead: {', '.join(SHAPES)}")
    parser.add_argument("--device", type=str | None, default=None, help="default: a GPU if there is one")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/probe"), help="folder of the report; finished parts are kept"
    )
    parser.add_class_arguments(ProbeSettings)
    parser.add_class_arguments(QuantRecipe, "recipe")
    parser.add_argument(
        "--data.task", type=Task | None, default=None, help="prompts and rewards (default: two-digit sums)"
    )
    parser.add_argument("--rollout.engine", type=RolloutEngine | None, default=None, help="the engine under test")
    parser.add_argument("--rollout.sampling", type=SamplingParams, default=SamplingParams(), help="as in training")
    parser.add_argument(
        "--rollout.eval_sampling", type=SamplingParams | None, default=None, help="of held-out problems"
    )
    parser.add_argument(
        "--rollout.rewards",
        type=list[RewardFn | Callable[[str, Problem], float | None]] | None,
        default=None,
        help="default: the task's",
    )
    parser.add_argument("--rollout.reward_weights", type=list[float] | None, default=None, help="one per reward")
    parser.add_argument("--rollout.reward_workers", type=int | None, default=None, help="as in `fit`")
    parser.add_argument("--rollout.reward_time_limit", type=float, default=10.0, help="seconds per reward call")
    return parser


def read_configs(paths: list[str]) -> dict[str, Any]:
    """What configs of `fit` say that a probe reads, later ones over earlier ones.

    Raises:
        ValueError: no such file, or no mapping in it.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"--config: there is no file {path}")
        content = yaml.safe_load(Path(path).read_text())
        if not isinstance(content, dict):
            raise ValueError(f"--config: {path} holds no settings")
        for dotted in _FROM_CONFIG:
            value: Any = content
            for key in dotted.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                merged[dotted] = value
    return _nested(merged)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, leaf = dotted.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def _parse(arguments: list[str]) -> tuple[Namespace, dict[str, Any]]:
    """The options as objects, and as plain values."""
    parser = _parser()
    paths = [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word == "--config"]
    paths += [word.partition("=")[2] for word in arguments if word.startswith("--config=")]
    found = parser.parse_object(read_configs(paths)) if paths else None
    parsed: Namespace = parser.parse_args(arguments, namespace=found)
    return parser.instantiate_classes(parsed), yaml.safe_load(parser.dump(parsed))


def _key(settings: dict[str, Any], folder: Path | None, device: torch.device) -> str:
    """Digest of what every part depends on; formats are left out, since each part names its own."""
    own = {name: value for name, value in settings.items() if name not in _NOT_IN_KEY}
    versions = [__version__, torch.__version__, transformers.__version__]
    return digest([own, model_state(folder), versions, device_name(device)])


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    use_gpu = torch.cuda.is_available() and name != "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def _prompts(problems: list[Problem], tokenizer: PreTrainedTokenizerBase, sign: int) -> list[Prompt]:
    return [
        Prompt(token_ids=encode(problem, tokenizer), problem=problem, uid=uid if sign > 0 else -uid - 1)
        for uid, problem in enumerate(problems)
    ]


def make_plan(parsed: Namespace, tokenizer: Any, config: Any, device: torch.device) -> tuple[ProbePlan, Scorer | None]:
    """Check everything, and tokenise.

    Raises:
        ValueError: formats, prompts, lengths or rewards that cannot be probed.
    """
    settings = ProbeSettings(**{name: parsed[name] for name in ProbeSettings.__dataclass_fields__})
    formats, target = choose_formats(settings, parsed.recipe)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    check_formats(formats, device, head_dim)
    task: Task | None = parsed.data.task
    if task is None and parsed.shape is None and not settings.prompt and parsed.model.path == _BUILTIN:
        task = TwoDigitAddition()
    if task is not None and task.has_environments:
        raise ValueError(
            f"{type(task).__name__} has environments, and the probe draws answers of a single turn: give another "
            "--data.task, or texts by --prompt"
        )
    if parsed.shape is not None:
        prompts = random_prompts(settings.num_prompts, _RANDOM_PROMPT, config.vocab_size, settings.seed)
    elif settings.texts:
        prompts = _prompts(as_problems(settings.texts, bool(tokenizer.chat_template)), tokenizer, 1)
    elif task is not None:
        prompts = _prompts(list(task.train_problems())[: settings.num_prompts], tokenizer, 1)
    else:
        raise ValueError("no prompts: give --config with a data.task, --data.task, or texts by --prompt")
    if not prompts:
        raise ValueError(f"{type(task).__name__} has no training problems to start from: give texts by --prompt")
    heldout = [] if task is None else _prompts(list(task.heldout_problems())[: settings.heldout], tokenizer, -1)
    context = getattr(config, "max_position_embeddings", None) or _NO_LIMIT
    room = context - max(len(prompt.token_ids) for prompt in prompts)
    sampling = trajectory_sampling(settings, parsed.rollout.sampling, room, device)
    evaluation = parsed.rollout.eval_sampling or replace(parsed.rollout.sampling, record_logprobs=0)
    left = context - max((len(prompt.token_ids) for prompt in heldout), default=0)
    if left < 1:
        raise ValueError(f"a held-out prompt has {context - left} tokens, the model's context {context}: shorten it")
    evaluation = replace(evaluation, max_new_tokens=min(evaluation.max_new_tokens, left), seed=settings.seed)
    scorer = _scorer(parsed, task) if heldout else None
    plan = ProbePlan(
        model=parsed.model.path if parsed.shape is None else f"{parsed.shape}, random weights",
        settings=settings,
        formats=formats,
        target=target,
        prompts=prompts,
        heldout=heldout,
        sampling=sampling,
        eval_sampling=evaluation,
    )
    return plan, scorer


def _scorer(parsed: Namespace, task: Task | None) -> Scorer:
    given = parsed.rollout.rewards
    rewards = list(task.rewards()) if given is None and task is not None else list(given or [])
    functions = [reward if isinstance(reward, RewardFn) else FunctionReward(reward) for reward in rewards]
    settings = parsed.rollout
    return Scorer(functions, settings.reward_weights, settings.reward_workers, settings.reward_time_limit)


def _load(parsed: Namespace, device: torch.device, seed: int) -> PreTrainedModel:
    if parsed.shape is None:
        policy = load_policy(parsed.model.path, QuantRecipe(), dtype=torch.float32, attention=parsed.model.attention)
        return off_grid(policy, seed).to(device).eval()  # type: ignore[arg-type]
    policy = make_model(read_shape(parsed.shape, None), None, device, seed).float()
    install_qat(policy, QuantRecipe(), attention=parsed.model.attention)
    return off_grid(policy, seed).eval()


def main(arguments: list[str]) -> int:
    """Parse, check, measure, print and write; returns the exit code of the verdict.

    Raises:
        ValueError: bad input, before anything is drawn.
    """
    parsed, settings = _parse(arguments)
    device = _device(parsed.device)
    if parsed.shape is not None:
        shape = read_shape(lookup("shape", parsed.shape, SHAPES), None)
        config: Any = transformers.Qwen3Config(
            head_dim=shape.head_dim, max_position_embeddings=shape.max_positions, vocab_size=shape.vocab
        )
        tokenizer: Any = NoTokenizer()
        tokenizer.pad_token_id = 0
        folder = None
    else:
        folder = resolve_model_path(parsed.model.path)
        config, tokenizer = AutoConfig.from_pretrained(folder), load_tokenizer(parsed.model.path)
    plan, scorer = make_plan(parsed, tokenizer, config, device)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    study = Study(
        plan=plan,
        source=_load(parsed, device, plan.settings.seed),
        tokenizer=tokenizer,
        engine=parsed.rollout.engine or LocalEngine(),
        scorer=scorer,
        attention=parsed.model.attention,
    )
    try:
        result = _with_progress(study, PartStore(parsed.out, _key(settings, folder, device)), console)
    finally:
        if scorer is not None:
            scorer.close()
    command = shlex.join(["trace-fit", "probe", *arguments])
    report.write(result, parsed.out, command)
    _say(result, parsed.out, console)
    return result.verdict.exit_code


def _with_progress(study: Study, store: PartStore, console: Console) -> ProbeResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        whole = progress.add_task("probe", total=None)
        drawing = progress.add_task("", total=None, visible=False)

        def announce(part: str, number: int, total: int) -> None:
            progress.update(whole, description=part, completed=number, total=total)
            progress.update(drawing, visible=False)
            if not console.is_terminal:
                console.print(f"probe: {part} ({number + 1} of {total})", highlight=False)

        def drawn(done: int, total: int) -> None:
            progress.update(drawing, description="answers", completed=done, total=total, visible=True)

        study.progress = drawn
        try:
            return run_probe(study, store, announce)
        except KeyboardInterrupt:
            console.print(f"stopped; finished parts are in {store.folder}: the same command goes on from there")
            raise


def _say(result: ProbeResult, folder: Path, console: Console) -> None:
    for table in report.tables(result):
        console.print(table)
    for finding in result.verdict.findings:
        console.print(f"{finding.severity}: {finding.text}", highlight=False)
        if finding.way_out:
            console.print(f"      {finding.way_out}", style="dim", highlight=False)
    console.print("\nrecipe to paste:", highlight=False)
    console.print(result.recipe["yaml"], highlight=False)
    if result.recipe["changed"]:
        console.print(f"it differs from what was probed: probe again with --config {folder / 'recipe.yaml'}\n")
    if result.reused:
        console.print(f"{len(result.reused)} parts were measured before and read from {folder / 'parts'}", style="dim")
    console.print(headline(result), style="bold", highlight=False)
    for reason in result.verdict.reasons:
        console.print(f"  {reason}", highlight=False)
    console.print(f"written: {folder / 'report.html'}, probe.json, recipe.yaml, plots/")
