"""Finished parts of a probe on disk: an interrupted probe goes on where it stopped, and nothing is measured twice.

    OUT/parts/divergence-w4a4kv4.json    {"key": ..., "result": ...}

The key is a digest of what the part depends on: the model's files, settings, versions, device. A part whose key differs
is measured again, so a folder can be used for a second probe with other settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """Hex digest of anything that `json` and `str` can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def model_state(folder: Path | None) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a checkpoint's files: a model that was trained on is another model."""
    if folder is None:
        return []
    stats = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


class PartStore:
    """Results of parts by name, under one key.

    Args:
        folder: of the run.
        key: digest of everything that all parts depend on.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder / "parts", key
        self.reused: list[str] = []

    def get(self, name: str, measure: Callable[[], Any], **depends: Any) -> Any:
        """The stored result of `name`, or that of `measure`, stored whole or not at all.

        Args:
            name: of the part.
            measure: measures it; its result goes through JSON either way, so that both ways give the same types.
            depends: what this part depends on beside the common key.
        """
        path, key = self.folder / f"{name}.json", digest([self.key, depends])
        if path.is_file():
            found = json.loads(path.read_text())
            if found.get("key") == key:
                self.reused.append(name)
                return found["result"]
        text = json.dumps({"key": key, "result": measure()})
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text(text)
        part.replace(path)
        return json.loads(text)["result"]
