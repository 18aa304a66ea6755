"""Reinforcement learning as pure functions over tensors: log-probs, advantages, corrections, losses."""

from trace_lightning.rl.advantages import (
    AdvantageEstimator,
    GroupAdvantage,
    group_statistics,
    zero_variance_groups,
)
from trace_lightning.rl.corrections import MIS, TIS, Correction, CorrectionOutputs, apply_corrections
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rl.losses import (
    DAPO,
    GRPO,
    DrGRPO,
    GlobalCounts,
    LossInputs,
    LossOutputs,
    PolicyLoss,
    merge_metrics,
)

__all__ = [
    "DAPO",
    "GRPO",
    "MIS",
    "TIS",
    "AdvantageEstimator",
    "Correction",
    "CorrectionOutputs",
    "DrGRPO",
    "GlobalCounts",
    "GroupAdvantage",
    "LossInputs",
    "LossOutputs",
    "PolicyLoss",
    "apply_corrections",
    "group_statistics",
    "merge_metrics",
    "token_logprobs",
    "zero_variance_groups",
]
