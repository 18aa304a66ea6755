"""Where an export comes from: a Lightning checkpoint, a run's `policy/`, or any directory in Hugging Face format.

A checkpoint of this library is one file of whole, plain tensors whatever the strategy and the number of ranks, so one
reader does for all. Its file is mapped, never loaded: a weight is read when it is exported. Config and tokenizer are
those of the model that the run started from.

Weights are a mapping from name to tensor. Of a run that trained adapters they are those of the base with the adapters
merged; `Source.base` has them without.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.export.adapters import CONFIG, Adapters, MergedWeights, adapters_of, read_peft
from trace_lightning.export.record import ExportRecord, evaluation_of, read_record
from trace_lightning.hparams import from_plain
from trace_lightning.models.checkpoint import (
    FP4Checkpoint,
    StoredTensors,
    check_weights,
    empty_model,
    plain_config,
    quantization_of,
    weight_names,
)
from trace_lightning.models.identity import base_identity
from trace_lightning.models.policy import load_tokenizer
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.models.sharding import plain_twin

log = logging.getLogger(__name__)
_PREFIX = "policy."


@dataclass(frozen=True)
class Source:
    """A policy to export.

    Args:
        weights: all of `weight_names(model)`.
        model: of this structure, on the meta device; holds config and generation config.
        tokenizer: saved beside the weights.
        record: what is known of its training.
        run: folder of the run, if it came from one.
        where: for messages.
        adapters: low-rank ones, that are part of the weights; None if all weights were trained.
    """

    weights: Mapping[str, Tensor]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    record: ExportRecord
    run: Path | None
    where: str
    adapters: Adapters | None = None

    @property
    def base(self) -> Source:
        """The policy without its adapters."""
        assert isinstance(self.weights, MergedWeights)
        return dataclasses.replace(self, weights=self.weights.base, adapters=None)

    @property
    def fp4(self) -> FP4Checkpoint | None:
        """The weights, if they are stored in FP4 already."""
        return self.weights if isinstance(self.weights, FP4Checkpoint) else None


class _Renamed(Mapping[str, Tensor]):
    """A state dict of `PolicyModule` under the model's own names."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return self._state[_PREFIX + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(_PREFIX) for name in self._state if name.startswith(_PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def open_source(path: str, base: str | None = None) -> Source:
    """Find weights, config, tokenizer and recipe.

    Args:
        path: a checkpoint file, a run's folder or its `policy/`, a directory in Hugging Face format, or a name that
            `model.path` takes.
        base: for a checkpoint, the directory of the model it started from, if that is no longer where it was.

    Raises:
        ValueError: whatever is missing, damaged or of another model, named; for adapters a base with other weights than
            theirs had.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return _from_checkpoint(place, base)
    if not _is_policy(place) and _is_policy(place / "policy"):
        place = place / "policy"
    if (place / CONFIG).is_file():
        adapters = read_peft(place)
        record = read_record(place) or ExportRecord(base_model=adapters.base)
        return _over_its_base(adapter_source(adapters, base, record, place.parent, str(place)))
    return _from_directory(resolve_model_path(str(place)), path)


def _is_policy(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", CONFIG))


def _from_checkpoint(file: Path, base: str | None) -> Source:
    content = _load(file)
    hparams, state = content.get("hyper_parameters"), content.get("state_dict")
    if not isinstance(state, dict) or not isinstance(hparams, dict) or "path" not in hparams:
        raise ValueError(
            f"{file} is no checkpoint of a PolicyModule: it holds {', '.join(map(str, content)) or 'nothing'}"
        )
    run, step = file.parent.parent, content.get("global_step")
    steps, evaluation = evaluation_of(run, step)
    record = ExportRecord(
        recipe=from_plain(hparams.get("recipe")) or ExportRecord().recipe,
        base_model=str(hparams["path"]),
        steps=step if step is not None else steps,
        evaluation=evaluation,
    )
    adapters = adapters_of(state, hparams, str(file))
    if adapters is not None:
        record.base_identity = (content.get("lora_base") or {}).get("identity", "")
        return _over_its_base(adapter_source(adapters, base, record, run, str(file)))
    origin = base or record.base_model
    return _checked(_Renamed(state), _base_of(origin, str(file)), origin, record, run, str(file))


def adapter_source(adapters: Adapters, base: str | None, record: ExportRecord, run: Path | None, where: str) -> Source:
    """A policy that is a base on disk and adapters.

    Args:
        adapters: over the base that they name.
        base: another place of that base; None takes theirs.
        record: what is known of the training.
        run: folder of the run, if there is one.
        where: the adapters come from, for messages.

    Raises:
        ValueError: a base that is missing, damaged or of another model.
    """
    directory = _base_of(base or adapters.base, where)
    plain = _from_directory(directory, adapters.base)
    adapters = dataclasses.replace(adapters, base=str(directory))  # what peft will look for
    merged = record.merged_in_rollout or adapters.merged_in_rollout  # peft's own files do not say
    record = dataclasses.replace(record, merged_in_rollout=merged)
    weights = MergedWeights(plain.weights, adapters)
    return dataclasses.replace(plain, weights=weights, adapters=adapters, record=record, run=run, where=where)


def _over_its_base(source: Source) -> Source:
    """Refuse adapters whose base has other weights now than when they were trained."""
    assert source.adapters is not None
    directory, wanted = source.adapters.base, source.record.base_identity
    if not wanted:
        log.warning(
            "%s does not say which weights its adapters were trained over: %s is taken", source.where, directory
        )
    elif base_identity(Path(directory)) != wanted:
        raise ValueError(
            f"the adapters of {source.where} were trained over {source.record.base_model}, and {directory} holds other "
            "weights: give a copy of that model by --model.path. To put adapters on another model on purpose, load "
            "them with peft"
        )
    return source


def _base_of(origin: str, where: str) -> Path:
    """The directory of the model that a run started from."""
    try:
        return resolve_model_path(origin)
    except ValueError as error:
        raise ValueError(
            f"{where} started from a model that is needed as well: {error}. Give another copy of it by --model.path"
        ) from error


def _load(file: Path) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} is no checkpoint, or is cut short: {reason}") from error
    return content if isinstance(content, dict) else {}


def _from_directory(directory: Path, written: str) -> Source:
    run = directory.parent
    record = read_record(directory)
    if record is None:
        steps, evaluation = evaluation_of(run)
        record = ExportRecord(base_model=written, steps=steps, evaluation=evaluation)
    if quantization_of(directory) is not None:
        weights: Mapping[str, Tensor] = FP4Checkpoint(directory, empty_model(plain_config(directory)))
    else:
        weights = StoredTensors(directory)
    return _checked(weights, directory, str(directory), record, run, str(directory))


def _checked(
    weights: Mapping[str, Tensor], directory: Path, path: str, record: ExportRecord, run: Path, where: str
) -> Source:
    model = empty_model(plain_config(directory))
    check_weights(weights, weight_names(model), where)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return Source(weights, model, load_tokenizer(path), record, run, where)


def source_of(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: ExportRecord, run: Path | None = None
) -> Source:
    """A policy in memory."""
    state, model = policy.state_dict(), plain_twin(policy, torch.device("meta"))
    return Source({name: state[name] for name in weight_names(model)}, model, tokenizer, record, run, "the policy")
