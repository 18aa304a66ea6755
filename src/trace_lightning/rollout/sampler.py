"""Drawing a token, and the log-probability it was drawn with.

Randomness is counter-based: one uniform number per (seed, prompt uid, sample, position), by a hash. The same sequence
comes out whatever else is in the batch, in whatever order the scheduler ran it, and after a resume. The token is the
inverse of the cumulative distribution at that number, summed in FP64 so that the tail of a large vocabulary counts.

What was left out: penalties (repetition, presence). They make the sampled distribution depend on history in a way that
the trainer would have to replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_lightning.types import SamplingParams


@dataclass
class Sampled:
    """Token ids int64 [N], FP32 log-probs [N] under the sampled distribution, support ids [N, K] padded with -1."""

    token_ids: Tensor
    logprobs: Tensor
    support_ids: Tensor | None


def _mix(h: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 (wrapping); `>>` is arithmetic, so the sign bits are masked off."""
    h = (h ^ ((h >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    h = (h ^ ((h >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return h ^ ((h >> 31) & 0x1FFFFFFFF)


def counter_uniform(seed: int, *counters: Tensor) -> Tensor:
    """FP64 [N] in [0, 1) from a seed and int64 counters [N]; the same counters always give the same number."""
    h = _mix(torch.full_like(counters[0], (seed + 0x632BE5AB) % 2**62))
    for counter in counters:
        h = _mix(h ^ _mix(counter + 0x1E3779B97F4A7C15))
    return ((h >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def truncate(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """Logits with -inf outside top-k, then top-p, then min-p (vLLM's order); `record_support` implies a top-k."""
    limits = [k for k in (params.top_k, params.record_support) if k > 0]
    k = min([*limits, logits_NV.shape[-1]])
    values, order = logits_NV.topk(k, dim=-1)
    probs = values.softmax(-1)
    keep = probs.cumsum(-1) - probs < params.top_p  # the mass before a token: the one that crosses top_p stays
    keep &= probs >= params.min_p * probs[:, :1]
    kept = torch.full_like(logits_NV, float("-inf"))
    return kept.scatter(-1, order, values.masked_fill(~keep, float("-inf")))


def _support(logits_NV: Tensor, size: int) -> Tensor:
    values, order = logits_NV.topk(min(size, logits_NV.shape[-1]), dim=-1)
    return order.masked_fill(values == float("-inf"), -1)


def sample(logits_NV: Tensor, params: SamplingParams, uid_N: Tensor, sample_N: Tensor, position_N: Tensor) -> Sampled:
    """Draw one token per row of FP32 logits.

    Args:
        logits_NV: FP32 [N, V], before the temperature.
        params: temperature and truncation.
        uid_N: int64 counter, the prompt's uid.
        sample_N: int64 counter, the number of the sample.
        position_N: int64 counter, the position of the drawn token.
    """
    if params.temperature == 0:
        logprobs_NV = logits_NV.log_softmax(-1)
        logprobs, token_ids = logprobs_NV.max(-1)
        return Sampled(token_ids, logprobs, None)
    logits_NV = logits_NV / params.temperature
    if params.truncated:
        logits_NV = truncate(logits_NV, params)
    logprobs_NV = logits_NV.log_softmax(-1)
    cumulative = logprobs_NV.double().exp().cumsum(-1)
    target = counter_uniform(params.seed, uid_N, sample_N, position_N) * cumulative[:, -1]
    token_ids = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    token_ids = token_ids.clamp_max(logits_NV.shape[-1] - 1)
    support = _support(logits_NV, params.record_support) if params.truncated and params.record_support else None
    return Sampled(token_ids, logprobs_NV.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), support)
