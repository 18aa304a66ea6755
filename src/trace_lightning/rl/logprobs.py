"""Log-probabilities of given tokens: the one function behind training, scoring and the parity tests.

Trainer and rollout are compared token by token, so every number that enters such a comparison has to come from the
same arithmetic: FP32 log-softmax of `logits / temperature`. A second implementation, however right, would show up as
mismatch between the two policies.

    hidden [N, D] --lm_head, `chunk_size` rows at a time--> logits [n, V] --FP32, / T--> log-softmax --> [n], [n, K]

The [N, V] logits are the largest tensor of a training step (32k tokens x 152k words is 20 GB in FP32), so they never
exist: each chunk is checkpointed and computes its logits again in the backward pass. What was left out: a fused kernel,
and `logit - logsumexp`, which is cheaper but loses the log-probs of confident tokens: at a logit of 30, FP32 cannot
tell -1e-6 from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    *,
    temperature: float,
    support_NK: Tensor | None = None,
    chunk_size: int = 1024,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(lm_head(hidden) / temperature), and the entropy there.

    Row n of `hidden_ND` is the state that predicts `targets_N[n]`; callers shift and pick the completion tokens. Rows
    do not influence each other, so the result does not depend on `chunk_size` beyond the rounding that the matmul
    inside `lm_head` may choose for another number of rows.

    Args:
        hidden_ND: [N, D], any float dtype; N may be 0, which keeps the graph connected.
        lm_head: maps hidden [n, D] to logits [n, V]; deterministic, because the backward pass calls it again.
        targets_N: [N] int64 token ids in [0, V).
        temperature: the sampling temperature of the rollout, > 0.
        support_NK: [N, K] int64 ids, distinct per row and padded with -1, that truncated sampling could have drawn.
            The softmax then runs over those alone, as the sampler's did.
        chunk_size: rows whose logits exist at one time.
        with_entropy: whether to compute the entropy.
        entropy_gradient: whether the entropy carries a gradient too (an entropy bonus); the backward pass then makes it
            again, at the cost of a few more [n, V] tensors. Implies `with_entropy`.

    Returns:
        `logprobs_N` FP32, differentiable in `hidden_ND` and the head's parameters; `entropy_N` FP32 in nats, detached
        without `entropy_gradient`, NaN if `with_entropy` is off (unmeasured, so that it cannot be logged as a number).

    Raises:
        ValueError: temperature or chunk size out of range, shapes that do not belong together, or a target that is not
            in its support.
    """
    none_N0 = targets_N.new_empty(len(targets_N), 0)
    logprobs_N, entropy_N, _ = token_and_topk_logprobs(
        hidden_ND,
        lm_head,
        targets_N,
        none_N0,
        temperature=temperature,
        support_NK=support_NK,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
    )
    return logprobs_N, entropy_N


def token_and_topk_logprobs(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    topk_NK: Tensor,
    *,
    temperature: float,
    support_NK: Tensor | None = None,
    chunk_size: int = 1024,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logprobs`, and the log-probabilities of K more ids per row under the same softmax.

    Args:
        hidden_ND: as there, like all arguments below that are not named.
        lm_head: as there.
        targets_N: as there.
        topk_NK: [N, K] int64 ids, padded with -1. K may be 0; above 0 it excludes `support_NK`.
        temperature: as there.
        support_NK: as there.
        chunk_size: as there.
        with_entropy: as there.
        entropy_gradient: as there.

    Returns:
        `logprobs_N`, `entropy_N`, and `topk_logprobs_NK` FP32, differentiable like the first, -inf at the padding.

    Raises:
        ValueError: as there, and for `topk_NK` of another length or together with `support_NK`.
    """
    _check(hidden_ND, targets_N, support_NK, temperature, chunk_size)
    if topk_NK.ndim != 2 or len(topk_NK) != len(targets_N):
        raise ValueError(f"topk {tuple(topk_NK.shape)}: expected [{len(targets_N)}, K]")
    if support_NK is not None and topk_NK.shape[1]:
        raise ValueError("log-probs of the most likely tokens belong to untruncated sampling, which has no support")

    def score(
        hidden_nD: Tensor, targets_n: Tensor, topk_nK: Tensor, support_nK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = lm_head(hidden_nD)
        index = targets_n
        if support_nK is not None:
            index = (support_nK == targets_n[:, None]).int().argmax(dim=-1)
            logits = logits.gather(-1, support_nK.clamp(min=0)).masked_fill(support_nK < 0, -torch.inf)
        logprobs_nV = torch.log_softmax(logits.float() / temperature, dim=-1)
        logprobs_n = logprobs_nV.gather(-1, index[:, None]).squeeze(-1)
        topk_logprobs_nK = logprobs_nV.gather(-1, topk_nK.clamp(min=0)).masked_fill(topk_nK < 0, -torch.inf)
        if entropy_gradient:
            return logprobs_n, _entropy_with_gradient(logprobs_nV), topk_logprobs_nK
        # Last on purpose: the recomputation stops at the last tensor the backward pass needs, so entropy is not redone.
        entropy_n = _entropy(logprobs_nV) if with_entropy else torch.full_like(logprobs_n, torch.nan).detach()
        return logprobs_n, entropy_n, topk_logprobs_nK

    parts = []
    for start in range(0, max(len(targets_N), 1), chunk_size):
        rows = slice(start, start + chunk_size)
        support = None if support_NK is None else support_NK[rows]
        if torch.is_grad_enabled():
            arguments = hidden_ND[rows], targets_N[rows], topk_NK[rows], support
            parts.append(checkpoint(score, *arguments, use_reentrant=False))
        else:
            parts.append(score(hidden_ND[rows], targets_N[rows], topk_NK[rows], support))
    logprobs, entropies, topk_logprobs = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(topk_logprobs)


def _entropy(logprobs_nV: Tensor) -> Tensor:
    # entr(0) is 0, where p * log p would be 0 * -inf for words outside the support.
    terms_nV: Tensor = torch.special.entr(logprobs_nV.detach().exp())
    return terms_nV.sum(dim=-1)


def _entropy_with_gradient(logprobs_nV: Tensor) -> Tensor:
    # Not by entr, whose derivative at 0 is infinite.
    known_nV = torch.where(logprobs_nV > -torch.inf, logprobs_nV, 0.0)
    return -(logprobs_nV.exp() * known_nV).sum(dim=-1)


def _check(
    hidden_ND: Tensor, targets_N: Tensor, support_NK: Tensor | None, temperature: float, chunk_size: int
) -> None:
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: log-probs need the sampling temperature of the rollout, above 0 (greedy "
            "decoding has none; score it with 1.0)"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1")
    if hidden_ND.ndim != 2 or targets_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)} and targets {tuple(targets_N.shape)}: expected [N, D] and [N], one state "
            "per target"
        )
    if support_NK is None:
        return
    if support_NK.ndim != 2 or support_NK.shape[0] != targets_N.shape[0]:
        raise ValueError(f"support {tuple(support_NK.shape)}: expected [{targets_N.shape[0]}, K]")
    missing = int((support_NK != targets_N[:, None]).all(dim=-1).sum())
    if missing:
        raise ValueError(
            f"{missing} of {len(targets_N)} targets are not in their support, so their log-prob would be -inf. Pass "
            "completion tokens only, with the support recorded when they were drawn (sampling.record_support)."
        )
