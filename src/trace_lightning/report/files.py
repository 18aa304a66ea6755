"""Files that a run is still writing: a reader sees the old or the new page, and no half of a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def complete_lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Lines from byte `offset` on, each with the offset behind it; what stands behind the last line end is left."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset
