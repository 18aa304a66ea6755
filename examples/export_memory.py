"""How much memory an FP4 export takes: random weights of a shape, each made when the writer asks for it.

    python examples/export_memory.py                                   Qwen3-8B: 6.4 GB on disk for a while, minutes
    python examples/export_memory.py --shape tiny --max_shard_gb 0.001

No weight is in memory before it is exported, so what the process grows by is what the writer holds: one shard, the
fused group that is being rounded, and the temporaries of rounding.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trace_lightning.bench.shapes import SHAPES, make_model
from trace_lightning.export.exporter import ExportFormat, export_source
from trace_lightning.export.record import ExportRecord
from trace_lightning.export.source import Source
from trace_lightning.models.checkpoint import weight_names
from trace_lightning.models.tiny import tiny_tokenizer
from trace_lightning.recipe import QuantRecipe


class RandomWeights(Mapping[str, Tensor]):
    """FP32 masters that exist while they are looked at."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes, self.pattern = shapes, 0.02 * torch.randn(1 << 20)

    def __getitem__(self, name: str) -> Tensor:
        shape = torch.Size(self.shapes[name])
        weight = torch.empty(shape)
        for part in weight.view(-1).split(len(self.pattern)):
            part.copy_(self.pattern[: len(part)])
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--max_shard_gb", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = make_model(SHAPES[given.shape], None, torch.device("meta"))
    record = ExportRecord(recipe=QuantRecipe(weights="nvfp4", kv_cache="nvfp4"), base_model=given.shape)
    source = Source(RandomWeights(weight_names(model)), model, tiny_tokenizer(), record, None, given.shape)
    before, begin = peak_gb(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        target = Path(folder) / "out"
        export_source(source, target, ExportFormat(format="nvfp4", max_shard_gb=given.max_shard_gb))
        files = [path.stat().st_size / 1e9 for path in target.glob("*.safetensors")]
    grown = peak_gb() - before
    result = {
        "shape": given.shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "files_gb": files,
        "grown_gb": grown,
        "of_largest_shard": grown / max(files),
        "seconds": time.perf_counter() - begin,
    }
    print(
        f"{given.shape}: {sum(files):.2f} GB in {len(files)} files; the process grew by {grown:.2f} GB, "
        f"{result['of_largest_shard']:.2f} times the largest file, in {result['seconds']:.0f} s"
    )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
