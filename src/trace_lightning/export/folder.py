"""Directories that appear whole or not at all, and safetensors written shard by shard.

A shard is written when it is full and then let go, so the writer never holds more than one. How many there will be is
known at the end only; until then they carry names without the total.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trace_lightning.models.checkpoint import INDEX, SINGLE


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that must not be replaced.

    Raises:
        ValueError: it exists and `overwrite` is off, or it is no model's directory.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give the directory to write")
    if any(target.iterdir()):
        if not overwrite:
            raise ValueError(f"{target} exists; choose another directory, or pass --overwrite to replace it")
        if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ValueError(f"{target} holds no config.json, so it is no model, and will not be replaced")


@contextmanager
def whole_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to write into, which gets the name `target` when the block ends well; else nothing has changed.

    Args:
        target: its last name.
        overwrite: replace a model that is there.

    Raises:
        ValueError: the target must not be replaced, or the disk refused.
    """
    part, old = (target.with_name(f".{target.name}.{end}") for end in ("part", "old"))
    _put_back(old, target)
    check_target(target, overwrite=overwrite)
    try:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for file in part.rglob("*"):
            if file.is_file():
                _to_disk(file)
        if target.exists():
            target.rename(old)
        part.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{target} could not be written: {error}; what was there before is untouched") from error
    finally:
        _put_back(old, target)
        shutil.rmtree(part, ignore_errors=True)


def _put_back(old: Path, target: Path) -> None:
    """Undo the first of two renames, where the second failed or a kill fell between them."""
    if old.exists() and not target.exists():
        old.rename(target)


def _to_disk(file: Path) -> None:
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())
    file.chmod(0o644)  # safetensors leaves it readable by its owner only


class ShardWriter:
    """Writes tensors in the order they come, into files of at most `max_bytes` each.

    A tensor larger than that gets a file of its own. `close` names the files as Hugging Face does.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self._shard: dict[str, Tensor] = {}
        self._bytes = self._total = 0  # of this shard, of all
        self._files: list[list[str]] = []  # names of the tensors in each file

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it must not change before the next shard is begun."""
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._bytes + size > self.max_bytes:
            self._flush()
        self._shard[name] = tensor.detach().cpu().contiguous()
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        save_file(self._shard, self.directory / f"{len(self._files)}.shard", metadata={"format": "pt"})
        self._files.append(list(self._shard))
        self._shard, self._bytes = {}, 0

    def close(self) -> None:
        """Write what is left, and the index."""
        self._flush()
        count = len(self._files)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for position, name in enumerate(names):
            (self.directory / f"{position}.shard").rename(self.directory / name)
        if count > 1:
            files = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(files.items()))}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
