"""trace-lightning: RL post-training with FP4 rollouts (TRACE) on PyTorch Lightning."""

from importlib.metadata import PackageNotFoundError, version

from trace_lightning.types import (
    Completion,
    GuidanceConfig,
    Problem,
    Prompt,
    QuantRecipe,
    RolloutBatch,
    SamplingParams,
)

try:
    __version__ = version("trace-lightning")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0"

__all__ = [
    "Completion",
    "GuidanceConfig",
    "Problem",
    "Prompt",
    "QuantRecipe",
    "RolloutBatch",
    "SamplingParams",
    "__version__",
]
