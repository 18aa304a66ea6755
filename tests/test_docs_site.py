"""The site builds without a warning, its reference has every class that a config can name, and its figures are true."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import scripts
from trace_lightning import callbacks
from trace_lightning.callbacks import Rollout
from trace_lightning.cli import COMPONENTS
from trace_lightning.data import PromptDataModule
from trace_lightning.module import PolicyModule

ROOT = Path(__file__).parent.parent
GROUPS = (PolicyModule, Rollout, PromptDataModule)  # the recipe is an argument of the first


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load(ROOT / "docs" / "hooks.py")


def classes_in(annotation: object) -> Iterator[type]:
    """Classes of this library inside an annotation such as `list[Correction] | None`."""
    if isinstance(annotation, type) and annotation.__module__.startswith("trace_lightning."):
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes_in(part)


def reachable() -> set[type]:
    """What a config can name or fill in, from the top-level groups and the callbacks down."""
    queue = [*GROUPS, *(getattr(callbacks, name) for name in callbacks.__all__)]
    found: set[type] = set()
    while queue:
        cls = queue.pop()
        children = list(HOOKS.selectable(cls)) if cls in COMPONENTS else []
        found |= set() if cls in COMPONENTS else {cls}
        hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__).values()
        nested = {inner for hint in hints for inner in classes_in(hint)} | set(children)
        queue += [inner for inner in nested if inner not in found and inner is not cls]
    return found


REACHABLE = sorted(reachable(), key=lambda cls: cls.__name__)


@pytest.fixture(scope="module")
def blocks() -> set[str]:
    page = HOOKS.on_page_markdown((ROOT / "docs" / "configuration.md").read_text())
    return set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))


def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


@pytest.mark.parametrize("cls", REACHABLE, ids=lambda cls: cls.__name__)
def test_the_reference_explains_every_argument(cls, blocks):
    assert path_of(cls) in blocks, f"docs/configuration.md lacks a line `::: {path_of(cls)}`"
    shown = "\n".join(inspect.getdoc(base) or "" for base in cls.__mro__ if path_of(base) in blocks)
    own = inspect.signature(cls).parameters if cls.__init__ is not object.__init__ else {}
    missing = [name for name in own if not re.search(rf"^ +{name}: ", shown, re.MULTILINE)]
    assert not missing, f"the docstring of {path_of(cls)} does not explain {missing} under Args"


def test_a_class_without_docs_would_be_found():
    assert {"GRPO", "LocalEngine", "JsonlTask", "GuidanceConfig", "Veto"} <= {cls.__name__ for cls in REACHABLE}
    assert not any(inspect.isabstract(cls) for cls in REACHABLE)


def mkdocs() -> None:
    from mkdocs.__main__ import cli

    cli()


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="extra docs")
    done = scripts.run(mkdocs, "build", "--strict", "--site-dir", str(tmp_path), folder=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "configuration.html").read_text()
    for cls in REACHABLE:
        assert f'id="{path_of(cls)}"' in page
    assert "lower clip of the ratio, 1 - epsilon" in page
    assert "train_without_cli.py --steps 30" in (tmp_path / "api.html").read_text()


def test_figures_are_drawn_and_say_what_the_page_says(tmp_path, monkeypatch):
    figures = load(ROOT / "docs" / "figures" / "concepts.py")
    flips, noise = figures.flipped_codes()
    share = f"{flips[noise.index(2.0**-9)]:.2f}".lstrip("0")
    assert f"flips {share} % of the codes" in (ROOT / "docs" / "concepts.md").read_text()
    monkeypatch.setattr(figures, "flipped_codes", lambda: (flips, noise))
    monkeypatch.setattr(figures, "HERE", tmp_path)
    figures.main()
    names = {path.name for path in tmp_path.glob("*.svg")}
    assert names == {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")}
