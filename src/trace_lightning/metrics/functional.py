"""Pure functions behind the metric classes: masked sums that can be merged, and what is derived from them.

A mean of means is wrong as soon as micro-batches or ranks hold unequal numbers of tokens. So nothing here averages
early: `*_sums` turns tensors into sums, counts and extremes, which add up, and `*_metrics` turns merged sums into named
numbers. A quantity without a token behind it is absent from the result, never 0 or NaN.

The sums hold `rho - 1`, not `rho`, because mismatch is small: of `mean rho**2 = 1.00003` FP32 keeps two digits behind
the 1.0000, of `mean (rho**2 - 1) = 3e-5` it keeps seven.

    rho = pi_policy / pi_rollout    delta = log rho    [B, T] aligned with the token    FP32 sums, int64 counts
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_lightning.rl.losses import k3, masked_log_ratio

# How each entry of `divergence_sums` merges, and its neutral element.
DIVERGENCE_STATES: dict[str, tuple[str, float | int]] = {
    "num_tokens": ("sum", 0),
    "abs_sum": ("sum", 0.0),
    "signed_sum": ("sum", 0.0),
    "k3_sum": ("sum", 0.0),
    "ratio_excess_sum": ("sum", 0.0),
    "square_excess_sum": ("sum", 0.0),
    "abs_excess_sum": ("sum", 0.0),
    "abs_max": ("max", 0.0),
    "log_ratio_max": ("max", float("-inf")),
    "log_ratio_min": ("min", float("inf")),
}


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """FP32 sum of `values` where the bool `mask` is True; what stands elsewhere, NaN included, does not matter."""
    return torch.where(mask, values.float(), 0.0).sum()


def masked_max(values: Tensor, mask: Tensor, empty: float) -> Tensor:
    """FP32 maximum of `values` where `mask` is True, at least `empty`."""
    floor = torch.full((1,), empty, dtype=torch.float32, device=values.device)
    return torch.cat([torch.where(mask, values.float(), empty).flatten(), floor]).amax()


def divergence_sums(policy_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sufficient statistics of the gap between trainer and rollout; the keys are those of `DIVERGENCE_STATES`.

    Args:
        policy_logprobs: FP32, the trainer's log-probs of the sampled tokens, before any update on them.
        rollout_logprobs: FP32, same shape, as the rollout reported them.
        mask: bool, same shape, the sampled tokens.

    Raises:
        ValueError: shapes that differ.
    """
    if not policy_logprobs.shape == rollout_logprobs.shape == mask.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (policy_logprobs, rollout_logprobs, mask))
        raise ValueError(f"policy, rollout and mask have shapes {shapes}: one log-prob per token on both sides")
    delta = policy_logprobs.float() - rollout_logprobs.float()
    bounded = masked_log_ratio(policy_logprobs.float(), rollout_logprobs.float(), mask)  # for exp; delta stays true
    return {
        "num_tokens": mask.sum(),
        "abs_sum": masked_sum(delta.abs(), mask),
        "signed_sum": masked_sum(-delta, mask),
        "k3_sum": masked_sum(k3(-bounded), mask),
        "ratio_excess_sum": masked_sum(torch.expm1(bounded), mask),
        "square_excess_sum": masked_sum(torch.expm1(2 * bounded), mask),
        "abs_excess_sum": masked_sum(torch.expm1(bounded.abs()), mask),
        "abs_max": masked_max(delta.abs(), mask, 0.0),
        "log_ratio_max": masked_max(bounded, mask, -torch.inf),
        "log_ratio_min": -masked_max(-bounded, mask, -torch.inf),
    }


def divergence_metrics(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Named mismatch metrics from (merged) `divergence_sums`; empty if no token was seen.

    * `sampling/sampling_logp_difference/{mean,max}`: |delta| (names of TRL)
    * `sampling/importance_sampling_ratio/{min,mean,max}`: rho per token (names of TRL)
    * `rollout_corr/kl`: mean of -delta, the k1 estimate of KL(rollout, trainer)
    * `rollout_corr/k3_kl`: mean of `rho - log rho - 1`, the same KL with less variance
    * `rollout_corr/chi2_token`: mean of `rho**2`, minus 1
    * `rollout_corr/ess`: effective sample size `1 / mean((rho / mean rho)**2)`, 1 is perfect
    * `rollout_corr/token_mult_prob_error`: mean of `exp |delta|`, 1 is perfect (NeMo-RL)
    """
    if not sums["num_tokens"]:
        return {}
    mean = {name: value / sums["num_tokens"] for name, value in sums.items() if name.endswith("_sum")}
    mean_ratio = 1 + mean["ratio_excess_sum"]
    return {
        "sampling/sampling_logp_difference/mean": mean["abs_sum"],
        "sampling/sampling_logp_difference/max": sums["abs_max"],
        "sampling/importance_sampling_ratio/min": sums["log_ratio_min"].exp(),
        "sampling/importance_sampling_ratio/mean": mean_ratio,
        "sampling/importance_sampling_ratio/max": sums["log_ratio_max"].exp(),
        "rollout_corr/kl": mean["signed_sum"],
        "rollout_corr/k3_kl": mean["k3_sum"],
        "rollout_corr/chi2_token": mean["square_excess_sum"],
        "rollout_corr/ess": mean_ratio.square() / (1 + mean["square_excess_sum"]),
        "rollout_corr/token_mult_prob_error": 1 + mean["abs_excess_sum"],
    }


def moments(values: Tensor) -> Tensor:
    """(count, mean, sum of squared deviations) of the values that are not NaN, FP32 [3]; zeros for none."""
    values = values.float()[~values.isnan()]
    if not values.numel():
        return torch.zeros(3, device=values.device)
    mean = values.mean()
    return torch.stack([torch.ones_like(mean) * values.numel(), mean, (values - mean).square().sum()])


def merge_moments(parts: Tensor) -> Tensor:
    """Moments of a union from the moments of its parts, [S, ..., 3] to [..., 3] (Chan et al. 1979).

    Adding sums of squares would lose the std of rewards that are large and close together.
    """
    count, mean, squares = parts.unbind(-1)
    total = count.sum(0)
    joint_mean = (count * mean).sum(0) / total.clamp(min=1)
    joint_squares = (squares + count * (mean - joint_mean).square()).sum(0)
    return torch.stack([total, joint_mean, joint_squares], dim=-1)
