"""The shape of the code, held by reading it: which part may import which, and how long files and functions get.

    cli > callbacks, module, data, bench, estimate, probe, report, env > rollout, metrics, export
        > rl, tasks, quantization, models > recipe, types, hparams > trace_kernels

Imports go down or stay within a layer, and never in a circle. Imports under `TYPE_CHECKING` do not run and are exempt;
imports inside functions do run and count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"trace_kernels"},
    {"recipe", "types", "hparams", "quiet", "suggestions", "version"},
    {"rl", "tasks", "quantization", "models"},
    {"rollout", "metrics", "export"},
    {"callbacks", "module", "data", "loading", "ranks", "strategy", "trainer_checks"}
    | {"bench", "estimate", "probe", "report", "env"},
    {"cli"},
    {"__init__", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAY_IMPORT_LIGHTNING = {"cli", "module", "data", "ranks", "strategy", "trainer_checks", "callbacks"} | LAYERS[-1]
RUNS_ANYWHERE = ("trace_lightning.rl", "trace_lightning.tasks", "trace_lightning.metrics.functional")
KERNELS_MAY_IMPORT = {"torch", "triton", "trace_kernels", *sys.stdlib_module_names}
MAX_FILE_LINES, MAX_SRC_LINES, P90_FUNCTION_LINES = 500, 28_000, 30  # an evening's reading; raised on purpose only


@dataclass(frozen=True)
class Module:
    """One source file under its dotted name, parsed."""

    name: str
    is_package: bool
    source: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def part(self) -> str:
        """The word that `LAYERS` knows it by."""
        parts = self.name.split(".")
        if parts[0] == "trace_kernels":
            return "trace_kernels"
        return parts[1] if len(parts) > 1 else "__init__"


def read_modules(root: Path) -> dict[str, Module]:
    modules = {}
    for package in (root / "src" / "trace_lightning", root / "kernels" / "trace_kernels"):
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, parts[-1] == "__init__", path.read_text())
    return modules


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from running_nodes(other)
        else:
            yield child
            yield from running_nodes(child)


def imports(module: Module, known: dict[str, Module]) -> set[str]:
    """Dotted names of what a module imports; `from package import submodule` gives the submodule."""
    found = set()
    for node in running_nodes(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parents = parts[: len(parts) - node.level + module.is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in known else base)
    return found


def layer_faults(modules: dict[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        if module.part not in LEVEL:
            faults.append(f"{module.name}: {module.part} is in no layer; add it to LAYERS in {Path(__file__).name}")
            continue
        for target in sorted(imports(module, modules)):
            faults += [f"{module.name} imports {target}: {why}" for why in _why_not(module, target)]
    return faults


def _why_not(module: Module, target: str) -> Iterator[str]:
    top, *below = target.split(".")
    if top == "pytorch_lightning":
        yield "its Callback is another class than lightning.pytorch's"
    if top == "lightning" and module.part not in MAY_IMPORT_LIGHTNING:
        yield "only cli, module, data and callbacks may"
    if module.part == "trace_kernels" and top not in KERNELS_MAY_IMPORT:
        yield "trace_kernels needs torch and triton only"
    if module.name.startswith(RUNS_ANYWHERE) and top in ("trace_kernels", "triton"):
        yield "pure functions stay free of kernels"
    if top == "trace_lightning":
        part = below[0] if below else "__init__"
        if LEVEL.get(part, -1) > LEVEL[module.part]:
            yield f"{part} lies above {module.part}"
    if module.name == "trace_lightning.metrics.functional" and top == "torchmetrics":
        yield "pure functions; the torchmetrics classes live beside it"


def find_cycle(modules: dict[str, Module]) -> list[str] | None:
    graph = {name: imports(module, modules) & modules.keys() - {name} for name, module in modules.items()}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in sorted(graph[name]):
            if cycle := walk(target, [*path, name]):
                return cycle
        done.add(name)
        return None

    return next((cycle for name in sorted(graph) if (cycle := walk(name, []))), None)


def function_lengths(module: Module) -> Iterator[tuple[int, str]]:
    """Lines of every function, decorators and docstring not counted."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            yield length, f"{module.name}.{node.name}"


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    found = read_modules(ROOT)
    assert "trace_kernels.formats" in found
    assert "trace_lightning.types" in found
    return found


def test_imports_go_down(modules: dict[str, Module]) -> None:
    faults = layer_faults(modules)
    assert not faults, "\n".join(faults)


def test_no_import_cycle(modules: dict[str, Module]) -> None:
    cycle = find_cycle(modules)
    assert cycle is None, " -> ".join(cycle or [])


def test_files_stay_short(modules: dict[str, Module]) -> None:
    lengths = {name: len(module.source.splitlines()) for name, module in modules.items()}
    long = {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"
    total = sum(length for name, length in lengths.items() if name.startswith("trace_lightning"))
    assert total <= MAX_SRC_LINES, f"src has {total} lines"


def test_functions_stay_short(modules: dict[str, Module]) -> None:
    lengths = sorted(pair for module in modules.values() for pair in function_lengths(module))
    p90 = lengths[int(0.9 * (len(lengths) - 1))][0]
    assert p90 <= P90_FUNCTION_LINES, f"90th percentile {p90} lines; the longest: {lengths[-5:]}"


class TestTheTest:
    """The rules on made-up modules, so that a rule which can no longer fail is noticed."""

    @staticmethod
    def of(**sources: str) -> dict[str, Module]:
        names = {key.replace("__", "."): source for key, source in sources.items()}
        return {name: Module(name, name.count(".") == 0, source) for name, source in names.items()}

    @pytest.mark.parametrize(
        ("name", "source"),
        [
            ("trace_lightning.rl.losses", "from trace_lightning.rollout.base import RolloutEngine"),
            ("trace_lightning.rl.losses", "def f():\n    import lightning.pytorch as pl"),
            ("trace_lightning.rl.losses", "import trace_kernels"),
            ("trace_lightning.types", "from trace_lightning import rl"),
            ("trace_lightning.types", "from . import cli"),
            ("trace_lightning.tasks.base", "from ..module import PolicyModule"),
            ("trace_lightning.rollout.engine", "from lightning.pytorch import Trainer"),
            ("trace_lightning.module", "import pytorch_lightning as pl"),
            ("trace_lightning.module", "from trace_lightning.cli import main"),
            ("trace_lightning.misc.strings", ""),
            ("trace_kernels.linear", "import numpy"),
            ("trace_kernels.linear", "from trace_lightning.types import Prompt"),
        ],
    )
    def test_refused(self, name: str, source: str) -> None:
        known = {n: Module(n, False, "") for n in ("trace_lightning.rl", "trace_lightning.cli")}
        faults = layer_faults(known | {name: Module(name, False, source)})
        assert faults
        assert all(fault.startswith(name) for fault in faults)

    @pytest.mark.parametrize(
        ("name", "source"),
        [
            (
                "trace_lightning.rl.losses",
                "if TYPE_CHECKING:\n    from trace_lightning.rollout.base import X",
            ),
            (
                "trace_lightning.quantization.qat",
                "import trace_kernels\nfrom trace_lightning.recipe import QuantRecipe",
            ),
            ("trace_lightning.quantization.qat", "from trace_lightning.models.layout import read"),
            ("trace_lightning.callbacks.rollout", "import lightning.pytorch as pl"),
            ("trace_kernels.linear", "import math\nimport torch\nimport triton.language as tl\nfrom . import formats"),
        ],
    )
    def test_allowed(self, name: str, source: str) -> None:
        assert layer_faults({name: Module(name, False, source)}) == []

    def test_cycle_is_found(self) -> None:
        circle = self.of(a__x="from a.y import f", a__y="def g():\n    import a.z", a__z="from a import x")
        assert find_cycle(circle) == ["a.x", "a.y", "a.z", "a.x"]
        assert find_cycle(self.of(a__x="from a.y import f", a__y="import a.z", a__z="")) is None

    def test_docstring_is_not_length(self) -> None:
        source = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
        assert list(function_lengths(Module("m", False, source))) == [(2, "m.f")]
