"""Which model a directory holds, without reading all of it: a hash of three rows of every weight.

Adapters mean something over one base alone, and what travels with them is its path, where other weights may lie by now.
Training moves almost every number of a model, so rows tell models apart that share config and shapes. The same values
in BF16, FP32 or other files are the same model; FP4 in another dialect is not, since its bytes are compared as stored.

What was left out: a hash of all weights, which would read 16 GB of an 8B model for every export; and a proof. Somebody
who changes one weight on purpose is not found out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from trace_lightning.models.checkpoint import StoredTensors, empty_model, plain_config, quantization_of, weight_names


def base_identity(directory: Path) -> str:
    """Hexadecimal digits for the weights in a directory; empty if they are in no safetensors files.

    Raises:
        ValueError: damaged files.
    """
    if not any(directory.glob("*.safetensors")):
        return ""
    stored, names = StoredTensors(directory), set(weight_names(empty_model(plain_config(directory))))
    if quantization_of(directory) is not None:
        names = set(stored)
    found = hashlib.sha256()
    for name in sorted(names & set(stored)):
        found.update(f"{name} {stored.shape(name)} ".encode())
        found.update(stored.rows(name).float().numpy().tobytes())
    return found.hexdigest()[:16]
