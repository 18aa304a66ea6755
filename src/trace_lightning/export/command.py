"""The command line of `trace-fit export`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trace_lightning.export.exporter import DTYPES, ExportFormat, export_source
from trace_lightning.export.folder import check_target
from trace_lightning.export.source import Source, open_source
from trace_lightning.quantization.dialects import DIALECTS
from trace_lightning.recipe import FP4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trace-fit export",
        description="Write a trained policy as a directory that other tools load.",
    )
    add = parser.add_argument
    add("--ckpt_path", required=True, metavar="PATH", help="a checkpoint, a run's folder, or a model's directory")
    add("--out", required=True, type=Path, metavar="DIR", help="directory to make")
    text = "default hf: plain weights; adapter: low-rank adapters alone"
    add("--format", choices=["hf", "nvfp4", "mxfp4", "adapter"], default="hf", help=text)
    add("--dialect", choices=list(DIALECTS), default="compressed-tensors", help="of FP4 (default compressed-tensors)")
    text = "inputs of linears, in FP4: as in the run's recipe (default), not quantised, or quantised"
    add("--activations", choices=["recipe", "none", "nvfp4", "mxfp4"], default="recipe", help=text)
    add(
        "--calibration", type=Path, metavar="FILE", help="texts for NVFP4 inputs (default: the run's completions.jsonl)"
    )
    add("--dtype", choices=list(DTYPES), help="of what is not in FP4 (default: float32 for hf, bfloat16 beside FP4)")
    text = "low-rank adapters: merged in FP32 (default), or in DIR/adapter beside their base"
    add("--adapters", choices=["merge", "beside"], default="merge", help=text)
    add("--max_shard_gb", type=float, default=5.0, metavar="X", help="size of one file (default 5)")
    add("--model.path", dest="base", metavar="PATH", help="of a checkpoint: where the model it started from is now")
    add("--survival", action="store_true", help="report how much of the training's update is left in FP4")
    add("--overwrite", action="store_true", help="replace a model that is at DIR")
    return parser


def _before(source: Source, base: str | None) -> Mapping[str, Tensor]:
    """The weights that the training started from."""
    if source.adapters is not None:
        return source.base.weights
    return open_source(base or source.record.base_model).weights


def main(arguments: list[str]) -> None:
    """Parse and export.

    Raises:
        ValueError: see `open_source` and `export_source`.
    """
    given = _parser().parse_args(arguments)
    how = ExportFormat(
        format=given.format,
        dialect=given.dialect,
        activations=given.activations,
        dtype=given.dtype,
        adapters=given.adapters,
        max_shard_gb=given.max_shard_gb,
    )
    if given.survival and (given.format not in FP4 or given.adapters == "beside"):
        raise ValueError("--survival compares FP4 weights before and after: give --format nvfp4 or mxfp4, and no base")
    check_target(given.out, overwrite=given.overwrite)
    source = open_source(given.ckpt_path, given.base)
    before = _before(source, given.base) if given.survival else None
    options = {"overwrite": given.overwrite, "calibration": given.calibration, "before": before}
    record = export_source(source, given.out, how, **options)
    dialect = f", {record.dialect}, inputs {record.activations}" if record.dialect else ""
    size = sum(file.stat().st_size for file in given.out.rglob("*.safetensors")) / 1e6
    print(f"exported: {given.out} ({record.format}{dialect}; {size:,.1f} MB)")
    if record.survival:
        print(
            "of the update by training, the FP4 weights keep {kept:.1%} along its own direction; with rounding noise "
            "they moved {size:.2f} times as far, in {changed:.2%} of the weights".format(**record.survival)
        )
