"""What the pages say exists: metrics that a run logs, links and their anchors, files, options of the command line."""

from __future__ import annotations

import contextlib
import csv
import functools
import inspect
import io
import itertools
import re
import sys
from pathlib import Path

import pytest

from trace_lightning import callbacks
from trace_lightning.cli import COMPONENTS, main
from trace_lightning.models.lora import LoraConfig
from trace_lightning.strategy import FSDP2Strategy
from trace_lightning.types import TurnLimits

ROOT = Path(__file__).parent.parent
NOT_METRICS = {"step", "epoch"}
TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")) + TEXTS
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_OTHER_PROGRAMS = {
    *("check", "kill-on-bad-exit", "no-deps", "logdir"),  # ruff, srun, pip, tensorboard
    *("model-path", "quantization", "kv-cache-dtype", "enable-lora", "lora-modules"),  # SGLang, vLLM
}


def documented_keys() -> set[str]:
    """Keys of the table in docs/metrics.md, `{a,b}` and `<name>` spelled out as a pattern."""
    keys: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if not line.startswith("| `"):
            continue
        for key in re.findall(r"`([^`]+)`", line.split("|")[1]):
            parts = [part.split(",") for part in re.split(r"[{}]", key)]
            keys |= {"".join(choice) for choice in itertools.product(*parts)}
    return keys


def undocumented(columns: set[str]) -> list[str]:
    patterns = [re.escape(key).replace(r"\.\.\.", ".*") for key in documented_keys()]
    patterns = [re.sub(r"<[^>]+>", "[^/]+", pattern) for pattern in patterns]
    return sorted(column for column in columns if not any(re.fullmatch(pattern, column) for pattern in patterns))


def test_every_logged_metric_is_documented(tmp_path, monkeypatch):
    config = str(ROOT / "configs" / "grpo_fp4.yaml")
    small = [
        "--trainer.max_steps",
        "1",
        "--data.batch_size",
        "2",
        "--data.heldout_size",
        "4",
        "--rollout.num_generations",
        "2",
        "--rollout.max_version_diff",  # adds to the metrics of a run
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["trace-fit", "fit", "--config", config, *small, "--runs_dir", str(tmp_path)])
    main()
    (path,) = tmp_path.glob("*/version_0/metrics.csv")
    with path.open() as file:
        columns = set(next(csv.reader(file))) - NOT_METRICS
    assert not undocumented(columns), f"docs/metrics.md does not name {undocumented(columns)}"


def anchors(page: Path) -> set[str]:
    """Of the headings, as Markdown's `toc` writes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", text) for text in words}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", (ROOT / page).read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, which has no such heading"


def code_of(page: str) -> tuple[str, str]:
    """Shell commands of the fenced blocks, one a line, and all inline code, one a line."""
    text = (ROOT / page).read_text()
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "bash")]
    return "\n".join(blocks).replace("\\\n", " "), "\n".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    """Paths from the root of the repository, globs included; what a run leaves is under `runs/`."""
    for path in re.findall(
        r"(?<![\w/.])((?:docs|examples|configs|tests|kernels)/[\w./*-]*\w)(?![\w<])", " ".join(code_of(page))
    ):
        assert any(ROOT.glob(path)), f"{page} names {path}"


@functools.cache
def options_of(command: str) -> set[str]:
    """Options of a subcommand of `trace-fit`, from its own `--help`."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(sys, "argv", ["trace-fit", command, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, f"trace-fit {command} is no command"
    return {name.rstrip(".") for name in re.findall(r"--([a-z][\w.]*)", text.getvalue())}


@functools.cache
def options_of_all() -> set[str]:
    """Of every subcommand that some page names, and of the scripts beside the library."""
    commands = {name for page in PAGES for name in re.findall(r"trace-fit (\w+)", "\n".join(code_of(page)))}
    scripts = "".join(path.read_text() for folder in ("examples", "kernels") for path in (ROOT / folder).rglob("*.py"))
    return set().union(*map(options_of, commands), re.findall(r'"--([\w-]+)"', scripts), OF_OTHER_PROGRAMS)


@functools.cache
def arguments_of_classes() -> set[str]:
    """Names of the arguments of everything that a config can name by its class."""
    queue, names = (
        [*COMPONENTS, FSDP2Strategy, LoraConfig, TurnLimits, *(getattr(callbacks, name) for name in callbacks.__all__)],
        {"help"},
    )
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        names |= set(inspect.signature(cls).parameters)
    return names


def is_known(option: str, known: set[str], arguments: set[str]) -> bool:
    """Whether it is an option, or an argument of a class that is one: `model.loss.epsilon` of `model.loss`."""
    group, _, leaf = option.rpartition(".")
    group = group.removesuffix(".init_args")
    return option in known or (group in known and leaf in arguments)


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page):
    arguments, text = arguments_of_classes(), "\n".join(code_of(page))
    for command, rest in re.findall(r"trace-fit (\w+)([^\n#|;]*)", text):
        for option in re.findall(r"--([a-z][\w.]*)", rest):
            assert is_known(option, options_of(command), arguments), f"{page}: trace-fit {command} --{option}"
    for option in re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", text):
        assert is_known(option, options_of_all(), arguments), f"{page}: --{option}"
