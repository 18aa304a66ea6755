"""`trace_export.json`: what an exported directory is, for whoever loads it here again.

config.json says how the weights are stored. This file adds what no dialect has a word for: the recipe of the rollout,
the outer scales of K and V by head, what the run measured, and which inputs were calibrated on what. The model card is
made from it alone, so an export of an export says the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trace_lightning.hparams import from_plain, to_plain
from trace_lightning.models.checkpoint import read_json
from trace_lightning.recipe import QuantRecipe
from trace_lightning.version import __version__

RECORD = "trace_export.json"


@dataclass
class ExportRecord:
    """Content of the file.

    Args:
        recipe: of the rollout that the policy was trained with.
        base_model: what the run started from, as it was written in its config.
        base_identity: of the files that adapters were trained over, see `models.identity`; empty where unknown.
        format: `hf`, `nvfp4`, `mxfp4` or `adapter`.
        dialect: of an FP4 format.
        activations: format of the inputs of linears for which scales were written.
        quantized_as_trained: whether the FP4 weights are the rollout's own.
        steps: optimizer steps behind the weights; None where unknown.
        evaluation: held-out reward before and after, by name.
        kv_scales: FP32 outer scales by layer, `{"k": [by head], "v": [by head]}`; empty without a K/V format.
        calibration: what the input scales were measured on.
        survival: how much of the training's update the FP4 weights show, see `survival.Survival`; empty if not asked.
        adapters: of a policy with low-rank ones: `merge`, `beside` or `alone`.
        merged_in_rollout: of such a policy, whether the rollout quantised the sum of base and adapters.
        version: of this library.
    """

    recipe: QuantRecipe = field(default_factory=QuantRecipe)
    base_model: str = ""
    base_identity: str = ""
    format: str = "hf"
    dialect: str = ""
    activations: str = "none"
    quantized_as_trained: bool = False
    steps: int | None = None
    evaluation: dict[str, list[float | None]] = field(default_factory=dict)
    kv_scales: list[dict[str, list[float]]] = field(default_factory=list)
    calibration: str = ""
    survival: dict[str, float] = field(default_factory=dict)
    adapters: str = ""
    merged_in_rollout: bool = False
    version: str = __version__

    def write(self, directory: Path) -> None:
        """Into a directory."""
        content = asdict(self) | {"recipe": to_plain(self.recipe)}
        (directory / RECORD).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_record(directory: Path) -> ExportRecord | None:
    """The record of a directory; None if another program wrote it.

    Raises:
        ValueError: a damaged file.
    """
    path = directory / RECORD
    if not path.is_file():
        return None
    content: dict[str, Any] = read_json(path)
    try:
        return ExportRecord(**content | {"recipe": from_plain(content["recipe"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a record that this version reads: {error}") from error


def evaluation_of(run: Path, step: int | None = None) -> tuple[int | None, dict[str, list[float | None]]]:
    """Optimizer steps of a run, and its held-out rewards before and after, from its `summary.json` if there is one.

    The rewards are those of the run's last weights: weights of another `step` have none.
    """
    path = run / "summary.json"
    if not path.is_file():
        return None, {}
    summary = read_json(path)
    if step is not None and step != summary.get("steps"):
        return summary.get("steps"), {}
    heldout = summary.get("heldout") or {}
    found: dict[str, list[float | None]] = {}
    if heldout.get("first") is not None:
        found["heldout reward"] = [heldout["first"], heldout.get("last")]
    for name, values in (summary.get("eval_sets") or {}).items():
        found[name] = [values.get("first"), values.get("last")]
    return summary.get("steps"), found
