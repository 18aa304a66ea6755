"""Constructor arguments as plain str, numbers, lists and dicts, and back.

A checkpoint must open with `weights_only=True` anywhere, so it holds no classes. A component (loss, advantage
estimator, correction) is stored as `{class_path, init_args}`, the form in which configs write it.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any


def to_plain(value: Any) -> Any:
    """A component, config dataclass or container as plain data.

    Raises:
        ValueError: for an object that is not a dataclass; it could not be rebuilt from a checkpoint.
    """
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        arguments = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}
    raise ValueError(
        f"{type(value).__name__} cannot be stored in a checkpoint: make it a frozen dataclass, so that its arguments "
        "can be written down and read back"
    )


def from_plain(value: Any) -> Any:
    """Inverse of `to_plain`; objects that are already built pass through.

    Raises:
        ValueError: if a class path cannot be imported.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict) and "class_path" in value:
        module, _, name = value["class_path"].rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"the checkpoint needs {value['class_path']}, which cannot be imported: {error}"
            ) from error
        return cls(**{key: from_plain(item) for key, item in value.get("init_args", {}).items()})
    return value
