"""trace-lightning: RL post-training with FP4 rollouts (TRACE) on PyTorch Lightning."""

from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.types import Completion, Problem, Prompt, RolloutBatch, SamplingParams, Turn, TurnLimits
from trace_lightning.version import __version__

__all__ = [
    "Completion",
    "GuidanceConfig",
    "Problem",
    "Prompt",
    "QuantRecipe",
    "RolloutBatch",
    "SamplingParams",
    "Turn",
    "TurnLimits",
    "__version__",
]
