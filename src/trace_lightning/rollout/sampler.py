"""Drawing a token, and what the trainer needs to know about the draw.

The draw itself, counter-based and with its log-probability, is `trace_kernels.sampling`. Truncated sampling adds a
question: over which tokens was the distribution renormalised? When the answer is recorded, the kept tokens are chosen
here by a top-k, so that there are never more of them than are recorded, whatever ties there are. Without a record a
small top-k goes the same way, being faster there; everything else is cut by the kernel at a threshold.

What was left out: penalties (repetition, presence). They make the sampled distribution depend on history in a way that
the trainer would have to replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_kernels.sampling import sample_tokens
from trace_lightning.types import SamplingParams

_SORTED_TOP_K = 1024  # up to here finding the k largest is faster than searching for a threshold


@dataclass
class Sampled:
    """Token ids int64 [N], FP32 log-probs [N] under the sampled distribution, and what else is recorded of it.

    Support ids [N, K] padded with -1; or the K most likely ids and their log-probs, both [N, K], most likely first.
    """

    token_ids: Tensor
    logprobs: Tensor
    support_ids: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None


def sample(
    logits_NV: Tensor, params: SamplingParams, seed: Tensor, uid_N: Tensor, sample_N: Tensor, position_N: Tensor
) -> Sampled:
    """Draw one token per row of logits.

    Args:
        logits_NV: [N, V], before the temperature.
        params: temperature and truncation; its seed is not read.
        seed: int64 [1].
        uid_N: int64 counter, the prompt's uid.
        sample_N: int64 counter, the number of the sample.
        position_N: int64 counter, the position of the drawn token.
    """
    counters = uid_N, sample_N, position_N, seed
    if params.truncated and (params.record_support or 0 < params.top_k <= _SORTED_TOP_K):
        kept_NV, support = truncate(logits_NV.float() / params.temperature, params)
        return Sampled(*sample_tokens(kept_NV, *counters), support if params.record_support else None)
    token_ids, logprobs = sample_tokens(
        logits_NV,
        *counters,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    if not params.record_logprobs:
        return Sampled(token_ids, logprobs)
    topk_logprobs, topk_ids = most_likely(logits_NV, params)
    return Sampled(token_ids, logprobs, topk_ids=topk_ids, topk_logprobs=topk_logprobs)


def most_likely(logits_NV: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """FP32 log-probs of the `record_logprobs` most likely tokens, and their ids; [N, min(record_logprobs, V)]."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / params.temperature, dim=-1)
    values, order = logprobs_NV.topk(min(params.record_logprobs, logits_NV.shape[-1]), dim=-1)
    return values, order


def truncate(logits_NV: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tempered logits with -inf outside top-k, then top-p, then min-p (vLLM's order), and the ids that are left.

    The ids are [N, min(record_support, V)], most likely first, padded with -1; `record_support` implies a top-k.
    """
    limits = [k for k in (params.top_k, params.record_support) if k > 0]
    values, order = logits_NV.topk(min([*limits, logits_NV.shape[-1]]), dim=-1)
    probs = values.softmax(-1)
    keep = probs.cumsum(-1) - probs < params.top_p  # the mass before a token: the one that crosses top_p stays
    keep &= probs >= params.min_p * probs[:, :1]
    kept = torch.full_like(logits_NV, float("-inf"))
    kept.scatter_(-1, order, values.masked_fill(~keep, float("-inf")))
    support = order.masked_fill(~keep, -1)
    missing = min(params.record_support, logits_NV.shape[-1]) - support.shape[1]
    return kept, torch.nn.functional.pad(support, (0, missing), value=-1)
