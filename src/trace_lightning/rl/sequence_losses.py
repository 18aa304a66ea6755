"""Policy losses whose ratio belongs to the whole sequence: GSPO and RLOO.

A reward is given to a sequence, so these weigh and clip sequences, not tokens. They differ in the ratio:

    GSPO, GSPOToken   s = exp(mean_t(log pi_policy - log pi_old))   does not grow with length; clip of a few 1e-4
    RLOO              s = exp(sum_t(log pi_policy - log pi_old))    the true ratio of the sequence; grows with length

Both average over sequences. Where one optimizer step follows a rollout, s is 1: GSPO's gradient is then GRPO's, and
RLOO's is REINFORCE's with the token sum, `-A grad log pi(sequence)`.

What was left out: the KL inside the reward of RLOO (TRL's default); `beta` adds it to the loss instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.rl.clipped_losses import GRPO
from trace_lightning.rl.corrections import level_ratio
from trace_lightning.rl.losses import LossInputs, masked_log_ratio


@dataclass(frozen=True)
class GSPO(GRPO):
    """Clip and weigh by the geometric mean ratio of the sequence (arXiv 2507.18071); its epsilons.

    Weights of corrections act through their mean over the sequence. With equal weights the gradient is that of
    `GSPOToken`.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon; a mean gap of 3e-4 per token is where the clip begins.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative (dual clip); None is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    epsilon: float = 3e-4
    epsilon_high: float | None = 4e-4

    def ratio(self, inputs: LossInputs) -> Tensor:
        """`exp(mean of the log ratio)` [B, 1], differentiated as a whole."""
        return _sequence_ratio(inputs, "geometric")


@dataclass(frozen=True)
class GSPOToken(GSPO):
    """GSPO's token form (arXiv 2507.18071, eq. 11): the sequence's ratio as value, each token's own gradient.

    `s_t = sg(s) pi_t / sg(pi_t)`. Weights of corrections then act on the tokens they belong to.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative (dual clip); None is off.
        beta: weight of the KL to the reference policy; 0 is off.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    def ratio(self, inputs: LossInputs) -> Tensor:
        """`sg(s) pi_t / sg(pi_t)` [B, T]."""
        own_BT = masked_log_ratio(inputs.policy_logprobs_BT, inputs.policy_logprobs_BT.detach(), inputs.mask_BT).exp()
        return _sequence_ratio(inputs, "geometric").detach() * own_BT


@dataclass(frozen=True)
class RLOO(GRPO):
    """REINFORCE over whole sequences, clipped by their ratio (arXiv 2402.14740, as in TRL); use `LeaveOneOut`.

    Args:
        epsilon: lower clip of the ratio, 1 - epsilon. The ratio is a product over tokens: with several optimizer steps
            per rollout, long answers soon reach any clip.
        epsilon_high: upper clip, 1 + epsilon_high; None takes epsilon.
        delta: cap of the ratio where the advantage is negative (dual clip); None is off.
        beta: weight of the KL to the reference policy; 0 is off. It enters as each sequence's token mean.
        kl: estimator of that KL; default `K3()`.
        entropy_coef: weight of the entropy bonus.
    """

    def ratio(self, inputs: LossInputs) -> Tensor:
        """`exp(sum of the log ratio)` [B, 1]."""
        return _sequence_ratio(inputs, "sequence")


def _sequence_ratio(inputs: LossInputs, level: str) -> Tensor:
    log_ratio_BT = masked_log_ratio(inputs.policy_logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
    ratio_B1 = level_ratio(log_ratio_BT, inputs.mask_BT, level)
    return torch.where(inputs.mask_BT.any(dim=-1, keepdim=True), ratio_B1, 1.0)
