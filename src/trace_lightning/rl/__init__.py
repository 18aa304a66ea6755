"""Reinforcement learning as pure functions over tensors: log-probs, advantages, corrections, losses."""

from trace_lightning.rl.advantages import (
    AdvantageEstimator,
    GroupAdvantage,
    group_statistics,
    zero_variance_groups,
)
from trace_lightning.rl.baselines import TBPO, ScoreCentering
from trace_lightning.rl.corrections import MIS, TIS, Correction, CorrectionOutputs, apply_corrections
from trace_lightning.rl.logprobs import token_and_topk_logprobs, token_logprobs
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
from trace_lightning.rl.rejections import GeometricRejection, IcePop, K3Rejection, Rejection, Veto

__all__ = [
    "DAPO",
    "GRPO",
    "MIS",
    "TBPO",
    "TIS",
    "AdvantageEstimator",
    "Correction",
    "CorrectionOutputs",
    "DrGRPO",
    "GeometricRejection",
    "GlobalCounts",
    "GroupAdvantage",
    "IcePop",
    "K3Rejection",
    "LossInputs",
    "LossOutputs",
    "PolicyLoss",
    "Rejection",
    "ScoreCentering",
    "Veto",
    "apply_corrections",
    "group_statistics",
    "merge_metrics",
    "token_and_topk_logprobs",
    "token_logprobs",
    "zero_variance_groups",
]
