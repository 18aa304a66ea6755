"""Reinforcement learning as pure functions over tensors: log-probs, advantages, corrections, losses."""

from trace_lightning.rl.advantages import (
    AdvantageEstimator,
    BatchAdvantage,
    GroupAdvantage,
    LeaveOneOut,
    group_statistics,
    zero_variance_groups,
)
from trace_lightning.rl.baselines import TBPO, ScoreCentering
from trace_lightning.rl.clipped_losses import DAPO, GRPO, PPO, DrGRPO
from trace_lightning.rl.corrections import MIS, TIS, Correction, CorrectionOutputs, apply_corrections
from trace_lightning.rl.kl import K1, K2, K3, KLEstimator
from trace_lightning.rl.lengths import KimiLength, LengthDiscount, LengthPenalty, SoftOverlong
from trace_lightning.rl.logprobs import token_and_topk_logprobs, token_logprobs
from trace_lightning.rl.losses import (
    GlobalCounts,
    LossInputs,
    LossOutputs,
    PolicyLoss,
    TokenLoss,
    merge_metrics,
)
from trace_lightning.rl.rejections import GeometricRejection, IcePop, K3Rejection, Rejection, Veto
from trace_lightning.rl.sequence_losses import GSPO, RLOO, GSPOToken
from trace_lightning.rl.weighted_losses import CISPO, SAPO, CISPOBand

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "K1",
    "K2",
    "K3",
    "MIS",
    "PPO",
    "RLOO",
    "SAPO",
    "TBPO",
    "TIS",
    "AdvantageEstimator",
    "BatchAdvantage",
    "CISPOBand",
    "Correction",
    "CorrectionOutputs",
    "DrGRPO",
    "GSPOToken",
    "GeometricRejection",
    "GlobalCounts",
    "GroupAdvantage",
    "IcePop",
    "K3Rejection",
    "KLEstimator",
    "KimiLength",
    "LeaveOneOut",
    "LengthDiscount",
    "LengthPenalty",
    "LossInputs",
    "LossOutputs",
    "PolicyLoss",
    "Rejection",
    "ScoreCentering",
    "SoftOverlong",
    "TokenLoss",
    "Veto",
    "apply_corrections",
    "group_statistics",
    "merge_metrics",
    "token_and_topk_logprobs",
    "token_logprobs",
    "zero_variance_groups",
]
