"""Pure functions behind the metric classes: masked sums that can be merged, and what is derived from them.

A mean of means is wrong as soon as micro-batches or ranks hold unequal numbers of tokens. So nothing here averages
early: `*_sums` turns tensors into sums, counts and extremes, which add up, and `*_metrics` turns merged sums into named
numbers. A quantity without a token behind it is absent from the result, never 0 or NaN.

The sums hold `rho - 1`, not `rho`, because mismatch is small: of `mean rho**2 = 1.00003` FP32 keeps two digits behind
the 1.0000, of `mean (rho**2 - 1) = 3e-5` it keeps seven. The moments of probabilities are FP64 for the same reason.

    rho = pi_policy / pi_rollout    delta = log rho    [B, T] aligned with the token    FP32 sums, int64 counts

What was left out: products of ratios over a sequence (they grow with its length and say more about it than about the
gap; `sequence_gap` divides by the length).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_lightning.metrics.histogram import NUM_BINS, QUANTILES, quantile, ratio_histogram
from trace_lightning.rl.kl import k3
from trace_lightning.rl.losses import LOG_RATIO_LIMIT, SumCount, masked_log_ratio, sum_count

# How each entry of `divergence_sums` merges, and its neutral element; lists are vectors.
DIVERGENCE_STATES: dict[str, tuple[str, float | int | list[int] | list[float]]] = {
    "num_tokens": ("sum", 0),
    "abs_sum": ("sum", 0.0),
    "signed_sum": ("sum", 0.0),
    "k3_sum": ("sum", 0.0),
    "reverse_sum": ("sum", 0.0),
    "reverse_k3_sum": ("sum", 0.0),
    "ratio_excess_sum": ("sum", 0.0),
    "square_excess_sum": ("sum", 0.0),
    "abs_excess_sum": ("sum", 0.0),
    "abs_max": ("max", 0.0),
    "log_ratio_max": ("max", float("-inf")),
    "log_ratio_min": ("min", float("inf")),
    "histogram": ("sum", [0] * NUM_BINS),
    "probability_moments": ("sum", [0.0] * 5),
    "num_sequences": ("sum", 0),
    "sequence_abs": ("sum", 0.0),
    "sequence_signed": ("sum", 0.0),
    "sequence_abs_max": ("max", 0.0),
}


def neutral_state(name: str) -> Tensor:
    """The neutral element of one entry of `DIVERGENCE_STATES`; moments are FP64."""
    return torch.tensor(DIVERGENCE_STATES[name][1], dtype=torch.float64 if name == "probability_moments" else None)


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
        policy_logprobs: FP32 [B, T] (or [T], one sequence), the trainer's log-probs of the sampled tokens, before any
            update on them.
        rollout_logprobs: FP32, same shape, as the rollout reported them.
        mask: bool, same shape, the sampled tokens.

    Raises:
        ValueError: shapes that differ.
    """
    if not policy_logprobs.shape == rollout_logprobs.shape == mask.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (policy_logprobs, rollout_logprobs, mask))
        raise ValueError(f"policy, rollout and mask have shapes {shapes}: one log-prob per token on both sides")
    policy, rollout = policy_logprobs.float(), rollout_logprobs.float()
    delta = policy - rollout
    bounded = masked_log_ratio(policy, rollout, mask)  # for exp; delta stays true
    return {
        "num_tokens": mask.sum(),
        "abs_sum": masked_sum(delta.abs(), mask),
        "signed_sum": masked_sum(-delta, mask),
        "k3_sum": masked_sum(k3(-bounded), mask),
        "reverse_sum": masked_sum(bounded.exp() * bounded, mask),
        "reverse_k3_sum": masked_sum(bounded.exp() * k3(bounded), mask),
        "ratio_excess_sum": masked_sum(torch.expm1(bounded), mask),
        "square_excess_sum": masked_sum(torch.expm1(2 * bounded), mask),
        "abs_excess_sum": masked_sum(torch.expm1(bounded.abs()), mask),
        "abs_max": masked_max(delta.abs(), mask, 0.0),
        "log_ratio_max": masked_max(bounded, mask, -torch.inf),
        "log_ratio_min": -masked_max(-bounded, mask, -torch.inf),
        "histogram": ratio_histogram(bounded, mask),
        "probability_moments": probability_moments(policy, rollout, mask),
        **sequence_sums(delta, mask),
    }


def probability_moments(policy: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """FP64 [5] sums of x, y, x*x, y*y, x*y over masked tokens; x and y are the two sides' probabilities, minus 1.

    The shift leaves the correlation alone, and a policy that is nearly certain (x near 0) keeps its digits.
    """
    x, y = (torch.where(mask, torch.expm1(logprobs.double()), 0.0).flatten() for logprobs in (policy, rollout))
    return torch.stack([x.sum(), y.sum(), x @ x, y @ y, x @ y])


def sequence_sums(delta: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over sequences of their mean `delta`, signed and absolute, their number, and the largest."""
    length = mask.sum(-1)
    gap = torch.where(mask, delta, 0.0).sum(-1) / length.clamp(min=1)
    some = length > 0
    return {
        "num_sequences": some.sum(),
        "sequence_abs": masked_sum(gap.abs(), some),
        "sequence_signed": masked_sum(gap, some),
        "sequence_abs_max": masked_max(gap.abs(), some, 0.0),
    }


def pearson(sums: Tensor, count: Tensor) -> Tensor:
    """Pearson correlation from `probability_moments` [5] over `count` values, FP32; NaN if a side does not vary.

    A variance below 1e-14 of the mean square is the rounding of FP64 sums.
    """
    x, y, xx, yy, xy = (sums / count).unbind()
    x_variance, y_variance = xx - x * x, yy - y * y
    varies = (x_variance > 1e-14 * xx) & (y_variance > 1e-14 * yy)
    correlation = (xy - x * y) / (x_variance * y_variance).sqrt()
    return torch.where(varies, correlation.clamp(-1, 1), torch.nan).float()


def divergence_metrics(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Named mismatch metrics from (merged) `divergence_sums`; empty if no token was seen.

    Tokens and the prefixes before them were drawn by the rollout. So both directions of KL are averages, over the
    rollout's prefixes, of the KL between the two next-token distributions; neither is the KL between the two
    distributions of whole sequences. The direction KL(trainer, rollout) asks for tokens of the trainer, and gets them
    by importance weights: unbiased where the rollout can draw what the trainer would, and of a variance that is set by
    the few largest ratios. k1 and k3 are those of http://joschu.net/blog/kl-approx.html. Log-ratios are clamped to
    +-20 (`rl.losses.LOG_RATIO_LIMIT`) inside every `exp`.

    * `sampling/sampling_logp_difference/{mean,max}`: |delta| (names of TRL)
    * `sampling/importance_sampling_ratio/{min,mean,max}`: rho per token (names of TRL)
    * `sampling/importance_sampling_ratio/{p01,p50,p99}`: its quantiles, log rho exact to 4 % (`histogram.quantile`)
    * `sampling/probability_pearson`: correlation of the two sides' probabilities of the drawn tokens, absent where one
      side gives all of them the same
    * `rollout_corr/kl`: mean of -delta, the k1 estimate of KL(rollout, trainer)
    * `rollout_corr/k3_kl`: mean of `rho - log rho - 1`, the same KL with less variance
    * `rollout_corr/reverse_kl`: mean of `rho log rho`, the weighted k1 estimate of KL(trainer, rollout)
    * `rollout_corr/reverse_k3_kl`: mean of `rho (1 / rho + log rho - 1)`, the same, never negative (NeMo-RL's
      "policy_kl" lacks the weight rho)
    * `rollout_corr/chi2_token`: mean of `rho**2`, minus 1
    * `rollout_corr/ess`: effective sample size `1 / mean((rho / mean rho)**2)`, 1 is perfect
    * `rollout_corr/token_mult_prob_error`: mean of `exp |delta|`, 1 is perfect (NeMo-RL)
    * `rollout_corr/sequence_gap/{mean,max}`: |mean delta of a sequence| over sequences
    * `rollout_corr/ppl_ratio`: exp of the mean over sequences of `log(ppl_trainer / ppl_rollout)` = -(mean delta)
    """
    if not sums["num_tokens"]:
        return {}
    mean = {name: value / sums["num_tokens"] for name, value in sums.items() if name.endswith("_sum")}
    mean_ratio = 1 + mean["ratio_excess_sum"]
    quantiles = {
        f"sampling/importance_sampling_ratio/{name}": quantile(sums["histogram"], share).exp()
        for name, share in QUANTILES.items()
    }
    log_ppl_ratio = -sums["sequence_signed"] / sums["num_sequences"]
    correlation = pearson(sums["probability_moments"], sums["num_tokens"])
    return {
        "sampling/sampling_logp_difference/mean": mean["abs_sum"],
        "sampling/sampling_logp_difference/max": sums["abs_max"],
        "sampling/importance_sampling_ratio/min": sums["log_ratio_min"].exp(),
        "sampling/importance_sampling_ratio/mean": mean_ratio,
        "sampling/importance_sampling_ratio/max": sums["log_ratio_max"].exp(),
        **quantiles,
        **({} if correlation.isnan() else {"sampling/probability_pearson": correlation}),
        "rollout_corr/kl": mean["signed_sum"],
        "rollout_corr/k3_kl": mean["k3_sum"],
        "rollout_corr/reverse_kl": mean["reverse_sum"],
        "rollout_corr/reverse_k3_kl": mean["reverse_k3_sum"],
        "rollout_corr/chi2_token": mean["square_excess_sum"],
        "rollout_corr/ess": mean_ratio.square() / (1 + mean["square_excess_sum"]),
        "rollout_corr/token_mult_prob_error": 1 + mean["abs_excess_sum"],
        "rollout_corr/sequence_gap/mean": sums["sequence_abs"] / sums["num_sequences"],
        "rollout_corr/sequence_gap/max": sums["sequence_abs_max"],
        "rollout_corr/ppl_ratio": log_ppl_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(),
    }


def argmax_agreement(topk_logprobs_BTK: Tensor, mask_BT: Tensor) -> SumCount:
    """Of how many drawn tokens the trainer's most likely token is provably the rollout's: (sum, count).

    The rollout records its K most likely tokens, likeliest first, so its own is known. The trainer's is known to be the
    same if no recorded token is likelier for it and no other can be, for all others share `1 - sum exp`. What is not
    proven counts as disagreement: the share is a lower bound, and exact where K tokens hold most of the mass.

    Args:
        topk_logprobs_BTK: FP32, the trainer's log-probs of the recorded tokens, in the rollout's order.
        mask_BT: bool, the drawn tokens.
    """
    first_BT, best_BT = topk_logprobs_BTK[..., 0], topk_logprobs_BTK.amax(-1)
    rest_BT = 1 - topk_logprobs_BTK.exp().sum(-1)
    return sum_count((first_BT >= best_BT) & (first_BT.exp() >= rest_BT), mask_BT)


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
