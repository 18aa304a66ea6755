"""What a held-out set is judged by: mean reward and length, and for sets with settings of their own pass@k.

pass@k is the chance that at least one of k completions is right. Drawing k and looking would be noisy; from n drawn
completions of which c are right, `1 - C(n - c, k) / C(n, k)` is its unbiased estimate (Chen et al. 2021, arXiv
2107.03374). `1 - (1 - c / n)^k` is biased, and is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_lightning.types import RolloutBatch


def pass_at_k(rewards_PG: Tensor, correct_from: float, k: int) -> Tensor:
    """Unbiased pass@k of each problem, FP64 [P]; NaN where fewer than k completions were scored.

    Args:
        rewards_PG: [problems, completions], NaN where not scored.
        correct_from: a reward counts as correct from here on.
        k: completions of which one has to be right, at least 1.
    """
    scored_PG = ~rewards_PG.isnan()
    n_P = scored_PG.sum(1, keepdim=True).double()
    c_P = ((rewards_PG >= correct_from) & scored_PG).sum(1, keepdim=True).double()
    # C(n - c, k) / C(n, k) as a product over i = n - c + 1 ... n of (1 - k / i), which does not overflow
    i_G = torch.arange(1, rewards_PG.shape[1] + 1, device=rewards_PG.device, dtype=torch.float64)
    factors_PG = torch.where((i_G > n_P - c_P) & (i_G <= n_P), (1 - k / i_G).clamp(min=0), 1.0)
    return torch.where(n_P[:, 0] >= k, 1 - factors_PG.prod(1), torch.nan)


def evaluation_values(batch: RolloutBatch) -> dict[str, tuple[Tensor, int]]:
    """Means over a held-out batch, each with the number of completions, or of problems, behind it.

    `reward` and `mean_length`; for a set with settings of its own also `mean@n`, the share of correct completions among
    the n drawn, and each `pass@k`, as means over problems. What cannot be measured is absent.
    """
    assert batch.rewards_B is not None
    scored = batch.rewards_B[~batch.rewards_B.isnan()]
    lengths = torch.tensor([float(c.num_drawn) for c in batch.completions])
    values = {"reward": (scored.mean(), len(scored))} if len(scored) else {}
    values["mean_length"] = (lengths.mean(), len(lengths))
    spec = batch.evaluation
    if spec is None:
        return values
    rewards_PG = batch.rewards_B.view(-1, batch.num_generations)
    wanted = {f"mean@{spec.num_generations}": 1} | {f"pass@{k}": k for k in spec.pass_at}
    for name, k in wanted.items():
        shares_P = pass_at_k(rewards_PG, spec.correct_from, k)
        shares_P = shares_P[~shares_P.isnan()]
        if len(shares_P):
            values[name] = (shares_P.mean().float(), len(shares_P))
    return values
