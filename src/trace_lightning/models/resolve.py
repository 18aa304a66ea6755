"""From what a user writes for a model to a directory on disk. Nothing here touches the network.

    builtin:tiny-qwen3     a checkpoint inside this package, as is builtin:tiny-qwen3-tools
    prepared:smollm2       what `trace-fit prepare smollm2` left in the cache
    anything else          a directory with config.json, as `save_pretrained` writes it

What was left out: names on a model hub. A run that downloads gigabytes because a path was mistyped is worse than one
that stops, so a hub's model is downloaded first, by whatever tool one trusts, and given as a directory.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
from pathlib import Path

BUILTIN = {"tiny-qwen3": "tiny_qwen3", "tiny-qwen3-tools": "tiny_qwen3_tools"}
PREPARED = {"smollm2": "smollm2-135m-instruct"}


def cache_dir() -> Path:
    """`$TRACE_LIGHTNING_CACHE`, or `~/.cache/trace-lightning`; not created."""
    return Path(os.environ.get("TRACE_LIGHTNING_CACHE") or Path.home() / ".cache" / "trace-lightning")


def resolve_model_path(path: str) -> Path:
    """The directory that `path` names, which holds at least a `config.json`.

    Raises:
        ValueError: an unknown `builtin:` or `prepared:` name, a model that was not prepared yet, or a directory that is
            missing or has no `config.json`. The message says what to do.
    """
    kind, _, name = path.partition(":")
    if kind == "builtin":
        assets = importlib.resources.files("trace_lightning") / "assets"
        return _checked(Path(str(assets / _lookup(name, BUILTIN, kind))), path)
    if kind == "prepared":
        directory = cache_dir() / _lookup(name, PREPARED, kind)
        if not (directory / "config.json").is_file():
            raise ValueError(
                f"model {path!r} is not in the cache ({directory}): run `trace-fit prepare {name}` first, or set "
                "TRACE_LIGHTNING_CACHE to the cache that has it"
            )
        return directory
    return _checked(Path(path).expanduser(), path)


def _lookup(name: str, known: dict[str, str], kind: str) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {kind}:{near[0]}?" if near else f"there is {', '.join(f'{kind}:{k}' for k in known)}"
        raise ValueError(f"unknown model {kind}:{name}; {hint}")
    return known[name]


def _checked(directory: Path, written: str) -> Path:
    if (directory / "config.json").is_file():
        return directory
    if directory.is_dir():
        found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"model {written!r}: {directory.resolve()} has no config.json (it holds {found}). Give the directory that "
            "`save_pretrained` wrote: config.json, *.safetensors and the tokenizer's files"
        )
    if directory.is_file():
        raise ValueError(f"model {written!r} is a file; give the directory that holds it and its config.json")
    names = [f"builtin:{name}" for name in BUILTIN] + [f"prepared:{name}" for name in PREPARED]
    raise ValueError(
        f"model {written!r}: no directory {directory.resolve()}. Give a directory with config.json, or one of "
        f"{', '.join(names)}; models are never downloaded by name"
    )
