"""What `mkdocs build` adds to the pages: a line `::: subclasses of PATH` becomes a block for every class below PATH.

The list is Python's own, so a class that is written and imported is documented, without a second list to keep.
Everything else of the reference is mkdocstrings', from the docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

DIRECTIVE = re.compile(r"^::: subclasses of (\S+)$", re.MULTILINE)


def selectable(base: type) -> Iterator[type]:
    """Concrete, public classes below `base` that this library defines: what a config may name in its place."""
    for child in base.__subclasses__():
        if (
            child.__module__.startswith("trace_lightning.")
            and not inspect.isabstract(child)
            and child.__name__[0] != "_"
        ):
            yield child
        yield from selectable(child)


def block(cls: type) -> str:
    return f'::: {cls.__module__}.{cls.__name__}\n    options: {{heading: "{cls.__name__}", heading_level: 4}}\n'


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with the text of every page."""
    if not DIRECTIVE.search(markdown):
        return markdown
    importlib.import_module("trace_lightning.cli")  # imports every class that has a short name

    def expand(match: re.Match[str]) -> str:
        module, _, name = match[1].rpartition(".")
        found = set(selectable(getattr(importlib.import_module(module), name)))
        return "\n".join(block(cls) for cls in sorted(found, key=lambda cls: cls.__name__.lower()))

    return DIRECTIVE.sub(expand, markdown)
