"""Teacher-forced scoring: the policy's log-probs of tokens that a rollout drew. Training, parity and probe share it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.quantization.rounding import GuidedRounding
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rollout.microbatch import MicroBatch


def score(policy: PreTrainedModel, micro: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """FP32 log-probs and detached entropies [B, T] of the masked tokens, 0 elsewhere.

    The last token of each sequence is never fed: nothing is predicted from it, and the rollout did not feed it either.
    """
    rounding = None if micro.guidance is None else GuidedRounding(micro.guidance)
    hidden_BTD = final_hidden(policy, micro.token_ids_BT[:, :-1], rounding)
    predicted_BT = micro.mask_BT[:, 1:]
    logprobs_N, entropy_N = token_logprobs(
        hidden_BTD[predicted_BT],
        logits_head(policy),
        micro.token_ids_BT[:, 1:][predicted_BT],
        temperature=temperature,
        support_NK=micro.support_NK,
    )
    if not len(logprobs_N):  # an empty micro-batch still needs a path to every parameter
        logprobs_N = logprobs_N + hidden_BTD.sum() * 0
    zeros = torch.zeros(micro.mask_BT.shape, dtype=torch.float32, device=micro.mask_BT.device)
    logprobs_BT = zeros.masked_scatter(micro.mask_BT, logprobs_N)
    return logprobs_BT, zeros.masked_scatter(micro.mask_BT, entropy_N)
