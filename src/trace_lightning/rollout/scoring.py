"""Teacher-forced scoring: the policy's log-probs of tokens that a rollout drew, for training and parity alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.models.sharding import as_forward
from trace_lightning.quantization.rounding import GuidedRounding, Rounding
from trace_lightning.rl.logprobs import token_and_topk_logprobs
from trace_lightning.rollout.microbatch import MicroBatch


@dataclass(frozen=True)
class Scores:
    """What the policy says of the masked tokens; 0 elsewhere.

    `logprobs_BT` FP32; `entropy_BT` FP32, detached unless its gradient was asked for; `topk_logprobs_BTK` FP32, of the
    ids that the rollout recorded (-inf where there are fewer than K); None if it recorded none.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    topk_logprobs_BTK: Tensor | None


def score(policy: PreTrainedModel, micro: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """FP32 log-probs and detached entropies [B, T] of the masked tokens, 0 elsewhere; see `score_all`."""
    scores = score_all(policy, micro, temperature=temperature)
    return scores.logprobs_BT, scores.entropy_BT


def score_all(
    policy: PreTrainedModel,
    micro: MicroBatch,
    *,
    temperature: float,
    rounding: Rounding | None = None,
    entropy_gradient: bool = False,
) -> Scores:
    """Everything that losses may ask of the policy about one micro-batch.

    The last token of each sequence is never fed: nothing is predicted from it, and the rollout did not feed it either.
    `rounding` None takes what training does: guided where there is a record, to nearest elsewhere.
    """
    if rounding is None and micro.guidance is not None:
        rounding = GuidedRounding(micro.guidance)
    return Scores(*as_forward(policy, _score, policy, micro, temperature, rounding, entropy_gradient))


def _score(
    policy: PreTrainedModel, micro: MicroBatch, temperature: float, rounding: Rounding | None, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden_BTD = final_hidden(policy, micro.token_ids_BT[:, :-1], rounding)
    predicted_BT = micro.mask_BT[:, 1:]
    targets_N, topk_NK = micro.token_ids_BT[:, 1:][predicted_BT], micro.topk_ids_NK
    logprobs_N, entropy_N, topk_logprobs_NK = token_and_topk_logprobs(
        hidden_BTD[predicted_BT],
        logits_head(policy),
        targets_N,
        targets_N.new_empty(len(targets_N), 0) if topk_NK is None else topk_NK,
        temperature=temperature,
        support_NK=micro.support_NK,
        entropy_gradient=entropy_gradient,
    )
    if not len(logprobs_N):  # an empty micro-batch still needs a path to every parameter
        logprobs_N = logprobs_N + hidden_BTD.sum() * 0
    zeros = torch.zeros(micro.mask_BT.shape, dtype=torch.float32, device=micro.mask_BT.device)
    return (
        zeros.masked_scatter(micro.mask_BT, logprobs_N),
        zeros.masked_scatter(micro.mask_BT, entropy_N),
        None if topk_NK is None else spread(topk_logprobs_NK, micro.mask_BT),
    )


def spread(values_NK: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T, K] with one row of `values_NK` per masked token, in row-major order, and 0 elsewhere."""
    zeros = torch.zeros(*mask_BT.shape, values_NK.shape[1], dtype=values_NK.dtype, device=values_NK.device)
    return zeros.masked_scatter(mask_BT.unsqueeze(-1), values_NK)
