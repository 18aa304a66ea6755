"""`WholeFileIO`: a checkpoint file is the old one or the new one, whatever happens while it is written.

Lightning's default collects the file in memory and moves it from the system's temporary folder. That needs the memory
twice, and between two file systems a move is a copy, which a full disk or a kill leaves half done under the final name.

Only rank zero writes. If its disk is full the others must hear of it, for they wait in a barrier behind the write: the
error is kept (`error`) and raised by whoever asked for the checkpoint, on every rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO


class WholeFileIO(TorchCheckpointIO):
    """Writes beside the final name, to the disk, and renames."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write; a failure is kept in `error`, and leaves the file of before."""
        if "://" in str(path):  # an object store has no names to swap, and writes whole objects by itself
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except (OSError, RuntimeError) as error:  # torch.save wraps what the disk says
            part.unlink(missing_ok=True)
            self.error = error if isinstance(error, OSError) else OSError(str(error))

    def take_error(self) -> OSError | None:
        """The error of the last write, once."""
        error, self.error = self.error, None
        return error
