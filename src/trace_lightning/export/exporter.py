"""One policy into one directory: weights, config, generation config, tokenizer, chat template, record and model card.

Everything that can be refused is refused before the first weight is read, and a directory has its name only when it is
complete. Hugging Face format is written by transformers; FP4 linear by linear, so that never more than one shard is
held beyond the weights themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trace_lightning.export.adapters import FOLDER
from trace_lightning.export.calibration import input_scales, read_texts
from trace_lightning.export.card import model_card
from trace_lightning.export.folder import ShardWriter, check_target, whole_directory
from trace_lightning.export.fp4 import FP4Export, plan_fp4
from trace_lightning.export.kv import measured_kv_scales
from trace_lightning.export.record import ExportRecord, read_record
from trace_lightning.export.source import Source
from trace_lightning.export.survival import Survival, update_survival
from trace_lightning.models.checkpoint import weight_names
from trace_lightning.quantization.dialects import DIALECTS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """How a policy is written.

    Args:
        format: `hf`, plain weights; `nvfp4` or `mxfp4`, linears in FP4; `adapter`, low-rank adapters alone.
        dialect: of FP4: `compressed-tensors` or `modelopt`.
        activations: of FP4: `recipe`, inputs of linears as in the rollout; `none`; or the format of the weights.
        dtype: of weights that are not in FP4; null: `float32` for `hf` (masters), `bfloat16` beside FP4, and what is
            stored where the source is in FP4 already.
        adapters: of a policy with low-rank ones: `merge` them in FP32, or write the base, and them `beside` it.
        max_shard_gb: size of one file.

    Raises:
        ValueError: an unknown word, or a size that is not above 0.
    """

    format: Literal["hf", "nvfp4", "mxfp4", "adapter"] = "hf"
    dialect: str = "compressed-tensors"
    activations: Literal["recipe", "none", "nvfp4", "mxfp4"] = "recipe"
    dtype: str | None = None
    adapters: Literal["merge", "beside"] = "merge"
    max_shard_gb: float = 5.0

    def __post_init__(self) -> None:
        for name, choices in {
            "format": ("hf", "nvfp4", "mxfp4", "adapter"),
            "dialect": (*DIALECTS,),
            "activations": ("recipe", "none", "nvfp4", "mxfp4"),
            "dtype": (None, *DTYPES),
            "adapters": ("merge", "beside"),
        }.items():
            if getattr(self, name) not in choices:
                known = ", ".join(choice for choice in choices if choice is not None)
                raise ValueError(f"export {name} {getattr(self, name)!r}: choose one of {known}")
        if self.max_shard_gb <= 0:
            raise ValueError(f"max_shard_gb={self.max_shard_gb} must be above 0")
        if self.format != "hf" and self.dtype == "float16":
            raise ValueError("export dtype float16 beside FP4: FP4 values can lie outside its range; use bfloat16")


def export_source(
    source: Source,
    target: Path,
    how: ExportFormat,
    *,
    overwrite: bool = False,
    calibration: Path | None = None,
    before: Mapping[str, Tensor] | None = None,
) -> ExportRecord:
    """Write `source` to the directory `target`, which appears when it is complete.

    Args:
        source: the policy.
        target: directory to make.
        how: format, dialect, dtype.
        overwrite: replace a model that is there.
        calibration: texts for W4A4 NVFP4; default: the `completions.jsonl` of the source's run.
        before: weights that the training started from, to report how much of its update survives in FP4.

    Returns:
        The record that was written beside the weights.

    Raises:
        ValueError: naming what is wrong with source, target or options. What was at `target` is then untouched.
    """
    check_target(target, overwrite=overwrite)
    needed = [source.where] + ([] if source.adapters is None else [source.adapters.base])
    if target.resolve() in [Path(place).expanduser().resolve() for place in needed]:
        raise ValueError(f"{target} is what is exported, or the base of its adapters; choose another directory")
    if source.adapters is None and (how.format == "adapter" or how.adapters == "beside"):
        raise ValueError(f"{source.where} has no low-rank adapters that could be exported alone or beside a base")
    if how.format == "adapter":
        return _export_adapter(source, target, overwrite)
    if how.format == "hf":
        return _export_plain(source, target, how, overwrite)
    plan = _plan(source, how, calibration)
    record = dataclasses.replace(
        source.record,
        format=how.format,
        dialect=how.dialect,
        activations=plan.scheme.activations,
        quantized_as_trained=_as_trained(source, how),
        kv_scales=plan.kv_scales,
        calibration=plan.calibration,
        survival=source.record.survival if before is None else _survival(plan, before),
        adapters=_adapters(source, how),
    )
    with whole_directory(target, overwrite=overwrite) as part:
        _write_small(plan, record, part)
        _write_adapter(source, record, part, str(target))
        writer = ShardWriter(part, int(how.max_shard_gb * 1e9))
        for name, tensor in plan.tensors():
            writer.add(name, tensor)
        writer.close()
    return record


def _plan(source: Source, how: ExportFormat, calibration: Path | None) -> FP4Export:
    assert how.format in ("nvfp4", "mxfp4")
    held = source.base if how.adapters == "beside" else source
    plan = plan_fp4(held, DIALECTS[how.dialect], how.format, _activations(source, how), _dtype(held, how))
    scales, texts = _input_scales(source, plan, calibration)
    return dataclasses.replace(plan, input_scales=scales, calibration=texts, kv_scales=_kv_scales(source))


def _write_small(plan: FP4Export, record: ExportRecord, part: Path) -> None:
    """All but the weights, which take long: what cannot be written is found out first."""
    config = copy.deepcopy(plan.source.model.config)
    config.dtype = plan.dtype or _stored_dtype(plan.source)
    config.quantization_config = plan.dialect.config(plan.scheme)
    config.save_pretrained(part)
    for name, content in plan.dialect.files(plan.scheme).items():
        (part / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    plan.source.model.generation_config.save_pretrained(part)
    _finish(plan.source, record, part)


def _export_plain(source: Source, target: Path, how: ExportFormat, overwrite: bool) -> ExportRecord:
    record = _plain_record(source, "hf", _adapters(source, how))
    held = source.base if how.adapters == "beside" else source
    dtype, names = DTYPES[how.dtype or "float32"], weight_names(source.model)
    with whole_directory(target, overwrite=overwrite) as part:
        _finish(source, record, part)
        _write_adapter(source, record, part, str(target))
        state = {name: held.weights[name].to(dtype) for name in names}
        model = copy.deepcopy(source.model)
        model.config.dtype = dtype
        model.save_pretrained(part, state_dict=state, max_shard_size=int(how.max_shard_gb * 1e9))
    return record


def _export_adapter(source: Source, target: Path, overwrite: bool) -> ExportRecord:
    record = _plain_record(source, "adapter", "alone")
    assert source.adapters is not None
    with whole_directory(target, overwrite=overwrite) as part:
        source.adapters.write(part, source.adapters.base)
        _finish(source, record, part)
    return record


def _plain_record(source: Source, word: str, adapters: str) -> ExportRecord:
    return dataclasses.replace(
        source.record, format=word, dialect="", activations="none", calibration="", survival={}, adapters=adapters
    )


def _adapters(source: Source, how: ExportFormat) -> str:
    return source.record.adapters if source.adapters is None else how.adapters


def _write_adapter(source: Source, record: ExportRecord, part: Path, base: str) -> None:
    if source.adapters is not None and record.adapters == "beside":
        source.adapters.write(part / FOLDER, base)


def _finish(source: Source, record: ExportRecord, part: Path) -> None:
    source.tokenizer.save_pretrained(part)
    record.write(part)
    (part / "README.md").write_text(model_card(record), encoding="utf-8")


def _activations(source: Source, how: ExportFormat) -> str:
    if how.activations != "recipe":
        return how.activations
    if source.fp4 is not None:
        return source.fp4.scheme.activations
    wanted = source.record.recipe.activations
    return wanted if wanted in ("nvfp4", "mxfp4") else "none"


def _dtype(source: Source, how: ExportFormat) -> torch.dtype | None:
    if how.dtype is not None:
        return DTYPES[how.dtype]
    return None if source.fp4 is not None else torch.bfloat16


def _stored_dtype(source: Source) -> torch.dtype:
    dtype = source.model.config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _survival(plan: FP4Export, before: Mapping[str, Tensor]) -> dict[str, float]:
    after, fmt = plan.source.weights, plan.scheme.format
    sums = (
        update_survival(before, after, [group], fmt, four_over_six=plan.source.record.recipe.four_over_six)
        for group in plan.groups
    )
    return sum((found for group in sums for found in group.values()), Survival()).as_dict()


def _kv_scales(source: Source) -> list[dict[str, list[float]]]:
    if source.fp4 is not None:  # of the masters, which are gone
        return source.record.kv_scales
    return measured_kv_scales(source.model, source.weights, source.record.recipe)


def _as_trained(source: Source, how: ExportFormat) -> bool:
    if source.fp4 is not None:
        return source.record.quantized_as_trained
    held_apart = source.adapters is not None and not source.record.merged_in_rollout
    if held_apart and source.base.fp4 is not None:  # the run packed its values again, and only our own codes stay
        of_base = read_record(source.base.fp4.directory)
        if of_base is None or not of_base.quantized_as_trained:
            return False
    return source.record.recipe.weights == how.format and held_apart == (how.adapters == "beside")


def _input_scales(source: Source, plan: FP4Export, calibration: Path | None) -> tuple[dict[str, float], str]:
    """Scales of the inputs, if the plan wants any that are not stored yet, and the words for what they come from."""
    fp4 = plan.source.fp4
    has_scales = fp4 is not None and fp4.scheme.activations != "none"
    if plan.scheme.activations != "nvfp4" or has_scales:
        return {}, source.record.calibration if has_scales else ""
    of_run = None if source.run is None else source.run / "completions.jsonl"
    file = calibration or (of_run if of_run is not None and of_run.is_file() else None)
    if file is None:
        raise ValueError(
            "W4A4 in NVFP4 needs texts to measure the inputs of linears on: give a file by --calibration (JSON lines "
            "with `prompt` and `completion`, or plain lines), or export without them by --activations none"
        )
    texts = read_texts(file, source.tokenizer)
    recipe = dataclasses.replace(source.record.recipe, weights="nvfp4")
    return input_scales(source, recipe, texts, torch.float32), f"{len(texts)} texts of {file.name}"
